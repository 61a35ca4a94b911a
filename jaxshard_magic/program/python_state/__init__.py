"""The Python values that a step reads beside its arguments, and what its code does to them.

Called plainly a step reads `lr`, `config.rate` or a variable of a closure anew each time, and appends to a list each
time; traced, it does so once. So a step that is not jitted is looked at for what its code reaches (`Reach`): globals,
closures, defaults, attributes, and what containers among them hold. A snapshot (`PythonState`) is taken when the step
is called. It tells

- after a trace what the code has changed (`changes`), which is undone and refused, or is done by another trace as well;
- at each later call, in microseconds, whether anything read is not what it was (`inputs_now`): the step is traced anew,
  and numbers and arrays that change become inputs of the program.

A step that is jitted has none of this: JAX freezes what it reads, too. For the same reason functions that are jitted
are not looked into.

Footguns:
- An attribute that is asked of a call's result or of an element is read on every object that is reached.
- What only running code would tell is not seen: `__getattr__` without a `__dict__`, files, the environment.
- NumPy arrays of more than 64 KiB are compared by identity; of more than 20,000 places those met first.
"""

from .each_call import traced_as_each_call as traced_as_each_call
from .reach import Given as Given
from .reach import Kind as Kind
from .reach import Reach as Reach
from .state import NO_INPUTS as NO_INPUTS
from .state import Inputs as Inputs
from .state import PythonState as PythonState
