"""Finds the train step of a cell, binds the sharded one in its place, and runs the cell."""

from jaxshard_magic._cell.arguments import Missing as Missing
from jaxshard_magic._cell.arguments import annotated_specs as annotated_specs
from jaxshard_magic._cell.arguments import from_namespace as from_namespace
from jaxshard_magic._cell.binding import Binding as Binding
from jaxshard_magic._cell.code import Cell as Cell
from jaxshard_magic._cell.code import name_of as name_of
from jaxshard_magic._cell.code import parse as parse
from jaxshard_magic._cell.code import run as run
from jaxshard_magic._cell.failed import Failed as Failed
from jaxshard_magic._cell.find import Step as Step
from jaxshard_magic._cell.find import find_step as find_step
from jaxshard_magic._cell.lengths import Lengths as Lengths
from jaxshard_magic._cell.lines import own_lines as own_lines
from jaxshard_magic._cell.needed import as_text as as_text
from jaxshard_magic._cell.needed import needed as needed
from jaxshard_magic._cell.rehearsal import Awaited as Awaited
from jaxshard_magic._cell.rehearsal import Deciding as Deciding
from jaxshard_magic._cell.rehearsal import Rehearsal as Rehearsal
from jaxshard_magic._cell.rehearsal import Stopped as Stopped
from jaxshard_magic._cell.room import Room as Room
from jaxshard_magic._cell.statements import Statement as Statement
from jaxshard_magic._cell.statements import Unit as Unit
from jaxshard_magic._cell.statements import below_magic as below_magic
from jaxshard_magic._cell.statements import untimed as untimed
