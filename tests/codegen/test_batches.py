"""What `%shard code` makes of `--microbatches`, `--reduce` and `--reduce-dtype`: the plan's numbers, and its moves."""

import ast
from importlib.util import find_spec

import jax
import numpy as np
import pytest
from conftest import Notebook
from jax.sharding import PartitionSpec as P
from support.taken_home import FIVE, Home, bare, code, proved

from jaxshard_magic.codegen.cells import SourceSpan
from jaxshard_magic.codegen.constraints import Constraint
from jaxshard_magic.codegen.microbatch_edits import GradientSums, drop_axes

pytestmark = pytest.mark.usefixtures("as_asked")
full = pytest.mark.full

LINES = [
    ("dp --microbatches 4 --reduce once", "data=4"),
    ("fsdp --microbatches 4 --reduce once", "data=4"),
    ("fsdp --microbatches 4 --reduce once-gathered", "data=4"),
    ("fsdp+tp --microbatches 2 --reduce once", "data=4 model=2"),
]
QUICK = {("linen_train_state", LINES[2][0]), ("dict_of_arrays", LINES[3][0])}
DRAWS = {"nnx_transformer"}  # dropout, one draw after the other
# Sums of partial products that are joined before devices add them up have no form in a cell.
JOINED = {("transformer_scanned", LINES[3][0])}

MODEL = """import jax, jax.numpy as jnp, numpy as np
def drawn(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / shape[0] ** 0.5, jnp.float32)
w = {"a": drawn(0, 256, 512), "b": jnp.zeros(512), "c": drawn(1, 512, 16)}
x = drawn(2, 32, 256)
key = jax.random.key(0)
def y_of(x):
    return jnp.sin(x[:, :16])
def errors(w, x):
    return (jnp.tanh(x @ w["a"] + w["b"]) @ w["c"] - y_of(x)) ** 2
def descend(w, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)
"""
SUM = """def train_step(w, x):
    loss, grads = jax.value_and_grad(lambda w: errors(w, x).sum() / 1000)(w)
    return descend(w, grads), loss
"""
ROWS = """def train_step(w, x):
    def loss_fn(w):
        each = errors(w, x).mean(-1)
        return each.mean(), each
    (loss, each), grads = jax.value_and_grad(loss_fn, has_aux=True)(w)
    return descend(w, grads), loss, each
"""
ALONE = """def train_step(w, x):
    grads = jax.grad(lambda w: jax.vmap(lambda row: errors(w, row[None]).mean())(x).mean())(w)
    return descend(w, grads)
"""
NORMALISED = """def train_step(w, x):
    x = x - x.max(0)
    loss, grads = jax.value_and_grad(lambda w: errors(w, x).mean())(w)
    return descend(w, grads), loss
"""
NOISY = """def train_step(w, x):
    x = x + jax.random.normal(key, x.shape)
    loss, grads = jax.value_and_grad(lambda w: errors(w, x).mean())(w)
    return descend(w, grads), loss
"""
TIME = """def train_step(w, x):
    def loss_fn(w):
        start = jnp.zeros((x.shape[0], 512))
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h + x @ w["a"]), None), start, None, length=4)
        return jnp.mean((h @ w["c"]) ** 2)
    loss, grads = jax.value_and_grad(loss_fn)(w)
    return descend(w, grads), loss
"""
IMAGES = """w, x = w["c"].reshape(1, 1, 32, 256), x.reshape(32, 2, 4, 32)
"""
CONVOLVED = """def train_step(w, x):
    def loss_fn(w):
        x_ = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.mean(x_ ** 2)
    loss, grads = jax.value_and_grad(loss_fn)(w)
    return w - 0.1 * grads, loss
"""
OBJECTS = """from flax import nnx
import optax
class Model(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(256, 512, rngs=rngs), nnx.Linear(512, 16, rngs=rngs)
    def __call__(self, x):
        return self.b(nnx.gelu(self.a(x)))
w = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(w, optax.sgd(0.1), wrt=nnx.Param)
"""
OBJECT_STEP = """@nnx.jit
def train_step(w, x, optimizer):
    loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y_of(x)) ** 2).mean())(w)
    optimizer.update(w, grads)
    return loss
"""


def rows():
    for home in FIVE:
        for line, mesh in LINES:
            mark = pytest.mark.ci if (home.name, line) in QUICK else full
            yield pytest.param(home, line, mesh, id=f"{home.name}-{line}", marks=mark)


@pytest.mark.parametrize(("home", "line", "mesh"), list(rows()))
def test_gradients_that_wait_for_the_last_microbatch_move_as_planned(notebook, tmp_path, home: Home, line, mesh):
    program = proved(notebook, tmp_path, home, line, mesh)
    if home.name in DRAWS:
        assert f"Without --reduce {line.split()[-1]}: " in program.text
        return
    assert "grads = in_shards(" in program.text and "Without --" not in program.text
    assert program.same is ((home.name, line) not in JOINED)


