"""Strategies: what is understood of a step, and what is asked of it -> where every array goes, and why."""

from .compose import plan as plan
from .spread import spread as spread
from .understand import understand as understand
