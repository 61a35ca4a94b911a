"""Trying layouts from shapes alone: which device holds what of each array on a mesh, and the line that asks for it."""

from .array import Array as Array
from .array import Laid as Laid
from .explorer import Explorer as Explorer
from .line import Line as Line
from .named import arrays_of as arrays_of
from .named import typed as typed
from .place import Place as Place
from .stepped import Stepped as Stepped
from .stepped import stepped as stepped