@pytest.mark.parametrize("home", [pytest.param(h, marks=full, id=h.name) for h in FIVE if h.name not in DRAWS])
@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_gradients_rounded_before_they_are_added_up_send_as_many_bytes(notebook, tmp_path, home: Home, strategy):
    program = code(notebook, home, f"{strategy} --reduce-dtype bf16", "data=4")
    assert bare(program, tmp_path).moves == program.moves
    assert "grads = in_shards(" in program.text and "Without --" not in program.text
    planned, sent = (sum(c.wire_bytes for c in found or ()) for found in (program.planned, program.sent))
    if (home.name, strategy) == ("transformer_scanned", "fsdp"):  # its plan scatters a lookup's gradient
        assert planned < sent and " more per device and step" in program.text
        return
    assert planned == sent  # a loop's gradients go one by one in the plan, together in the program


def run_of(
    notebook: Notebook,
    step: str,
    line: str,
    tmp_path,
    mesh: str = "data=4",
    model: str = MODEL,
    more: str = "",
):
    """The program of a step, and the numbers and moves that it has; they are those of the sharded step."""
    notebook.run(f"%mesh {mesh};")
    notebook.run(model)
    notebook.run(f'%%shard {line};\n{step}\nresult = train_step(w, x{more})\nchanged = {{"w": w}}')
    program = notebook.run("%shard code")
    run = bare(program, tmp_path)
    assert run.moves == program.moves
    return program, run


def numbers_of(named) -> dict[str, np.ndarray]:
    found = jax.tree_util.tree_flatten_with_path(named)[0]
    names = (jax.tree_util.keystr(p, simple=True, separator=".").removesuffix(".value") for p, _ in found)
    return {name: np.asarray(x) for name, (_, x) in zip(names, found, strict=True)}


def assert_close(notebook: Notebook, run, rtol: float = 1e-5) -> None:
    for name, x in numbers_of({"result": notebook["result"], "w": notebook["w"]}).items():
        np.testing.assert_allclose(run.numbers[name], x, rtol=0, atol=rtol * np.abs(x).max(), err_msg=name)


@pytest.mark.ci
def test_a_leaf_without_columns_is_taken_in_parts_like_others(notebook, tmp_path):
    step = """empty = jnp.zeros((32, 0))
def train_step(w, x, empty):
    def loss_fn(w):
        return errors(w, jnp.concatenate([x, empty], 1)).mean()
    loss, grads = jax.value_and_grad(loss_fn)(w)
    return descend(w, grads), loss
"""
    program, run = run_of(notebook, step, "dp --microbatches 4", tmp_path, more=", empty")
    assert program.same
    assert_close(notebook, run)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("step", "call"),
    [
        (SUM, "in_shards(microbatch, 4, x, mean=False, lie="),
        (ROWS, "in_shards(microbatch, 4, x, lie="),
        (ALONE, "in_shards(microbatch, 4, x, lie="),
    ],
    ids=["a sum", "one value for each example", "one example at a time"],
)
def test_sums_stay_sums_and_what_is_of_each_example_is_joined(notebook, tmp_path, step, call):
    program, run = run_of(notebook, step, "fsdp --microbatches 4 --reduce once-gathered", tmp_path)
    assert_close(notebook, run)
    assert program.same and call in program.text
    assert "def microbatch(x, w=gathered(w, {})):" in program.text


@pytest.mark.ci
def test_nothing_is_held_divided_over_the_examples_where_each_device_has_its_own(notebook, tmp_path):
    program, _ = run_of(notebook, ROWS, "fsdp+tp --microbatches 2 --reduce once", tmp_path, "data=4 model=2")
    held = [line for line in program.text.splitlines() if "hold(x @" in line]
    assert not any('P("data"' in line for line in held)


@pytest.mark.ci
def test_a_loop_over_time_is_added_up_after_it(notebook, tmp_path):
    program, run = run_of(notebook, TIME, "fsdp --reduce once", tmp_path)
    assert_close(notebook, run)
    assert program.same and 'in_shards(shard, 1, x, lie={"1.a": P(' in program.text


@pytest.mark.ci
def test_objects_are_read_from_copies_that_are_gathered_before(notebook, tmp_path):
    line = "fsdp --microbatches 4 --reduce once-gathered"
    program, run = run_of(notebook, OBJECT_STEP, line, tmp_path, model=MODEL + OBJECTS, more=", optimizer")
    assert_close(notebook, run)
    assert program.same and "def microbatch(x, w=gathered(w, {})):" in program.text
    assert 'lie={"1.a.kernel": P(' in program.text


