"""A step under its plan as a program of plain JAX, to take home."""

from .code import Code as Code
from .code import code_of as code_of
from .pieces import Piece as Piece
