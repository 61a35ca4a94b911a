"""Finds the train step of a cell, binds the sharded one in its place, and runs the cell."""

from .arguments import Missing as Missing
from .arguments import annotated_specs as annotated_specs
from .arguments import from_namespace as from_namespace
from .binding import Binding as Binding
from .code import Cell as Cell
from .code import name_of as name_of
from .code import parse as parse
from .code import run as run
from .failed import Failed as Failed
from .find import find_step as find_step
from .find import functions_in as functions_in
from .lengths import Lengths as Lengths
from .lines import own_lines as own_lines
from .needed import as_text as as_text
from .needed import needed as needed
from .rehearsal import Awaited as Awaited
from .rehearsal import Deciding as Deciding
from .rehearsal import Rehearsal as Rehearsal
from .rehearsal import Stopped as Stopped
from .room import Room as Room
from .statements import Statement as Statement
from .statements import Unit as Unit
from .statements import below_magic as below_magic
from .statements import untimed as untimed
from .values import Step as Step
