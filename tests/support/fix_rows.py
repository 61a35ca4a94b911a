"""Cells that are refused with a fix, one for each place in the package that writes one, and why others have no cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from support.hint_rows import IMPORTS as IMPORTS
from support.hint_rows import LAYERS, RUN, STEP

DATA = LAYERS + "params, x = [jnp.ones((64, 64)) / 64] * 4, jnp.ones((64, 64))"
PMAPPED = """
def train_step(params, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    # here
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), jax.lax.pmean(loss, "{0}")
params, loss = train_step(params, x)
"""
REDUCED = PMAPPED.replace("# here", 'grads = jax.lax.pmean(grads, "{0}")')
ATTENTION = """
def loss_fn(params, x):
    q, k, v = (jnp.moveaxis((x @ w).reshape(8, 16, 4, 4), 2, 1) for w in params)
    return jnp.mean((jax.nn.softmax(q @ jnp.moveaxis(k, 2, 3)) @ v) ** 2)
params, x = jnp.ones((3, 16, 16)) / 16, jnp.ones((8, 16, 16))
"""


@dataclass(frozen=True)
class Refused:
    """A cell that is refused. `where`: the function that refuses it, `module.function`; `fix`: how its fix begins.
    `line`: what stands behind `%%shard`, or a whole line of `%shard` or `%mesh`, without a cell. `pasted`: where a fix
    that is code goes, "here", in the place of that line of the cell, or "above" the cell. `slow`: takes seconds."""

    where: str
    fix: str
    line: str
    cell: str = STEP + RUN
    before: str = DATA
    mesh: str = "data=8"
    pasted: str = ""
    slow: bool = False


ROWS: Sequence[Refused] = (
    Refused("config.strategy_text.parse_strategy", "%%shard auto", "auto+dp", slow=True),
    Refused("config.strategy_text._axes", "%mesh", "fsdp+tp"),
    Refused("config.strategy_text._no_pipeline", "%mesh", "pp+fsdp", slow=True),
    Refused("config.strategy_text._pipeline_fits", "%%shard pp+dp", "pp@data+dp@data"),
    Refused("config.strategy_text._pipeline_fits", "--stages 2", "pp --stages 4", mesh="pipe=2"),
    Refused(
        "config.request._check_attention",
        "%%shard fsdp+sp --attention heads",
        "fsdp --attention heads",
        before=ATTENTION,
    ),
    Refused(
        "config.pipeline_microbatches.pipeline_options",
        "%%shard pp+fsdp --stages 2",
        "fsdp --stages 2",
        slow=True,
    ),
    Refused(
        "config.options.scheduled",
        "--microbatches",
        "pp --schedule interleaved --chunks 2 --microbatches 3",
        mesh="pipe=2",
        slow=True,
    ),
    Refused(
        "pipeline.allowed_starts._too_few_error",
        "--stages 2",
        "pp --stages 4",
        before="from jaxshard_magic import cut\n"
        + DATA.replace("x = x +", "x = cut(x) +").replace(
            "[jnp.ones((64, 64)) / 64] * 4", "[jnp.ones((64, 64)) / 64] * 2"
        ),
        mesh="pipe=4",
        slow=True,
    ),
    Refused("strategies.plan_checks.check_examples_divide", "--pad", "dp", before=DATA + "[:60]"),
    Refused(
        "strategies.pmap_axes._device_axis_cuts",
        "%mesh batch=4",
        "pmap",
        "train_step = jax.pmap(lambda x: jax.lax.psum(x, 'batch'), axis_name='batch')\ny = train_step(x)",
        "x = jnp.ones((4, 16))",
        mesh="batch=8",
    ),
    Refused(
        "strategies.pmap_axes._map_split_batch",
        "--spec",
        "pmap",
        REDUCED.format("batch"),
        "def loss_fn(params, x): return jnp.sum(params[: len(x)] * x)\nparams = x = jnp.ones((64, 16))",
    ),
    Refused(
        "strategies.pmap_axes._raise_unknown_names", "%mesh model=8", "pmap", REDUCED.format("model"), mesh="pipe=8"
    ),
    Refused(
        "strategies.pmap_axes._raise_no_batch_axis",
        "%mesh data=8",
        "pmap",
        STEP.replace("    return", "    # here\n    return") + RUN,
        mesh="model=8",
    ),
    Refused(
        "strategies.pmap._raise_unreduced_state",
        "grads = jax.lax.pmean(grads, 'batch')",
        "pmap",
        PMAPPED.format("batch"),
        pasted="here",
    ),
    Refused(
        "strategies.pmap._raise_differing_result",
        "loss = jax.lax.pmean(loss, 'batch')",
        "pmap",
        REDUCED.format("batch")
        .replace('jax.lax.pmean(loss, "batch")', "loss")
        .replace("    return", "    # here\n    return"),
        pasted="here",
    ),
    Refused(
        "compilation.tracing.trace_call",
        "%%shard pmap",
        "dp",
        "train_step = jax.pmap(lambda x: jax.lax.psum(x, 'batch'), axis_name='batch')\ny = train_step(x)",
        "x = jnp.ones((8, 16))",
    ),
    Refused(
        "compilation.pipelined_step.rewrite_in_microbatches",
        "--schedule 1f1b",
        "pp --schedule interleaved --chunks 2",
        before=DATA.replace("jnp.mean(x ** 2)", "jnp.mean(jax.nn.log_softmax(x @ x.T))"),
        mesh="pipe=2",
        slow=True,
    ),
    Refused(
        "program.argument_errors.check_leaves",
        "jax.tree_util.register_dataclass(Batch)",
        "dp",
        STEP.replace("(params, x)\n", "(params, x.x)\n") + RUN,
        DATA
        + """
