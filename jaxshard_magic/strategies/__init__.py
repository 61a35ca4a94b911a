"""Strategies: a traced step and a mesh -> where every array goes, and why."""

from .compose import STRATEGIES, plan
from .names import AUTO, Part, jobs_of, parse_strategy, part_axes
from .spread import spread_of

__all__ = ["AUTO", "STRATEGIES", "Part", "jobs_of", "parse_strategy", "part_axes", "plan", "spread_of"]
