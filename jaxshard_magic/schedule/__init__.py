"""Pipeline schedules as data: order of actions on each rank, simulated times, bubbles and held activations. Pure
Python.

>>> from jaxshard_magic import schedule
>>> s = schedule.make("1f1b", stages=4, microbatches=8)
>>> round(schedule.simulate(s).bubble, 4)
0.2727
"""

from jaxshard_magic.schedule.actions import Action as Action
from jaxshard_magic.schedule.actions import Fused as Fused
from jaxshard_magic.schedule.compare import ScheduleComparison as ScheduleComparison
from jaxshard_magic.schedule.compare import compare as compare
from jaxshard_magic.schedule.costs import Costs as Costs
from jaxshard_magic.schedule.grid import Schedule as Schedule
from jaxshard_magic.schedule.grid import parse as parse
from jaxshard_magic.schedule.registry import NAMES as NAMES
from jaxshard_magic.schedule.registry import make as make
from jaxshard_magic.schedule.simulate import Event as Event
from jaxshard_magic.schedule.simulate import Simulation as Simulation
from jaxshard_magic.schedule.simulate import simulate as simulate
