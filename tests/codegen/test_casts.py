"""`%shard code` under `--precision`: casts at the cells' own lines, so that products run in the types of the plan."""

import re
import textwrap
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.forked import printed
from support.taken_home import FIVE, Home, bare, code, plain

from jaxshard_magic.analysis.hlo import parse_module

pytestmark = pytest.mark.usefixtures("as_asked")
ROUNDING = 2.0**-8  # of bfloat16
QUICK = ("dict_of_arrays", "linen_train_state")
LEFT = {"nnx_transformer": "1 of 17 products run in their own type"}  # nnx.Embed has a type of its own


def rows():
    marks = dict.fromkeys(QUICK, pytest.mark.ci)
    return [pytest.param(home, id=home.name, marks=marks.get(home.name, pytest.mark.full)) for home in FIVE]


def planned(notebook) -> dict[str, np.ndarray]:
    """What the step gave under its plan, by the names of `plain`."""
    kept = notebook.shell.user_ns
    named = jax.tree_util.tree_flatten_with_path({"result": kept["result"], **kept["changed"]})[0]
    arrays = {jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): x for path, x in named}
    return {
        name: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for name, x in arrays.items()
        if isinstance(x, (jax.Array, np.ndarray))
    }


def dots(folder) -> list[set[str]]:
    """The types of the operands of each product, before anything is compiled."""
    (text,) = (p.read_text() for p in folder.glob("hlo/*jit_program*before_optimizations.txt"))
    products = [
        (e, computation.instructions)
        for computation in parse_module(text).computations.values()
        for e in computation.instructions.values()
        if e.opcode == "dot"
    ]
    return [{made[name].shapes[0].dtype for name in e.operands} for e, made in products]


@pytest.mark.parametrize("home", rows())
def test_products_run_in_bfloat16_with_numbers_as_near_as_the_plans(notebook, tmp_path, home: Home):
    program = code(notebook, home, "fsdp --precision bf16", "data=4")
    run, there, full = bare(program, tmp_path), planned(notebook), plain(home)
    assert "Without --precision" not in program.text
    assert ("run in their own type" in program.text) is (home.name in LEFT)
    assert LEFT.get(home.name, "") in program.text
    kinds = dots(tmp_path)
    assert {"bf16"} in kinds
    if home.name not in LEFT:
        assert {"f32"} not in kinds
    assert run.moves == program.moves
    assert run.numbers.keys() == full.keys()
    # A weight that Adam has moved by its whole step says nothing of the size of its gradient; its moments do.
    moments = [name for name in full if re.search(r"\.[mn]u\.", name)]
    for name in moments or full:
        x = full[name]
        if name not in home.step.noise and x.dtype.kind == "f" and x.size:
            far = np.linalg.norm(run.numbers[name] - x)
            assert far <= 2 * np.linalg.norm(there[name] - x) + 4 * ROUNDING * np.linalg.norm(x), name


def test_each_operand_is_cast_where_a_product_reads_it_and_sums_stay_in_float32(notebook):
    text = squeezed(code(notebook, FIVE[0], "dp --precision bf16", "data=4"))
    assert 'x.astype(jnp.bfloat16)@layer["w"].astype(jnp.bfloat16)' in text
    assert '+layer["b"].astype(jnp.bfloat16)).astype(jnp.float32))' in text  # read by gelu
    assert '(x.astype(jnp.bfloat16)@last["w"].astype(jnp.bfloat16)).astype(jnp.float32)+last["b"]' in text


