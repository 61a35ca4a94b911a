"""Prefetch of a loop's batches, and their transfer to the devices in the step's sharding."""

from .feed import Feed as Feed
from .feed import feed as feed
