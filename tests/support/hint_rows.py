"""Cells that show each hint that has a line to paste, and what is to be true once the line is followed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxshard_magic.report import Advice, Report

Claim = Callable[[Report, Report, Advice], bool]

IMPORTS = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
S = jax.ShapeDtypeStruct
"""
STEP = """
@jax.jit
def train_step(params, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss
"""
ADAM = """
@jax.jit
def train_step(params, opt, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, opt = tx.update(grads, opt)
    return optax.apply_updates(params, updates), opt, loss
"""
RUN = "params, loss = train_step(params, x)\n"
RUN_ADAM = "params, opt, loss = train_step(params, opt, x)\n"
LAYERS = """
def loss_fn(params, x):
    for w in params:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x ** 2)
"""
SCANNED = """
def loss_fn(params, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params)[0] ** 2)
"""
OVER_TIME = """
def loss_fn(params, x):
    cell = lambda h, x: (jnp.tanh(x @ params["input"] + h @ params["hidden"]), None)
    return jnp.mean(jax.lax.scan(cell, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[0] ** 2)
params, x = {name: S((512, 512), "float32") for name in ("input", "hidden")}, S((64, 32, 512), "float32")
"""
MLPS = """
def loss_fn(params, x):
    for p in params:
        x = x + jnp.tanh(x @ p["up"]) @ p["down"]
    return jnp.mean(x ** 2)
"""
PAIR = """
def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)
"""


def peak(report: Report) -> int:
    assert report.memory is not None
    return max(d.peak or 0 for d in report.memory.per_device)


def limit(report: Report) -> int:
    assert report.memory is not None
    return report.memory.per_device[0].limit or 0


def held(report: Report, path: str) -> int:
    return sum(leaf.bytes_per_device for leaf in report.leaves if path in leaf.path)


def waited(report: Report, axis: str) -> float:
    return sum(c.waited or 0.0 for c in report.collectives or () if axis in (c.axes or ()))


def step_s(report: Report) -> float:
    assert report.timing is not None and report.timing.predicted_step_s is not None
    return report.timing.predicted_step_s


def fits(before: Report, after: Report, _: Advice) -> bool:
    return peak(after) <= limit(before) < peak(before)


def saves_at_most(before: Report, after: Report, advice: Advice) -> bool:
    assert advice.saves is not None and "up to" in advice.message
    return 0 < peak(before) - peak(after) <= 1.01 * advice.saves * peak(before)


def saves(before: Report, after: Report, advice: Advice) -> bool:
    assert advice.saves is not None
    return 0.8 * advice.saves * peak(before) <= peak(before) - peak(after)


def less(before: Report, after: Report, _: Advice) -> bool:
    return peak(after) < peak(before)


def quicker(before: Report, after: Report, _: Advice) -> bool:
    return step_s(after) < step_s(before)


def cuts(path: str) -> Claim:
    return lambda before, after, _: held(after, path) < held(before, path)


def waits_less(axis: str) -> Claim:
    return lambda before, after, _: waited(after, axis) < waited(before, axis)


def bubble_as_told(before: Report, after: Report, advice: Advice) -> bool:
    assert before.pipeline is not None and after.pipeline is not None
    told = f"{100 * after.pipeline.bubble.predicted:.1f}%"
    return after.pipeline.bubble.predicted < before.pipeline.bubble.predicted and told in advice.message


def sends_less(before: Report, after: Report, _: Advice) -> bool:
    sent = [sum(c.wire_bytes for c in r.collectives or ()) for r in (before, after)]
    return sent[1] < sent[0]


def sends_less_and_is_quicker(before: Report, after: Report, advice: Advice) -> bool:
    return sends_less(before, after, advice) and quicker(before, after, advice)


def spec_of(report: Report, path: str) -> tuple:
    return next(leaf.spec for leaf in report.leaves if leaf.path == path)


def divided(report: Report) -> set[str]:
    return {leaf.path for leaf in report.leaves if any(leaf.spec)}