@pytest.mark.ci
@pytest.mark.skipif(find_spec("libtpu") is None, reason="no TPU compiler: libtpu is not installed")
def test_a_slice_adds_gradients_up_in_bfloat16_unless_the_line_asks_for_float32(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    as_they_come, wide = (
        code(notebook, FIVE[0], f"dp --precision bf16{more}", "v5e:2x4 data=8") for more in ("", " --reduce-dtype f32")
    )
    assert "with\n--reduce-dtype f32 on its line" in as_they_come.text
    assert as_they_come.moves is not None and wide.moves is not None
    assert as_they_come.moves["all-reduce", ("data",), 2 * 256 * 32] == 1
    assert wide.same and "on its line" not in wide.text
    assert wide.moves["all-reduce", ("data",), 4 * 256 * 32] == 1


CELL = """
import jax, jax.numpy as jnp

weights = {"a": jnp.ones((16, 32)) / 16, "b": jnp.ones((32, 16)) / 32, "c": jnp.ones((16, 16))}
images = jnp.arange(128.0).reshape(8, 16) / 128

"""
STEP = """
def train_step(weights, images):
    loss, gradients = jax.value_and_grad(loss_of)(weights, images)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

weights, loss = train_step(weights, images)
"""


def written(notebook, loss: str, line: str = "dp --precision bf16"):
    notebook.run("%mesh data=4;")
    notebook.run(CELL)
    notebook.run(f"%%shard {line};\n" + textwrap.dedent(loss) + STEP)
    return notebook.run("%shard code")


def squeezed(program) -> str:
    return re.sub(r"\s+|P\([^)]*\)|hold\(", "", program.text)


@pytest.mark.ci
def test_what_a_loop_carries_enters_it_in_the_type_that_it_is_carried_in(notebook):
    program = written(
        notebook,
        """
        def loss_of(w, x):
            def layer(h, _):
                return h + jax.nn.relu(h @ w["c"]), None
            h, _ = jax.lax.scan(layer, x, None, length=3)
            return (h @ w["a"]).mean()
        """,
    )
    assert "lax.scan(layer,x.astype(jnp.bfloat16),None,length=3)" in squeezed(program)
    assert float(run_alone(program)) == pytest.approx(float(notebook.shell.user_ns["loss"]), rel=0.02)


def test_softmax_and_norms_read_float32(notebook):
    program = written(
        notebook,
        """
        def loss_of(w, x):
            h = x @ w["a"]
            h = h * jax.lax.rsqrt(jnp.mean(jnp.square(h), -1, keepdims=True))
            return jnp.mean(jax.nn.softmax(h @ w["b"]) @ w["c"])
        """,
    )
    text = squeezed(program)
    assert "jnp.square(h.astype(jnp.float32))" in text
    assert re.search(r"softmax\(\(.*?\)\.astype\(jnp\.float32\)\)", text)


@pytest.mark.ci
def test_containers_that_a_step_fills_stay_the_very_ones(notebook):
    program = written(
        notebook,
        """
        def remember(seen, name, value):
            seen[name] = value
            seen["order"].append(name)
            return value

        def loss_of(w, x):
            seen = {"order": []}
            remember(seen, "h", x @ w["a"])
            remember(seen, "y", seen["h"] @ w["b"])
            return jnp.mean(seen[seen["order"][-1]])
        """,
    )
    assert "Without --precision" not in program.text
    assert float(run_alone(program)) == pytest.approx(float(notebook.shell.user_ns["loss"]), rel=0.02)


@pytest.mark.ci
def test_a_step_that_bears_no_other_types_is_written_without_and_says_why(notebook):
    program = written(
        notebook,
        """
        def loss_of(w, x):
            h = x @ w["a"]
            assert h.dtype == jnp.float32, "h is to be float32"
            return jnp.mean(h @ w["b"])
        """,
    )
    assert "Without --precision bf16: " in program.text
    assert "left out: AssertionError: h is to be float32" in program.text
    assert "bfloat16" not in program.text.split('"""')[2]
    run_alone(program)


@pytest.mark.ci
def test_a_step_without_products_has_nothing_to_cast_and_nothing_left_out(notebook):
    program = written(
        notebook,
        """
        def loss_of(w, x):
            return jnp.mean(jnp.square(x - w["c"][0]))
        """,
    )
    assert "Without" not in program.text and "bfloat16" not in program.text


@pytest.mark.parametrize("how", ["fp16", "f32"])
def test_types_that_no_cast_at_the_lines_gives_are_left_out_and_said(notebook, how):
    program = written(
        notebook,
        """
        def loss_of(w, x):
            return jnp.mean(x.astype(jnp.bfloat16) @ w["a"].astype(jnp.bfloat16))
        """,
        f"dp --precision {how}",
    )
    assert f"Without --precision {how}: " in program.text


def run_alone(program):
    """The loss that a program gives in a process of its own."""
    return printed(program.text + "\nprint('loss', float(loss))\n").rpartition("loss ")[2]
