"""What a plan says that devices send and hold, before anything is compiled, beside the compiled step: that they send
what theory says is in `test_communication.py`."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.version import __version_info__ as jax_version
from support.planned_bytes import EXAMPLES, F32, HIDDEN, WIDTH, sent
from theory import steps
from theory.steps import STEPS

import jaxshard_magic
from jaxshard_magic.plan import wire_bytes
from jaxshard_magic.strategies.footprint import Footprint, footprint
from jaxshard_magic.strategies.planned_collectives import planned_collectives
from jaxshard_magic.strategies.sharded_lowering import ShardedLowering


def planned(step, args, strategy: str, mesh: str, **options) -> ShardedLowering:
    found = jaxshard_magic.shard(step, strategy, mesh=jaxshard_magic.mesh(mesh), **options).planned(*args)
    assert isinstance(found.plan.run, ShardedLowering)
    return found.plan.run


def compiled(step) -> Counter:
    """The same as the compiled step sends it."""
    moves = Counter()
    for c in step.report().collectives or ():
        if c.bytes > F32:
            moves[c.kind, c.axes, c.bytes] += round(c.count)
    return moves


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("gather", jnp.float32),
        *(pytest.param(how, jnp.float32, marks=pytest.mark.full) for how in ("heads", "ring")),
        *(pytest.param(how, jnp.bfloat16, marks=pytest.mark.full) for how in ("gather", "heads", "ring")),
    ],
)
def test_with_sp_gradients_are_summed_along_examples_then_positions(how, dtype):
    """Which XLA for the CPU does in two all-reduces, of bfloat16 in float32, as it sends all that is bfloat16. Of keys
    and values two gathers a layer, and their gradients scattered; or as many bytes in eight all-to-alls; or, in a ring
    of two, a turn of both forward, and backward one of them and two of their gradients."""
    call = STEPS["transformer"]()
    state = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, call.state)
    mesh = jaxshard_magic.mesh("cpu:8 data=4 seq=2")
    step = jaxshard_magic.shard(call.step, "dp+sp", mesh=mesh, attention=how)
    run = step.prepare(state, call.batch).plan.run
    assert isinstance(run, ShardedLowering)
    keys = steps.EXAMPLES // 4 * steps.TIME * steps.WIDTH * F32
    moves = {
        "gather": {("all-gather", keys): 2, ("reduce-scatter", keys): 2},
        "heads": {("all-to-all", keys // 2): 8},
        "ring": {("collective-permute", keys // 2): 6},
    }
    wanted = Counter({(kind, ("seq",), size): n * steps.LAYERS for (kind, size), n in moves[how].items()})
    for weight in jax.tree.leaves(call.state["params"]):
        for axis in ("data", "seq"):
            wanted["all-reduce", (axis,), weight.nbytes] += 1
    assert sent(run) == wanted == compiled(step)


@pytest.mark.ci
def test_a_tpu_gathers_keys_and_values_in_bfloat16_for_each_pass():
    call = STEPS["transformer, scanned"]()
    step = jaxshard_magic.shard(call.step, "dp+sp", mesh=jaxshard_magic.mesh("v5e:2x4 data=4 seq=2"))
    run = step.prepare(call.state, call.batch).plan.run
    assert isinstance(run, ShardedLowering)
    keys = steps.EXAMPLES // 4 * steps.TIME * steps.WIDTH * F32
    for moves in (sent(run), compiled(step)):
        gathers = {size: n for (kind, _, size), n in moves.items() if kind == "all-gather"}
        assert gathers == {keys // 2: 2 * 2 * steps.LAYERS}


def test_sums_over_examples_wait_for_the_last_microbatch_not_over_positions():
    call = STEPS["transformer"]()
    options = {"microbatches": 2, "reduce": "once"}
    told = sent(planned(call.step, (call.state, call.batch), "dp+sp", "cpu:8 data=4 seq=2", **options))
    head = call.state["params"]["head"].nbytes  # as large as the table of embeddings
    assert (told["all-reduce", ("data",), head], told["all-reduce", ("seq",), head]) == (2, 2 * 2)


@pytest.mark.ci
def test_with_positions_on_the_model_axis_plans_send_no_more_than_compiled():
    call = STEPS["transformer"]()
    args, mesh = (call.state, call.batch), "cpu:8 data=4 model=2"
    moves = planned_collectives(planned(call.step, args, "fsdp+tp+sp", mesh))
    told = sum(wire_bytes(m.kind, m.group_size, m.bytes * m.count) for m in moves)
    step = jaxshard_magic.shard(call.step, "fsdp+tp+sp", mesh=jaxshard_magic.mesh(mesh))
    step.prepare(*args)
    measured = sum(c.wire_bytes for c in step.report().collectives or ())
    assert 0.7 * measured <= told <= 1.01 * measured


def layers(params, batch):
    def loss(params):
        hidden = jnp.tanh(batch @ params["up"])
        return jnp.square(hidden @ params["down"]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments():
    shape = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {k: jnp.ones(s) for k, s in shape.items()}, jnp.ones((EXAMPLES, WIDTH))


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp+tp"])
def test_along_an_axis_of_one_device_nothing_is_sent(strategy):
    plan = planned(layers, arguments(), strategy, "cpu:8 data=1 model=8")
    assert not any("data" in move.axes for move in planned_collectives(plan))
    assert bool(sent(plan)) == (strategy == "fsdp+tp")


WEIGHT, ACTIVATION = WIDTH * HIDDEN * F32, EXAMPLES * HIDDEN * F32


def test_microbatches_gather_weights_and_add_up_gradients_at_every_trip():
    once = sent(planned(layers, arguments(), "fsdp", "cpu:8 data=8"))
    assert once["all-reduce", ("data",), WEIGHT] == 2
    parts = sent(planned(layers, arguments(), "fsdp", "cpu:8 data=8", microbatches=4))
    assert parts["all-reduce", ("data",), WEIGHT] == 8
    waiting = sent(planned(layers, arguments(), "dp", "cpu:8 data=8", microbatches=4, reduce="once"))
    assert waiting["all-reduce", ("data",), WEIGHT] == 2  # those of a whole step


def test_a_cpu_sends_bfloat16_as_float32():
    """Two weights that are gathered, and their gradients added up."""
    params, batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arguments())
    step = jaxshard_magic.shard(layers, "fsdp", mesh=jaxshard_magic.mesh("cpu:8 data=8"))
    run = step.prepare(params, batch).plan.run
    assert isinstance(run, ShardedLowering)
    moves = {("all-gather", ("data",), WEIGHT): 2, ("all-reduce", ("data",), WEIGHT): 2}
    assert sent(run) == compiled(step) == moves


@pytest.mark.ci
def test_for_a_tpu_weights_are_gathered_as_it_multiplies_them():
    step = jaxshard_magic.shard(layers, "fsdp", mesh=jaxshard_magic.mesh("v5e:2x4 data=8"))
    entry = step.prepare(*arguments())
    assert isinstance(entry.plan.run, ShardedLowering)
    told = sum(wire_bytes(m.kind, m.group_size, m.bytes * m.count) for m in planned_collectives(entry.plan.run))
    measured = sum(c.wire_bytes for c in step.report().collectives or ())
    assert told == measured
    gathers = [m.bytes for m in planned_collectives(entry.plan.run) if m.kind == "all-gather"]
    assert set(gathers) == {WEIGHT // 2}  # of float32, in bfloat16


def mean_square(p, x):
    return jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"] - x) ** 2)


def of_pieces(each, pieces):
    """The gradients of pieces of a batch, to which a loop does `each` before it adds them up."""

    def gradients(p, batch):
        def piece(total, x):
            return jax.tree.map(lambda a, b: a + each(b), total, jax.grad(mean_square)(p, x)), None

        def pieces_of(total, xs):
            return jax.lax.scan(piece, total, xs)[0], None

        zeros = jax.tree.map(jnp.zeros_like, p)
        batch = batch.reshape(*pieces, -1, WIDTH)
        return (pieces_of(zeros, batch) if len(pieces) == 1 else jax.lax.scan(pieces_of, zeros, batch))[0]

    return gradients


def over_time(p, batch):
    def states(p):
        words = batch.reshape(PIECES, -1, WIDTH)
        state = lambda h, x: (jnp.tanh(x @ p["in"] @ p["out"] + h), h)  # noqa: E731
        return jnp.mean(jax.lax.scan(state, jnp.zeros_like(words[0]), words)[1] ** 2)

    return jax.grad(states)(p)


PIECES = 4


def of_the_last_piece(p, batch):
    last = lambda _, x: (jax.grad(mean_square)(p, x), None)  # noqa: E731
    return jax.lax.scan(last, jax.tree.map(jnp.zeros_like, p), batch.reshape(PIECES, -1, WIDTH))[0]


def beside_their_squares(p, batch):
    """Sums that each trip needs whole, too."""

    def piece(carry, x):
        g = jax.grad(mean_square)(p, x)
        return jax.tree.map(lambda c, g: (c[0] + g, c[1] + (g**2).sum()), carry, g, is_leaf=pairs), None

    pairs = lambda c: isinstance(c, tuple)  # noqa: E731
    zeros = jax.tree.map(lambda w: (jnp.zeros_like(w), jnp.zeros(())), p)
    carry, _ = jax.lax.scan(piece, zeros, batch.reshape(PIECES, -1, WIDTH))
    return jax.tree.map(lambda c: c[0] * jax.lax.rsqrt(1 + c[1]), carry, is_leaf=pairs)


IN_LOOPS = {  # how often the sums of both weights are sent
    "added up": (of_pieces(lambda g: g, (PIECES,)), 1),
    "divided, then added up": (of_pieces(lambda g: g / PIECES, (PIECES,)), PIECES),
    "in a loop of loops": (of_pieces(lambda g: g, (2, 2)), 2 if jax_version < (0, 12) else 1),
    "over time": (over_time, 1),
    "of the last piece": (of_the_last_piece, PIECES),
    "beside their squares": (beside_their_squares, PIECES),
}


@pytest.mark.ci
@pytest.mark.parametrize("form", IN_LOOPS)
def test_a_tpu_sends_behind_a_loop_what_it_only_adds_up(form):
    gradients, times = IN_LOOPS[form]

    def step(p, batch):
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, gradients(p, batch))

    weights = {"in": (WIDTH, 4 * WIDTH), "out": (4 * WIDTH, WIDTH)}
    shapes = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in weights.items()}
    batch = jax.ShapeDtypeStruct((8 * 32, WIDTH), jnp.float32)
    for target, sums in (("v5e:2x4", times), ("cpu:8", PIECES)):
        sharded = jaxshard_magic.shard(step, "dp", mesh=f"{target} data=8")
        planned = sharded.plan(shapes, batch)
        sharded.prepare(shapes, batch)
        for report in (planned, sharded.report()):
            sent = sum(c.bytes * c.count for c in report.collectives or () if c.kind == "all-reduce" and c.bytes > F32)
            assert sent == sums * 2 * WIDTH * 4 * WIDTH * F32


def held(strategy: str, mesh: str, donated: tuple[int, ...] = (), **options) -> Footprint:
    return footprint(planned(layers, arguments(), strategy, mesh, **options), donated)


def test_arrays_count_as_they_lie_new_beside_old_unless_donated():
    batch, loss = EXAMPLES * WIDTH * F32, F32
    assert held("dp", "cpu:8 data=8").arrays == 2 * 2 * WEIGHT + batch // 8 + loss
    assert held("dp", "cpu:8 data=8", (0, 1)).arrays == 2 * WEIGHT + batch // 8 + loss
    assert held("fsdp", "cpu:8 data=8", (0, 1)).arrays == 2 * WEIGHT // 8 + batch // 8 + loss


def test_memory_between_the_arrays_is_products_and_unused_gradients():
    """With the old state donated: hidden, the result, its gradient and that of hidden, one beside the other at most
    with both gradients of the weights."""
    found = held("dp", "cpu:8 data=8", (0, 1))
    result = EXAMPLES * WIDTH * F32 // 8
    assert 2 * WEIGHT <= found.temporaries <= 2 * WEIGHT + 2 * ACTIVATION // 8 + 2 * result


def test_microbatches_hold_the_gradients_so_far_beside_the_new_ones():
    whole, parts = (held("dp", "cpu:2 data=2", (0, 1), microbatches=m) for m in (1, 4))
    assert parts.arrays == whole.arrays
    assert whole.temporaries < parts.temporaries < whole.temporaries + 2 * WEIGHT
