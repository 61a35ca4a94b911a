"""All random operations: a name, how often it is drawn and what draws it."""

from . import elements, experts, loops, places, products
from .drafts import OPERATIONS

__all__ = ["OPERATIONS", "elements", "experts", "loops", "places", "products"]
