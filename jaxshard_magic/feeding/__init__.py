"""Batches taken ahead of a loop and put where the step has them."""

from .feed import Feed as Feed
from .feed import feed as feed
