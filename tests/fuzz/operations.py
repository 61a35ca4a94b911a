"""All random operations: a name, how often it is drawn and what draws it."""

from . import elements, loops, places, products
from .drafts import OPERATIONS

__all__ = ["OPERATIONS", "elements", "loops", "places", "products"]