@dataclass(frozen=True)
class Row:
    """A cell that shows a hint, and the claim that its line makes.

    `code`: of the hint, of which `fix` is the line, or begins it. `line`: what stands behind `%%shard`. `cell`: below
    it; `before`: the cell above. `claim`: of the reports before and after, beside that the hint is gone. `pasted`:
    where code goes, "here", in the place of that line of the cell, or "above" the cell. `raises`: what the cell then
    ends with. `mesh`: of the notebook. `slow`: takes seconds.
    """

    code: str
    fix: str
    line: str
    cell: str
    before: str
    claim: Claim = lambda before, after, advice: True
    pasted: str = ""
    raises: type[BaseException] | None = None
    mesh: str = "data=8"
    slow: bool = False


BIG = "params = [S((16384, 16384), 'float32') for _ in range({})]; x = S((64, 16384), 'float32')"
LONG = "tx = optax.adam(1e-3); params = S((8, 4096, 4096), 'float32'); opt = jax.eval_shape(tx.init, params)\n"
STATE = "params = {{'a': jnp.ones(({0}, {1})), 'b': jnp.ones(({1}, {0}))}}; x = jnp.ones((64, {0}))"
PIPED = LAYERS + "params, x = [jnp.ones((64, 64)) / 64] * 4, jnp.ones((64, 64))"
BATCH_NORM = """
def loss_fn(params, stats, x):
    for w in params:
        x = x + jnp.tanh(x @ w)
    x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1.0)
    return jnp.mean((x - 1) ** 2), 0.9 * stats + 0.1 * x.mean(0)
params, stats, x = [jnp.eye(64) / 8] * 4, jnp.zeros(64), jnp.sin(jnp.arange(64.0 * 64)).reshape(64, 64)
"""
NORMED = """
@jax.jit
def train_step(params, stats, x):
    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), stats, loss
params, stats, loss = train_step(params, stats, x)
"""

WIDE = "params = [jnp.ones((512, 512))] * 4; x = jnp.ones((64, 512)); tx = optax.adam(1e-3); opt = tx.init(params)"
UP_DOWN = """
params = [{{"up": S((256, 1024), "float32"), "down": S((1024, 256), "float32")}}] * 2
x = S(({}, 256), "float32")
"""
TABLE = """
def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] + params["table"].mean()) ** 2)
params = {"a": jnp.ones((64, 256)), "b": jnp.ones((256, 64)), "table": jnp.ones((512, 64))}
x = jnp.ones((64, 64))
"""
SHUFFLED_DATA = """
params, order = jnp.ones((16, 8)), jnp.arange(64)
batch = {"x": jnp.ones((64, 16)), "y": jnp.ones((64, 8))}
"""
SHUFFLED = """
@jax.jit
def train_step(params, batch, order):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch["x"] @ p - batch["y"]) ** 2))(params)
    return params - grads, loss, order[::-1]
params, loss, order = train_step(params, batch, order)
"""
ATTENTION = """
def loss_fn(params, x):
    q, k, v = (jnp.moveaxis((x @ w).reshape(2, 8192, 4, 8), 2, 1) for w in params)
    scores = jnp.where(jnp.arange(8192)[:, None] >= jnp.arange(8192), q @ jnp.moveaxis(k, 2, 3), -1e9)
    return jnp.mean((jax.nn.softmax(scores) @ v) ** 2)
params, x = S((3, 32, 32), "float32"), S((2, 8192, 32), "float32")
"""
RESHARDED = """
def train_step(w, batch):
    def loss(w):
        x = jax.lax.with_sharding_constraint(batch * w, NamedSharding(mesh, P("y", None, "x")))
        # here
        x = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P(None, ("x", "y"), None)))
        return jnp.sum(x ** 2)
    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value
w, value = train_step(w, batch)
"""
PMAPPED_DATA = """
n = len(jax.devices())
params, stats = jnp.ones((8, 16, 4)), jnp.zeros((8, 4))
x = jnp.arange(8 * 4 * 16.0).reshape(8, 4, 16) / 100
"""
PMAPPED = """
def train_step(params, stats, x):
    def loss(params):
        y = x @ params
        return jnp.mean((y - stats) ** 2), 0.9 * stats + 0.1 * y.mean(0)
    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
    # here
    return params - 0.1 * jax.lax.pmean(grads, "batch"), stats, jax.lax.pmean(value, "batch")
params, stats, value = train_step(params, stats, x)
"""
LOOP = """
batches = (np.ones((n, 8), np.float32) for n in (60, 60, 60, 40))
# here
for batch in batches:
    params, loss = train_step(params, batch)
"""
COUNTED = """
for n in range(4):
    params, loss = train_step(params, x, jnp.float32(n))
"""

