"""Export a sharded step as a program of plain JAX.

The input is the source text of the notebook cells that the step needs. `expression_marks` names every expression of the
user's functions in a trace, `constraints` reads the sharding of each from the plan, and `edits` writes it into the
text. `casts` writes `--precision`, `microbatch_edits` microbatches and sums over devices, `remat` recomputation.
`edit_search` compiles the combinations and picks the closest to the plan. `generated_program` joins the text, tables of
specs and the functions of `step_functions` and `wrappers`.
"""

from .cells import UserStatement as UserStatement
from .code import Code as Code
from .code import generate_code as generate_code
from .latest_call import last_call as last_call
