"""A step under its plan as a program of plain JAX, to take home."""

from .cells import Piece as Piece
from .code import Code as Code
from .code import code_of as code_of
from .last import last_call as last_call
