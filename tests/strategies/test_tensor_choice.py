"""The dimensions that tensor parallelism divides: of blocks as people write them, beside all other cuts of their
weights, by the bytes that Shardy would send for each."""

import itertools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support.planned_moves import planned_moves
from support.shardy_moves import moves_by_shardy
from support.thinned import CI, thinned

import jaxshard_magic
from jaxshard_magic.plan import wire_bytes
from jaxshard_magic.program.shardy import ShardyPartitioner
from jaxshard_magic.strategies.planned_collectives import planned_collectives
from jaxshard_magic.strategies.sharded_lowering import ShardedLowering

ROWS, TIME, WIDTH, HEADS, KEYS, HEAD, HIDDEN, EXPERTS, RANK = 4, 32, 64, 8, 4, 16, 128, 4, 32
X = (ROWS, TIME, WIDTH)
BY_HEAD = {"q": (WIDTH, HEADS, HEAD), "o": (HEADS, HEAD, WIDTH)}


def rotated(a):
    angles = (jnp.arange(a.shape[1])[:, None] / 100 ** (jnp.arange(a.shape[-1] // 2) / a.shape[-1]))[:, None]
    u, v = jnp.split(a, 2, -1)
    return jnp.concatenate([u * jnp.cos(angles) - v * jnp.sin(angles), v * jnp.cos(angles) + u], -1)


def attention(q, k, v):
    b, t, n, h = q.shape
    q = q.reshape(b, t, k.shape[2], n // k.shape[2], h)
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), jnp.einsum("btkgh,bskh->bkgts", q, k), -1e9)
    return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), v).reshape(b, t, n, h)


def attended(p, x, q, k, v):
    return x + jnp.einsum("btnh,nhd->btd", attention(q, k, v), p["o"])


def fused(p, x):
    q, k, v = (a.reshape(ROWS, TIME, HEADS, -1) for a in jnp.split(x @ p["qkv"], 3, -1))
    return x + attention(q, k, v).reshape(X) @ p["o"]


def stacked_in_front(p, x):
    k, v = jnp.einsum("bsd,ckdh->cbskh", x, p["kv"])
    return attended(p, x, rotated(jnp.einsum("btd,dnh->btnh", x, p["q"])), rotated(k), v)


def stacked_in_the_middle(p, x):
    return attended(p, x, *jnp.einsum("btd,dcnh->cbtnh", x, p["qkv"]))


def stacked_behind(p, x):
    qkv = jnp.einsum("btd,dnhc->btnhc", x, p["qkv"])
    return attended(p, x, *(qkv[..., i] for i in range(3)))


def grouped(p, x):
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, p[n]) for n in "qkv")
    return attended(p, x, rotated(q), rotated(k), v)