@pytest.mark.ci
@pytest.mark.parametrize(("step", "why"), [(NORMALISED, "normalised"), (NOISY, "noisy")], ids=str)
def test_a_batch_that_the_step_changes_as_a_whole_is_not_taken_in_parts(notebook, tmp_path, step, why):
    program, run = run_of(notebook, step, "dp --microbatches 4 --reduce once", tmp_path)
    assert_close(notebook, run)
    assert "in_microbatches" not in program.text and "in_shards" not in program.text
    assert "Without --microbatches 4: " in program.text and "Without --reduce once: " in program.text


@pytest.mark.ci
def test_of_convolutions_no_device_has_its_own_gradients(notebook, tmp_path):
    program, run = run_of(notebook, CONVOLVED, "dp --microbatches 4 --reduce once", tmp_path, model=MODEL + IMAGES)
    assert_close(notebook, run)
    assert "in_microbatches(microbatch, 4, x)" in program.text and "in_shards" not in program.text
    assert "Without --reduce once: devices add gradients up where they are made" in program.text
    assert "XLA does not divide the gradients of convolutions by device" in program.text


EXACT = """import jax, jax.numpy as jnp, numpy as np
def held_by_bfloat16(seed):
    drawn = np.random.default_rng(seed).normal(size=(64, 512))
    return jnp.asarray(drawn, jnp.bfloat16).astype(jnp.float32)
w, x = jnp.zeros((512, 512)), (held_by_bfloat16(0), held_by_bfloat16(1))
"""
PRODUCT = """def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: ((x[0] @ w) * x[1]).sum())(w)
    return w - grad, loss
"""


@pytest.mark.ci
@pytest.mark.parametrize("line", ["dp --reduce-dtype bf16", "fsdp --microbatches 2 --reduce-dtype bf16"])
def test_gradients_are_rounded_to_bfloat16_before_devices_add_them_up(notebook, tmp_path, line):
    program, run = run_of(notebook, PRODUCT, line, tmp_path, "data=8", EXACT)
    a, b = (np.asarray(part, np.float64) for part in notebook["x"])
    off = np.abs(-run.numbers["result.0"] - a.T @ b).max() / np.abs(a.T @ b).max()
    assert 1e-4 < off < 2**-7  # float32 is 1e-6 off
    assert 'rounded=["1"], dtype="bfloat16"' in program.text and "Without --" not in program.text


@pytest.mark.ci
def test_a_type_that_changes_no_sum_changes_nothing_of_the_program(notebook, tmp_path):
    program, run = run_of(notebook, ROWS, "dp --reduce-dtype f32", tmp_path)
    assert_close(notebook, run)
    assert program.same and "in_shards" not in program.text and "Without --" not in program.text


@pytest.mark.ci
@pytest.mark.skipif(find_spec("libtpu") is None, reason="no TPU compiler: libtpu is not installed")
@pytest.mark.parametrize("line", ["dp", "fsdp", "dp --microbatches 2 --reduce once"])
def test_a_slice_sends_two_bytes_for_a_number(notebook, tmp_path, monkeypatch, line):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    notebook.run("%mesh v5e:2x4 data=8;")
    notebook.run(EXACT)
    notebook.run(f"%%shard {line} --reduce-dtype bf16;\n{PRODUCT}\nresult = train_step(w, x)")
    program = notebook.run("%shard code")
    assert program.same
    sums = [c.bytes for c in program.sent if c.kind != "all-gather" and c.bytes > 4]
    assert sums == [2 * 512 * 512]


def test_a_pin_of_one_device_is_divided_over_the_other_axes_alone():
    pin = Constraint(SourceSpan("cell", 1, 0, 1, 5), ('P("data")', 'P(("data", "fsdp"), None, ("fsdp", "model"))'))
    (found,) = drop_axes([pin], ("data", "fsdp"))
    assert found.specs == ("P()", 'P(None, None, "model")')


@pytest.mark.parametrize(
    ("rounded", "patterns"),
    [
        ({"1.a", "1.layers.0.w", "1.layers.1.w"}, ["1.*"]),
        ({"1.layers.0.w", "1.layers.1.w"}, ["1.layers.*.w"]),
        ({"1.a"}, ["1.a"]),
    ],
)
def test_rounded_sums_are_told_by_few_patterns(rounded, patterns):
    paths = ("0", "1.a", "1.layers.0.w", "1.layers.1.w")
    text = GradientSums(dict.fromkeys(paths, P()), frozenset(), frozenset(rounded), "bfloat16").argument_text()
    assert ast.literal_eval(text.partition("rounded=")[2].partition(", dtype")[0]) == patterns
