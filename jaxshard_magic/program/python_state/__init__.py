"""Python values that a step reads besides its arguments, and the side effects of its code.

Called plainly, a step reads `lr`, `config.rate` or a closure variable anew at each call, and appends to a list each
time; traced, it does so once. For a step that is not jitted, `ReachableState` therefore collects all that its code
reaches: globals, closures, defaults, attributes, and elements of containers among these. `PythonState`, a snapshot
taken when the step is called, shows

- after a trace, changes made by the code (`changes`): they are undone and refused, unless a second trace does not make
  them again;
- at each later call, in microseconds, whether anything read has changed (`current_inputs`): the step is retraced, and
  numbers and arrays that change become inputs of the program.

A jitted step has no snapshot: JAX freezes all that it reads, too. For the same reason jitted functions called by a step
are not examined.

Footguns:
- An attribute of a call's result or of an element has no known object: it is read on every object reached.
- Reads that only running code reveals are not seen: `__getattr__` without a `__dict__`, files, the environment.
- NumPy arrays above 64 KiB are compared by identity; of more than 20,000 values only the first ones are compared.
"""

from .reachable import KnownParameters as KnownParameters
from .reachable import ReachableState as ReachableState
from .reachable import WatchKind as WatchKind
from .snapshot import NO_STATE_INPUTS as NO_STATE_INPUTS
from .snapshot import PythonState as PythonState
from .snapshot import StateInputs as StateInputs
from .snapshot import trace_without_side_effects as trace_without_side_effects
