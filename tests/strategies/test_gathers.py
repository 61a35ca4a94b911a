"""Gathers that a compiler would make all-reduces of are made in steps, which send what theory says."""

from collections import Counter
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support.deferring import same
from theory.steps import STEPS

import jaxshard_magic
from jaxshard_magic.report import Collective
from jaxshard_magic.search.plan_estimate import to_report_collective
from jaxshard_magic.strategies.planned_collectives import planned_collectives
from jaxshard_magic.strategies.sharded_lowering import ShardedLowering
from jaxshard_magic.targets import compiler_of, gathers
from jaxshard_magic.targets.gathers import CollectiveStep, plan_gather

on_tpus = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
AG, AR, RS = "all-gather", "all-reduce", "reduce-scatter"


@pytest.fixture(autouse=True)
def _asked_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield
    forget()


def forget() -> None:
    """What this process has asked; the folder of the cache has it still."""
    plan_gather.cache_clear()
    gathers._answer.cache_clear()


@pytest.fixture
def forced(monkeypatch):
    """Simulated devices whose compiler makes all-reduces of everything that is not in steps."""
    monkeypatch.setattr(gathers, "_may_reduce", lambda mesh, scatters: True)
    monkeypatch.setattr(gathers, "_stays", lambda mesh, steps, scatters: len(steps) > 1)


def planned(step) -> ShardedLowering:
    run = step.entry.plan.run
    assert isinstance(run, ShardedLowering)
    return run


def sent(moves) -> int:
    return sum(move.wire_bytes for move in moves)


def trained(name, strategy, mesh, **options):
    """A step sharded, its results and those of the plain one."""
    call = STEPS[name]()
    step = jaxshard_magic.shard(call.step, strategy, mesh=jaxshard_magic.mesh(mesh), **options)
    return step, step(call.state, call.batch), jax.jit(call.step)(call.state, call.batch)


# Numbers


@pytest.mark.parametrize(
    ("name", "strategy", "mesh"),
    [
        ("mlp", "fsdp", "cpu:8 data=8"),
        pytest.param("transformer, scanned", "fsdp", "cpu:8 data=8", marks=pytest.mark.full),
        pytest.param("transformer", "fsdp+tp", "cpu:8 data=4 model=2", marks=pytest.mark.ci),
        pytest.param("transformer", "fsdp", "cpu:8 data=8", marks=pytest.mark.full),
        pytest.param("transformer, scanned", "dp+fsdp", "cpu:8 data=2 fsdp=4", marks=pytest.mark.full),
        pytest.param("transformer, scanned", "fsdp+sp", "cpu:8 data=4 seq=2", marks=pytest.mark.ci),
    ],
)
def test_in_steps_a_step_has_the_plain_steps_numbers(forced, name, strategy, mesh):
    step, got, want = trained(name, strategy, mesh)
    same(got, want)
    sizes = {c.group_size for c in step.report().collectives or () if c.kind == AG and c.axes == ("data",)}
    assert step.entry.plan.mesh.shape["data"] not in sizes or strategy == "fsdp+sp"


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [{"microbatches": 2, "reduce": "once"}, pytest.param({"reduce_dtype": "f32"}, marks=pytest.mark.full)],
)
def test_in_steps_options_of_the_sum_keep_the_numbers(forced, options):
    _, got, want = trained("transformer, scanned", "fsdp", "cpu:8 data=8", **options)
    same(got, want)


def test_weights_over_two_axes_are_gathered_axis_by_axis(forced):
    _, got, want = trained(
        "mlp", "dp", "cpu:8 data=2 fsdp=4", rules={".*": P(("data", "fsdp"))}, specs={"batch": P("data")}
    )
    same(got, want)


# Figures


def counted(moves):
    counts = Counter()
    for m in moves:
        if m.bytes > 1024:
            counts[m.kind, m.group_size, m.apart if isinstance(m, Collective) else m.stride, m.bytes] += m.count
    return counts


