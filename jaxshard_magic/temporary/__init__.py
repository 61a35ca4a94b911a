"""Changes that last for a while, of the process, a thread or an object, which are undone whatever interrupts."""

from .changes import Held as Held
from .changes import Joined as Joined
from .changes import Opened as Opened
from .changes import Shared as Shared
from .changes import Temporary as Temporary
from .changes import Unfinished as Unfinished
from .changes import end_leftovers as end_leftovers
from .changes import within as within
from .values import ABSENT as ABSENT
from .values import Kept as Kept
from .values import Place as Place
from .values import Replaced as Replaced
from .values import Wrapped as Wrapped
from .values import attribute as attribute
from .values import code_of as code_of
from .values import elements as elements
from .values import handler as handler
from .values import item as item
from .whole import done_whole as done_whole
