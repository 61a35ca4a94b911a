"""Temporary changes to the process, a thread or an object, undone whatever interrupts."""

from .changes import AcquiredLock as AcquiredLock
from .changes import ChangeGroup as ChangeGroup
from .changes import OpenResource as OpenResource
from .changes import SharedChange as SharedChange
from .changes import TemporaryChange as TemporaryChange
from .changes import UndoUnlessFinished as UndoUnlessFinished
from .changes import end_abandoned as end_abandoned
from .changes import run_in_context as run_in_context
from .uninterrupted import run_uninterrupted as run_uninterrupted
from .values import ABSENT as ABSENT
from .values import Accessor as Accessor
from .values import Replaced as Replaced
from .values import Restored as Restored
from .values import Wrapped as Wrapped
from .values import attribute as attribute
from .values import function_code as function_code
from .values import item as item
from .values import list_elements as list_elements
from .values import signal_handler as signal_handler