def test_in_steps_each_weight_is_sent_once_and_the_plan_says_so(forced):
    step = jaxshard_magic.shard(scanned, "fsdp", mesh=jaxshard_magic.mesh("cpu:8 data=8"))
    layers, width, hidden = 3, 128, 512
    shapes = {"up": (layers, width, hidden), "down": (layers, hidden, width)}
    params = {k: jnp.full(s, 0.01) for k, s in shapes.items()}
    same(step(params, jnp.ones((16, width))), jax.jit(scanned)(params, jnp.ones((16, width))))
    size, each = width * hidden * 4, 2 * layers
    # near pairs, then four devices that are two apart; forward and backward, and gradients the other way round
    gathered = {(AG, 2, 1, size // 4): 2 * each, (AG, 4, 2, size): 2 * each}
    scattered = {(RS, 4, 2, size): each, (RS, 2, 1, size // 4): each}
    assert counted(step.report().collectives or ()) == {**gathered, **scattered}
    assert counted(planned_collectives(planned(step))) == {**gathered, **scattered}
    assert sent(m for m in step.report().collectives or () if m.bytes > 1024) == 3 * each * size * 7 // 8


def test_a_report_says_in_one_line_that_weights_are_gathered_in_steps_and_why(forced):
    step, _, _ = trained("mlp", "fsdp", "cpu:8 data=8")
    (hint,) = [a for a in step.report().advice if a.code == "gathered-in-steps"]
    assert "in steps of 2 and of 4 devices" in hint.message
    assert "data=8" in hint.message and "twice the bytes" in hint.message


def test_without_known_steps_the_plan_has_an_all_reduce_and_a_warning(forced, monkeypatch):
    monkeypatch.setattr(gathers, "_stays", lambda mesh, steps, scatters: False)
    step, got, want = trained("mlp", "fsdp", "cpu:8 data=8")
    same(got, want)
    assert {m.kind for m in planned_collectives(planned(step)) if m.bytes > 1024} == {AR}
    assert [a.level for a in step.report().advice if a.code == "gathers-reduced"] == ["warning"]


def test_nothing_is_written_in_steps_where_the_compiler_gathers():
    step, _, _ = trained("mlp", "fsdp", "cpu:8 data=8")
    assert {c.group_size for c in step.report().collectives or ()} == {8}
    assert not [a for a in step.report().advice if a.code == "gathered-in-steps"]


def test_groups_of_far_and_of_near_devices():
    mesh = jaxshard_magic.mesh("cpu:8 data=8")
    assert CollectiveStep(("data",), 8).groups(mesh) is None
    assert CollectiveStep(("data",), 2).groups(mesh) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert CollectiveStep(("data",), 4, 2).groups(mesh) == [[0, 2, 4, 6], [1, 3, 5, 7]]


# The compilers' own word


@on_tpus
@pytest.mark.parametrize(
    ("mesh", "steps"),
    [
        # a line of the cube, then a plane
        ("v5p:4x4x4 data=64", [(4, 1), (16, 4)]),
        pytest.param("v4:4x4x4 data=64", [(4, 1), (16, 4)], marks=pytest.mark.full),
        pytest.param("v5p:8x8x8 data=512", [(8, 1), (64, 8)], marks=pytest.mark.ci),
        ("v5p:4x4x4 data=16 model=4", [(16, 1)]),
        ("v5p:2x2x2 data=8", [(8, 1)]),
        ("v5e:4x4 data=16", [(16, 1)]),
        ("v6e:8x8 data=64", [(64, 1)]),
    ],
)
def test_gathers_take_steps_over_a_whole_cube_alone(mesh, steps):
    assert [(s.size, s.stride) for s in plan_gather(jaxshard_magic.mesh(mesh), ("data",)).steps] == steps


@on_tpus
def test_one_sum_scattered_over_a_plane_is_an_all_reduce_and_over_a_ring_is_not():
    assert len(plan_gather(jaxshard_magic.mesh("v5e:4x4 data=16"), ("data",), scatters=True).steps) == 2
    assert len(plan_gather(jaxshard_magic.mesh("v5e:2x4 data=8"), ("data",), scatters=True).steps) == 1


@on_tpus
def test_what_the_compiler_said_of_a_slice_is_not_asked_again(monkeypatch):
    mesh = jaxshard_magic.mesh("v5p:4x4x4 data=64")
    found = plan_gather(mesh, ("data",))
    forget()
    monkeypatch.setattr(type(compiler_of(gathers.target_of(mesh))), "compile", None)
    assert plan_gather(mesh, ("data",)) == found


@on_tpus
@pytest.mark.parametrize("kept", ["here", "in the cache's folder"])
def test_the_same_devices_under_axes_of_other_names_are_one_question(monkeypatch, kept):
    found = plan_gather(jaxshard_magic.mesh("v5p:4x4x4 data=16 model=4"), ("data",), scatters=True)
    if kept != "here":
        forget()
    monkeypatch.setattr(gathers, "_program", None)
    other = plan_gather(jaxshard_magic.mesh("v5p:4x4x4 seq=16 expert=4"), ("seq",), scatters=True)
    assert [(step.size, step.stride) for step in other.steps] == [(s.size, s.stride) for s in found.steps]
    with pytest.raises(TypeError):  # other devices are another question
        plan_gather(jaxshard_magic.mesh("v5p:4x4x4 seq=16 expert=4"), ("expert",), scatters=True)


LAYERS, WIDTH, HIDDEN = 2, 2048, 8192


def scanned(params, batch):
    def loss(params):
        def layer(x, w):
            return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

        x, _ = jax.lax.scan(layer, batch, params)
        return jnp.square(x.astype(jnp.float32)).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def compiled_for(mesh, dtype=jnp.bfloat16, *, hidden=HIDDEN, rows=8):
    """A step of so many `rows` a device, and what it sends over what theory says: forward and backward each weight is
    gathered, and its gradient is scattered."""
    shapes = {"up": (LAYERS, WIDTH, hidden), "down": (LAYERS, hidden, WIDTH)}
    step = jaxshard_magic.shard(scanned, "fsdp", mesh=mesh)
    devices = step.mesh.size
    params = {k: jax.ShapeDtypeStruct(s, dtype) for k, s in shapes.items()}
    step.prepare(params, jax.ShapeDtypeStruct((rows * devices, WIDTH), dtype))
    theory = 3 * 2 * LAYERS * WIDTH * hidden * dtype.dtype.itemsize * (devices - 1) / devices
    return step, sent(step.report().collectives or ()) / theory


def padded() -> float:
    """What is sent beyond theory, as a share of it, where 64 chips of a plane add up 8,192 rows of 2,048 numbers in
    bfloat16. An array that a core has no memory for at once the compiler adds up in passes, here three, and pads the
    128 rows of a chip to three times 48, whole tiles of 16. Seven permutes then bring each chip its own rows. What one
    pass is enough for (8 MiB) it does not pad."""
    size, rows = 2 * WIDTH * HIDDEN, HIDDEN // 64
    scattered, permuted = (3 * 48 / rows - 1) * size * 63 / 64, 7 * 3 * 48 * WIDTH * 2
    return (scattered + permuted) / (3 * size * 511 / 512)


@on_tpus
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        pytest.param("v5p:4x4x4 data=64", 0, marks=pytest.mark.ci),
        pytest.param("v4:4x4x4 data=64", 0, marks=pytest.mark.full),
        pytest.param("tpu7x:4x4x4 data=128", 0, marks=pytest.mark.full),
        pytest.param("v5p:8x8x8 data=512", padded(), marks=pytest.mark.full),
    ],
)
def test_on_a_cube_fsdp_sends_what_theory_says_and_the_plan_knows_it(mesh, more):
    step, ratio = compiled_for(mesh)
    assert 0.99 + more < ratio <= (1.001 if more else 1.02) + more
    predicted = sent(map(to_report_collective, planned_collectives(planned(step))))
    assert predicted == pytest.approx(sent(step.report().collectives or ()), rel=0.1)
    assert step.report().timing.communication_s is not None


@on_tpus
@pytest.mark.ci
@pytest.mark.parametrize("hidden", [pytest.param(WIDTH, marks=pytest.mark.full), WIDTH // 2])
def test_weights_send_what_theory_says_whichever_dimension_is_divided(hidden):
    _, ratio = compiled_for("v5p:4x4x4 data=64", hidden=hidden)
    assert 0.99 < ratio <= 1.02


@on_tpus
@pytest.mark.ci
@pytest.mark.parametrize(("rows", "theory"), [(8, 4 / 3), (1024, 1)])
def test_a_plan_knows_which_sums_the_compiler_adds_up_whole(rows, theory):
    """On v5e:4x4 a product that is too short to send its sum in pieces leaves an all-reduce, which sends twice what a
    scatter does: 4 for 3 of all."""
    step, ratio = compiled_for("v5e:4x4 data=16", rows=rows)
    assert ratio == pytest.approx(theory, rel=0.05)
    assert sent(map(to_report_collective, planned_collectives(planned(step)))) == pytest.approx(
        sent(step.report().collectives or ()), rel=0.05
    )