from dataclasses import dataclass
@dataclass
class Batch:
    x: jax.Array
x = Batch(x)
""",
        pasted="above",
    ),
    Refused(
        "program.argument_errors.check_result_value",
        "jax.tree_util.register_dataclass(Result)",
        "dp",
        """
def train_step(params, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return Result(grads, loss)
result = train_step(params, x)
""",
        DATA
        + """
from dataclasses import dataclass
@dataclass
class Result:
    grads: list
    loss: jax.Array
""",
        pasted="above",
    ),
    Refused("notebook.completions.unknown_command_error", "%shard history 1", "%shard 1"),
    Refused("report.records.writable_path", "!mkdir -p", "%shard code --file {folder}/there/step.py"),
    Refused(
        "api.default_mesh",
        "%mesh cpu:16",
        "pp --stages 16",
        before=DATA.replace("* 4", "* 16"),
        mesh="",
        slow=True,
    ),
)

# Fixes that are for the machine, or that say in words what code is to become.
WITHOUT_A_CELL: Mapping[str, str] = {
    "history.database._history_error": "an upgrade of the package",
    "history.store._damaged": "a row of the history that is damaged on disk",
    "report.records._schema_error": "an upgrade of the package",
    "packages.data_frame": "pandas is not installed",
    "targets.gpu._without": "the compiler is not installed",
    "targets.tpu.missing": "the compiler is not installed",
    "hosts.starting.options": "a package is not installed",
    "hosts.starting.start": "a package is too old",
    "demo.load_digits": "a package is not installed",
    "simulate.cpu_devices": "a variable of the environment, set before JAX starts",
    "config.mesh.choose": "another mesh beside an accelerator",
    "explorer.device_source._too_few": "a mesh of an explorer, which a cell makes for itself",
    "program.trace_errors.explain_trace_errors": "says in words what a line of the step is to become",
    "notebook.cells.cell_code.parse": "a magic whose place is the cell's first line; test_step_of_the_cell has it",
    "notebook.cells.step_finder._holds_loop": "how the function that is to be written begins",
    "notebook.cells.memory_guard.__exit__": "how a state is made of shapes; only where memory runs out",
    "step.multihost_calls._different_values_error": "of several hosts",
    "views.figures.roofline.roofline": "an option of the line that made the report; test_figures has it",
    "views.picture_sheet.png": "a package is not installed",
}
