"""What a step moves on a slice that isn't attached is what theory says, from the lines that theory says."""

from collections import Counter
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from theory.expected import AG, AR, MESHES, RS, STEPS, expected, told
from theory.steps import STEPS as CALLS

import jaxshard_magic

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
SLICE = "v5e:2x4"
NAMES = ("mlp", "gated mlp", "transformer", "transformer, scanned")
STRATEGIES = ("fsdp", "tp", "fsdp+tp")
QUICK = {
    ("gated mlp", "fsdp"): (),
    ("mlp", "fsdp+tp"): pytest.mark.ci,
    ("transformer, scanned", "tp"): pytest.mark.ci,
}
TABLE = [
    pytest.param(name, strategy, marks=QUICK.get((name, strategy), pytest.mark.full))
    for name in NAMES
    for strategy in STRATEGIES
]


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    """A cache of the test's own, and products in float32: else a TPU gathers their operands in bfloat16."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with jax.default_matmul_precision("highest"):
        yield


def report_of(name: str, strategy: str):
    call = CALLS[name]()
    state, batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (call.state, call.batch))
    axes = " ".join(f"{axis}={n}" for axis, n in MESHES[strategy].items())
    step = jaxshard_magic.shard(call.step, strategy, mesh=f"{SLICE} {axes}")
    step.prepare(state, batch)
    return step.report()


def on_a_tpu(name: str, strategy: str) -> Counter:
    """Theory's collectives with the difference that a TPU makes: what all devices sum of a weight that fsdp cuts, and
    of which each keeps its part, is one reduce-scatter. Not so the gradient of a lookup whose vocabulary tp cuts, which
    is small here: the compiler adds it up with the small sums, whole."""
    found = expected(name, strategy)
    if "fsdp" not in strategy:
        return found
    n = MESHES[strategy].get("model", 1)
    weights = [w for w in STEPS[name].weights if w.gathers is not None]
    cut = {(w.size // (n if w.cut else 1), w.line) for w in weights if not w.lookup}
    whole = {w.line for w in weights if w.lookup and n > 1}

    def made(kind, axes, size, line):
        if kind == RS:
            return AR if line in whole else RS
        return RS if kind == AR and (size, line) in cut and axes == ("data",) else kind

    return Counter({(made(*key), *key[1:]): count for key, count in found.items()})


def bytes_by_line(collectives: Counter) -> Counter:
    """`{(kind, axes, line): bytes}`: the compiler puts small sums of one line into one."""
    found: Counter = Counter()
    for (kind, axes, size, line), count in collectives.items():
        found[kind, axes, line] += size * count
    return found


@pytest.mark.parametrize(("name", "strategy"), TABLE)
def test_a_step_moves_what_theory_says_from_the_lines_that_theory_says(name, strategy):
    report = report_of(name, strategy)
    wanted = on_a_tpu(name, strategy)
    got = told(report.collectives or (), wanted)
    assert bytes_by_line(got) == bytes_by_line(wanted)
    if "scanned" not in name:
        assert got == wanted
    assert {c.file for c in report.collectives} == {"steps.py"}
    (source,) = report.sources
    lines = dict(zip(source.numbers, source.text, strict=True))
    assert all(lines[c.line].strip() == c.source for c in report.collectives)
    kinds = {c.kind for c in report.collectives}
    assert kinds == ({AR, AG, RS} if "fsdp" in strategy else {AR})


def test_a_step_that_closes_over_an_array_has_a_report_with_its_own_leaves():
    table = jnp.ones(16)

    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean((x @ w + table) ** 2))(w)

    sharded = jaxshard_magic.shard(step, "fsdp", mesh="v5e:2x2 data=4")
    sharded.prepare(jax.ShapeDtypeStruct((32, 16), "float32"), jax.ShapeDtypeStruct((64, 32), "float32"))
    assert [(leaf.path, leaf.shape) for leaf in sharded.report().leaves] == [
        ("closure.0", (16,)),
        ("w", (32, 16)),
        ("x", (64, 32)),
    ]