def repeated_keys(p, x):
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, p[n]) for n in "qkv")
    return attended(p, x, rotated(q), *(jnp.repeat(y, q.shape[2] // k.shape[2], axis=2) for y in (rotated(k), v)))


def shared_keys(p, x):
    k, v = ((x @ p[n])[:, :, None] for n in "kv")
    return attended(p, x, rotated(jnp.einsum("btd,dnh->btnh", x, p["q"])), rotated(k), v)


def low_rank_keys(p, x):
    k, v = (jnp.einsum("btr,rnh->btnh", x @ p["down"], p[n]) for n in "kv")
    return attended(p, x, jnp.einsum("btd,dnh->btnh", x, p["q"]), k, v)


def fused_with_few_keys(p, x):
    """Phi's: one weight for all heads, of which those of keys and values are fewer."""
    q, k, v = jnp.split(x @ p["qkv"], (HEADS * HEAD, (HEADS + KEYS) * HEAD), -1)
    q, k, v = (a.reshape(ROWS, TIME, -1, HEAD) for a in (q, k, v))
    k, v = (jnp.repeat(y, HEADS // KEYS, axis=2) for y in (rotated(k), v))
    return attended(p, x, rotated(q), k, v)


def latent(p, x):
    """DeepSeek's: keys and values from one small projection, of which a part is positions that heads share."""
    q = jnp.einsum("btd,dnh->btnh", x, p["q"])
    both, place = jnp.split(x @ p["down"], [RANK], -1)
    k, v = jnp.split(jnp.einsum("btr,rnh->btnh", both, p["kv"]), 2, -1)
    place = jnp.broadcast_to(rotated(place[:, :, None]), k.shape[:3] + place.shape[2:])
    k = jnp.concatenate([k, place], -1)
    return attended(
        p,
        x,
        jnp.concatenate([q[..., :HEAD], rotated(q[..., HEAD:])], -1),
        k,
        jnp.pad(v, ((0, 0),) * 3 + ((0, 8),)),
    )


def gated(p, x):
    return x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def gate_and_up_stacked(p, x):
    gate, up = jnp.einsum("btd,cdf->cbtf", x, p["both"])
    return x + (jax.nn.silu(gate) * up) @ p["down"]


def gate_and_up_fused(p, x):
    gate, up = jnp.split(x @ p["both"], 2, -1)
    return x + (jax.nn.silu(gate) * up) @ p["down"]


def convolutional(p, x):
    for kernel in (p["a"], p["b"]):
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
    return x


def mixture(p, x):
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, p["wi"]))
    return x + jnp.einsum("btef,efd,bte->btd", hidden, p["wo"], jax.nn.softmax(x @ p["router"]))


def recurrent(p, x):
    def cell(h, a):
        h = jnp.tanh(a @ p["wx"] + h @ p["wh"])
        return h, h

    return jax.lax.scan(cell, jnp.zeros((ROWS, HIDDEN)), x.swapaxes(0, 1))[1] @ p["out"]


Forward = Callable[[dict, jax.Array], jax.Array]
Shapes = Mapping[str, tuple[int, ...]]
KV = (WIDTH, KEYS, HEAD)
MLP = {"down": (HIDDEN, WIDTH)}
BLOCKS: dict[Forward, Shapes] = {
    fused: {"qkv": (WIDTH, 3 * WIDTH), "o": (WIDTH, WIDTH)},
    stacked_in_front: {**BY_HEAD, "kv": (2, KEYS, WIDTH, HEAD)},
    stacked_in_the_middle: {"o": BY_HEAD["o"], "qkv": (WIDTH, 3, HEADS, HEAD)},
    stacked_behind: {"o": BY_HEAD["o"], "qkv": (WIDTH, HEADS, HEAD, 3)},
    grouped: {**BY_HEAD, "k": KV, "v": KV},
    shared_keys: {**BY_HEAD, "k": (WIDTH, HEAD), "v": (WIDTH, HEAD)},
    low_rank_keys: {**BY_HEAD, "down": (WIDTH, 32), "k": (32, HEADS, HEAD), "v": (32, HEADS, HEAD)},
    repeated_keys: {**BY_HEAD, "k": KV, "v": KV},
    fused_with_few_keys: {"qkv": (WIDTH, (HEADS + 2 * KEYS) * HEAD), "o": BY_HEAD["o"]},
    latent: {
        "q": (WIDTH, HEADS, HEAD + 8),
        "down": (WIDTH, RANK + 8),
        "kv": (RANK, HEADS, 2 * HEAD),
        "o": (HEADS, HEAD + 8, WIDTH),
    },
    gated: {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), **MLP},
    gate_and_up_stacked: {"both": (2, WIDTH, HIDDEN), **MLP},
    gate_and_up_fused: {"both": (WIDTH, 2 * HIDDEN), **MLP},
    convolutional: {"a": (3, 3, 16, 32), "b": (3, 3, 32, 16)},
    mixture: {"router": (WIDTH, EXPERTS), "wi": (EXPERTS, WIDTH, HIDDEN), "wo": (EXPERTS, HIDDEN, WIDTH)},
}
QUICK = {fused_with_few_keys, stacked_in_front, gate_and_up_stacked, gate_and_up_fused}


def planned(forward: Forward, shapes: Shapes, mesh: str, x: tuple[int, ...] = X):
    """The plan of a step of gradient descent, and Shardy on the step that was traced."""

    def step(params, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(forward(p, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    return jaxshard_magic.shard(step, "tp", mesh=mesh).planned(params, jnp.ones(x)).plan


def cuts(plan) -> dict[str, P]:
    return {leaf.path.removeprefix("params."): leaf.spec for leaf in plan.leaves if leaf.role == "params"}


@pytest.mark.parametrize("devices", thinned((2, 4), (2,), CI))
@pytest.mark.parametrize("forward", thinned(BLOCKS, QUICK, CI))
def test_no_other_cut_of_the_weights_of_a_block_sends_less(forward, devices):
    x = (8, 8, 8, 16) if forward is convolutional else X
    plan = planned(forward, BLOCKS[forward], f"model={devices}", x)
    program = plan.run.program
    ours = {i: d for i, spec in enumerate(plan.in_specs) for d, axis in enumerate(spec) if axis == "model"}
    sent, least = sent_by_cuts(program, devices, ours)
    assert sent <= 1.05 * least


def sent_by_cuts(program, devices: int, ours: Mapping[int, int]) -> tuple[float, float]:
    """Bytes that each device would send with these weights cut so, and the least with any cut of each."""
    shardy = ShardyPartitioner.for_program(program)
    assert shardy is not None

    def sent(dims: Mapping[int, int]) -> float:
        division = shardy.divide(dims, devices)
        return float("inf") if division is None else division.sent_bytes_per_device

    ways = [
        [(i, d) for d, size in enumerate(program.shapes[v]) if size % devices == 0]
        for i, v in enumerate(program.inputs[:-1])
    ]
    return sent(ours), min(sent(dict(way)) for way in itertools.product(*ways))


def test_a_recurrent_step_sends_no_more_than_with_any_cut():
    """By the collectives of the plan: without its constraints Shardy gathers the state more often."""
    shapes = {"wx": (WIDTH, HIDDEN), "wh": (HIDDEN, HIDDEN), "out": (HIDDEN, WIDTH)}
    plan = planned(recurrent, shapes, "model=2")
    _, least = sent_by_cuts(plan.run.program, 2, {})
    assert isinstance(plan.run, ShardedLowering)
    moves = planned_collectives(plan.run)
    assert 0 < sum(wire_bytes(m.kind, m.group_size, m.bytes) * m.count for m in moves) <= 1.05 * least


def test_equal_blocks_lie_equally():
    """The last one, of whose result only some positions are used, was cut within heads."""

    def blocks(p, x):
        for i in "012":
            layer = {name[:-1]: w for name, w in p.items() if name[-1] == i}
            x = gated(layer, grouped(layer, x))
        return x[:, 7:-1]

    block = {**BLOCKS[grouped], **BLOCKS[gated]}
    found = cuts(planned(blocks, {n + i: shape for n, shape in block.items() for i in "012"}, "model=2"))
    by_name = {name: {found[name + i] for i in "012"} for name in block}
    assert by_name == {
        **{n: {P(None, "model", None)} for n in "qkv"},
        "o": {P("model", None, None)},
        **{n: {P(None, "model")} for n in ("gate", "up")},
        "down": {P("model", None)},
    }


def test_rules_alone_decide_on_equal_blocks_of_a_transformer(monkeypatch):
    """Nobody waits for Shardy where no question is open."""
    monkeypatch.setattr(ShardyPartitioner, "divide", None)
    block = {**BLOCKS[grouped], **BLOCKS[gated]}
    plan = planned(lambda p, x: gated(p, grouped(p, x)), block, "model=4")
    assert cuts(plan)["q"] == P(None, "model", None)


@pytest.mark.parametrize(
    ("shapes", "mesh", "heads", "fits"),
    [
        (BLOCKS[grouped], "model=8", 4, 4),
        (
            {n: tuple(6 if z == 8 else 3 if z == 4 else z for z in s) for n, s in BLOCKS[grouped].items()},
            "model=4",
            3,
            3,
        ),
        (
            {
                n: tuple(4 if z == 8 else z for z in s)
                for n, s in {**BY_HEAD, "k": BY_HEAD["q"], "v": BY_HEAD["q"]}.items()
            },
            "model=8",
            4,
            4,
        ),
    ],
)
def test_heads_that_do_not_divide_are_told_with_the_mesh_that_would(shapes, mesh, heads, fits):
    (found,) = planned(grouped, shapes, mesh).findings
    assert found.message.startswith(f"{heads} heads do not divide by {mesh}:")
    assert found.message.endswith(f" model={fits} divides them.")
    assert not planned(grouped, shapes, f"model={fits}").findings


@pytest.mark.parametrize("mesh", ["cpu:8 data=1 model=8", "data=2 model=8", "model=8"])
def test_heads_of_queries_are_divided_where_those_of_keys_do_not_divide(mesh):
    """Whatever else the other axes would divide: 2 divides 4 heads, and is not what divides heads."""
    plan = planned(repeated_keys, BLOCKS[grouped], mesh)
    assert cuts(plan)["q"] == P(None, "model", None)
    (found,) = plan.findings
    assert found.message.startswith("4 heads of keys do not divide by model=8; the 8 heads of queries")
    assert found.message.endswith("model=4 divides both.")


@pytest.mark.parametrize("strategy", ["tp", "fsdp+tp"])
def test_examples_that_are_merged_with_positions_and_grouped_anew_are_the_batch(strategy):
    """Two groups: as many as the data axis divides, and tp's does not."""

    def step(p, x):
        def loss(p):
            groups = x.reshape(-1, WIDTH).reshape(2, -1, WIDTH)
            return jnp.mean(gated(p, groups - groups.mean(-1, keepdims=True)) ** 2)

        value, gradients = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda w, g: w - g, p, gradients), value

    params = {name: jnp.ones(shape) for name, shape in BLOCKS[gated].items()}
    plan = jaxshard_magic.shard(step, strategy, mesh="data=2 model=4").planned(params, jnp.ones(X)).plan
    assert plan.in_specs[-1] == P("data", None, None)


def test_heads_of_keys_in_a_fused_weight_that_is_divided_otherwise_are_told():
    shapes = {"qkv": (WIDTH, (8 + 2 + 2) * 8), "o": (8, 8, WIDTH)}

    def few(p, x):
        q, k, v = jnp.split(x @ p["qkv"], (64, 80), -1)
        q, k, v = (a.reshape(ROWS, TIME, -1, 8) for a in (q, k, v))
        return attended(p, x, q, jnp.repeat(k, 4, axis=2), jnp.repeat(v, 4, axis=2))

    found = planned(few, shapes, "data=2 model=4").findings
    assert [f.message[:8] for f in found] == ["2 heads "]


def test_rotated_halves_of_a_divided_head_are_no_fused_weight():
    (found,) = planned(shared_keys, BLOCKS[shared_keys], "model=2").findings
    assert found.code == "split-and-joined" and found.message.startswith("What a weight of 64 x 16 ")


@pytest.mark.parametrize("devices", thinned((2, 4, 8), (8,), CI))
@pytest.mark.parametrize("forward", thinned(BLOCKS, QUICK, CI))
def test_a_plan_of_a_block_sends_what_shardy_would(forward, devices):
    x = (8, 8, 8, 16) if forward is convolutional else X
    plan = planned(forward, BLOCKS[forward], f"data={8 // devices} model={devices}", x)
    assert planned_moves(plan) == moves_by_shardy(plan)


def test_a_part_of_a_divided_dimension_counts_as_sent():
    """Shardy's passes insert nothing for it: XLA's partitioner does."""
    plan = planned(gate_and_up_stacked, BLOCKS[gate_and_up_stacked], "model=2")
    shardy = ShardyPartitioner.for_program(plan.run.program)
    assert shardy is not None
    stack, width = shardy.divide({0: 0}, 2), shardy.divide({0: 2, 1: 0}, 2)
    assert stack is not None and width is not None
    assert (
        stack.bytes_without_sums > 0 == width.bytes_without_sums
        and stack.sent_bytes_per_device > width.sent_bytes_per_device
    )
