"""Sharding strategies: turn the facts about a step and a request into a plan, a spec and a reason for each array."""

from .planner import plan as plan
from .pmap_axes import find_pmap_axes as find_pmap_axes
from .step_facts import find_facts as find_facts
