"""Layouts of arrays on a mesh, tried from shapes alone, and the `%%shard` line for a layout."""

from .arrays import ExploredArray as ExploredArray
from .arrays import ExploredLayout as ExploredLayout
from .arrays import find_arrays as find_arrays
from .arrays import parse_array_type as parse_array_type
from .device_source import DeviceSource as DeviceSource
from .explored_step import ExploredStep as ExploredStep
from .explored_step import explore_step as explore_step
from .explorer import Explorer as Explorer
from .line import ShardLine as ShardLine