ROWS: Sequence[Row] = (
    Row("does-not-fit", "%%shard fsdp", "dp --on v5e --dry-run", STEP, LAYERS + BIG.format(9), saves_at_most),
    Row(
        "does-not-fit",
        "--microbatches",
        "fsdp --on v5e --dry-run",
        ADAM,
        SCANNED + LONG + "x = S((524288, 4096), 'float32')",
        lambda before, after, advice: fits(before, after, advice) and saves(before, after, advice),
    ),
    Row(
        "does-not-fit",
        "--donate",
        "fsdp --on v5e --dry-run",
        ADAM,
        SCANNED + LONG.replace("8, 4096, 4096", "24, 16384, 16384") + "x = S((64, 16384), 'float32')",
        saves_at_most,
    ),
    Row(
        "would-fit",
        "--remat full",
        "fsdp --on v5e --dry-run",
        ADAM,
        SCANNED + LONG + "x = S((524288, 4096), 'float32')",
        fits,
    ),
    Row(
        "would-fit",
        "%mesh v5e:4x4 data=16",
        "fsdp --dry-run",
        ADAM,
        SCANNED + LONG + "x = S((524288, 4096), 'float32')",
        fits,
        mesh="v5e:2x4 data=8",
        slow=True,
    ),
    Row(
        "replicated-state",
        "%%shard fsdp",
        "dp --on v5e --dry-run",
        STEP,
        LAYERS + BIG.format(5),
        cuts("params"),
    ),
    Row("not-donated", "--donate", "dp", ADAM + RUN_ADAM, LAYERS + WIDE, saves_at_most),
    Row(
        "not-cut",
        "--rule",
        "fsdp",
        STEP + RUN,
        PAIR + STATE.format(300, 254),
        cuts("a"),
        mesh="data=2 batch=4",
    ),
    Row(
        "not-cut",
        "--mesh",
        "dp+fsdp",
        STEP + RUN,
        "def loss_fn(params, x): return jnp.mean(jnp.einsum('bi,ijk->bjk', x, params) ** 2)\n"
        "params, x = jnp.ones((36, 36, 36)), jnp.ones((64, 36))",
        cuts("params"),
        mesh="data=1 fsdp=8",
    ),
    Row("idle-axis", "--mesh data=8", "dp", STEP + RUN, PIPED, cuts("x"), mesh="data=4 model=2"),
    Row("idle-axis", "%%shard tp+dp@other", "tp", STEP + RUN, PIPED, cuts("x"), mesh="other=4 model=2"),
    Row("idle-axis", "--spec \"x=P('data')\"", "spmd", STEP + RUN, PIPED, cuts("x")),
    Row("whole", "--rule", "tp", STEP + RUN, TABLE, cuts("table"), mesh="data=2 model=4"),
    Row(
        "no-batch",
        "--spec",
        "dp",
        STEP + RUN,
        "def loss_fn(params, x): return jnp.sum(params * x)\nparams = x = jnp.ones((64, 16))",
        cuts("x"),
    ),
    Row(
        "rows-whole",
        "--spec",
        "dp",
        SHUFFLED,
        SHUFFLED_DATA,
        lambda before, after, _: divided(after) >= divided(before) | {"order"},
    ),
    Row(
        "batch-guess",
        "--spec",
        "dp",
        STEP + RUN,
        "def loss_fn(params, x): return jnp.mean((x @ params) ** 2)\n"
        "params, x = jnp.ones((16, 16)), jnp.ones((64, 32, 16))",
        lambda before, after, _: spec_of(after, "x") == (None, "data", None),
    ),
    Row(
        "every-trip",
        "--reduce once-gathered",
        "fsdp --on v5e --dry-run",
        STEP,
        OVER_TIME,
        sends_less_and_is_quicker,
    ),
    Row("float32", "--precision bf16", "dp --on v5e --dry-run", STEP, LAYERS + WIDE, quicker),
    Row(
        "wide-axis",
        "--mesh",
        "tp --on v5e --dry-run",
        STEP,
        MLPS + UP_DOWN.format(8192),
        waits_less("model"),
        mesh="data=2 model=4",
    ),
    Row(
        "slow-tp",
        "--mesh",
        "tp --on h100 --dry-run",
        STEP,
        MLPS + UP_DOWN.format(512),
        waits_less("model"),
        mesh="cpu:16 model=2 data=8",
        slow=True,
    ),
    Row(
        "slow-fsdp",
        "%%shard dp+fsdp",
        "fsdp --on v100 --dry-run",
        STEP,
        MLPS + UP_DOWN.format(512),
        quicker,
        mesh="cpu:16 data=16",
        slow=True,
    ),
    Row(
        "attention-gathers",
        "%%shard sp --attention heads",
        "sp --dry-run",
        STEP,
        ATTENTION,
        sends_less,
        mesh="seq=4",
    ),
    Row(
        "full-remat",
        "x = jax.lax.with_sharding_constraint",
        "spmd",
        RESHARDED,
        "mesh = get_ipython().run_line_magic('mesh', 'x=4 y=2')\nw, batch = jnp.ones(()), jnp.ones((16, 32, 64))",
        sends_less,
        pasted="here",
        mesh="x=4 y=2",
    ),
    Row(
        "state-differs",
        "stats = jax.lax.pmean(stats, 'batch')",
        "pmap",
        PMAPPED,
        PMAPPED_DATA,
        pasted="here",
        slow=True,
    ),
    Row(
        "whole-batch",
        "--microbatches 8",
        "pp --check",
        NORMED,
        BATCH_NORM,
        lambda _, after, __: after.pipeline.microbatches == 8 and after.check.passed,
        mesh="pipe=2",
        slow=True,
    ),
    Row(
        "few-microbatches",
        "--microbatches 8",
        "pp --microbatches 2 --dry-run",
        STEP,
        PIPED,
        bubble_as_told,
        mesh="pipe=2",
        slow=True,
    ),
    Row(
        "better-schedule",
        "--schedule zb-h1",
        "pp --microbatches 16 --dry-run",
        STEP,
        PIPED,
        bubble_as_told,
        mesh="pipe=4",
        slow=True,
    ),
    Row(
        "recompiled",
        "batches = (b for b in batches",
        "dp --pad",
        STEP + LOOP,
        LAYERS + "params = [jnp.eye(8)]",
        lambda _, after, __: after.timing.calls == 3,
        pasted="here",
    ),
    Row(
        "loss-astray",
        'jax.config.update("jax_debug_nans", True)',
        "dp",
        STEP.replace("loss, grads =", "x = jnp.log(params[0].mean() - 0.1 * n) + x\n    loss, grads =").replace(
            "(params, x)", "(params, x, n)", 1
        )
        + COUNTED,
        LAYERS + "params, x = [jnp.eye(8)], jnp.ones((64, 8))",
        slow=True,
        pasted="above",
        raises=FloatingPointError,
    ),
)

# Those whose line rests on what a clock says: the tests that follow them.
ELSEWHERE = {
    "uneven-stages": "pipeline.test_pipeline_advice.test_only_a_run_can_be_balanced_by_measured_time_and_only_once",
    "input-bound": "analysis.test_advice_loop.test_the_text_to_paste_is_a_loop_over_a_feed_and_fed_loops_get_none",
    "waits-for-python": "analysis.test_advice_recorded.test_the_text_to_paste_tells_one_sharded_step_in_a_hundred",
}
