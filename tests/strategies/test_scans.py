"""Recurrences over divided positions: each device scans a block of its own, and one element of each is gathered."""

from collections import Counter
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.lax import associative_scan  # a name of its own, as models have it
from support.positions import ran, same

import jaxshard_magic
from jaxshard_magic.program.blocked_scan import scan_in_blocks
from jaxshard_magic.program.hooks import hook_associative_scan
from jaxshard_magic.strategies.planned_collectives import planned_collectives

EXAMPLES, TIME, WIDTH, STATE = 4, 32, 16, 32
ON = {
    "sp": "cpu:8 seq=8",
    "dp+sp": "cpu:8 data=2 seq=4",
    "fsdp+sp": "cpu:4 data=2 seq=2",
    "tp+sp": "cpu:4 model=2 seq=2",
}


def drawn(*shape, scale=1.0):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape) * scale, jnp.float32)


def linear(a, b):
    return a[0] * b[0], a[1] * b[0] + b[1]


@jax.vmap
def affine(a, b):
    """Of one element, as S5 and others write it: with a matrix, so that its dimensions count."""
    return b[0] @ a[0], b[0] @ a[1] + b[1]


MATRICES, VECTORS = drawn(24, 3, 3, scale=0.5), drawn(24, 3)
SCANS = {
    "sums": lambda scan, x: scan(jnp.add, x),
    "from the end": lambda scan, x: scan(jnp.add, jnp.exp(x), reverse=True),
    "whole numbers": lambda scan, x: scan(jnp.maximum, jnp.round(4 * x).astype(jnp.int32)),
    "truth values": lambda scan, x: scan(jnp.logical_xor, x > 0),
    "along another dimension": lambda scan, x: scan(jnp.multiply, x.reshape(1, 24, 3), axis=1),
    "a negative axis": lambda scan, x: scan(jnp.multiply, x.reshape(3, 24), axis=-1),
    "several arrays": lambda scan, x: scan(linear, (jax.nn.sigmoid(x), {"of": x}["of"])),
    "that do not commute": lambda scan, x: scan(jnp.matmul, MATRICES * x[:, :1, None]),
    "of other shapes": lambda scan, x: scan(affine, (MATRICES, x)),
    "of other shapes, from the end": lambda scan, x: scan(affine, (MATRICES, x), reverse=True),
    "of each example": lambda scan, x: jax.vmap(lambda row: scan(jnp.multiply, row), 1, 1)(x),
    "a size that does not divide": lambda scan, x: scan(jnp.multiply, x[:-1]),
    "fewer than two a block": lambda scan, x: scan(jnp.multiply, x[:4]),
}


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_in_blocks_is_the_scan(name):
    scans = partial(scan_in_blocks, associative_scan, 4), associative_scan
    same(*jax.jit(lambda x: [SCANS[name](scan, x) for scan in scans])(VECTORS), 1e-4)


def test_a_scan_of_empty_elements_in_blocks_is_empty():
    empty = VECTORS[:, :0]
    assert scan_in_blocks(associative_scan, 4, jnp.add, empty).shape == empty.shape


@pytest.mark.parametrize("name", ["several arrays", "that do not commute", "of other shapes, from the end"])
def test_its_derivatives_are_the_scans(name):
    def loss(scan, x):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(SCANS[name](scan, x)))

    def derivatives(scan, x):
        own = partial(loss, scan)
        return jax.grad(own)(x), jax.jvp(own, (x,), (jnp.cos(x),))

    scans = partial(scan_in_blocks, associative_scan, 4), associative_scan
    same(*jax.jit(lambda x: [derivatives(scan, x) for scan in scans])(VECTORS), 1e-4)


def test_the_first_block_never_meets_what_it_does_not_meet_in_the_scan():
    """Nothing comes before it: what would be combined there overflows, and so would its gradient."""
    x = jnp.array([1e30, 1e-30, 1e-8, 1.0, 1.0, 1.0, 1.0, 1.0])
    scans = partial(scan_in_blocks, associative_scan, 2), associative_scan
    gradients = [jax.value_and_grad(lambda x, scan=scan: scan(jnp.multiply, x).sum()) for scan in scans]
    own, other = jax.jit(lambda x: [gradient(x) for gradient in gradients])(x)
    assert np.isfinite(own[1]).all()
    same(own, other)


def test_what_jax_refuses_is_refused_alike():
    for elems in ((jnp.ones(8), jnp.ones(4)), (jnp.ones(8), jnp.ones((4, 8)))):
        errors = []
        for scan in (associative_scan, partial(scan_in_blocks, associative_scan, 2)):
            with pytest.raises((ValueError, TypeError)) as raised:
                scan(linear, elems)
            errors.append(str(raised.value))
        assert errors[0] == errors[1]


def test_scans_are_seen_under_any_name_and_after_the_trace_as_before():
    seen = []

    def counting(scan):
        return lambda *args: seen.append(args[2:]) or scan(*args)

    with hook_associative_scan(counting):
        jax.make_jaxpr(lambda x: associative_scan(jnp.add, x))(VECTORS)
        jax.make_jaxpr(lambda x: lax.associative_scan(jnp.add, x, reverse=True, axis=1))(VECTORS)
        jax.make_jaxpr(jax.grad(lambda x: lax.cumprod(x).sum()))(VECTORS)
    assert seen == [(False, 0), (True, 1), (False, 0)]
    jax.make_jaxpr(lambda x: associative_scan(jnp.add, x))(VECTORS)
    assert len(seen) == 3


def block(p, x):
    """A gated linear recurrence (minGRU)."""
    gate, new = jax.nn.sigmoid(x @ p["gate"]), jnp.tanh(x @ p["up"])
    return x + associative_scan(linear, (1 - gate, gate * new), axis=1)[1] @ p["down"]


def both_ways(p, x):
    made = (jax.nn.sigmoid(x @ p["gate"]), jnp.tanh(x @ p["up"]))
    return x + sum(lax.associative_scan(linear, made, reverse=r, axis=1)[1] for r in (False, True)) @ p["down"]


def of_each(p, x):
    """S5: complex states, the decays of all examples alike, scanned under `vmap`."""

    def one(x):
        decays = jnp.exp(-0.1 + 1j * jnp.arange(STATE)) * jnp.ones((TIME, STATE))
        return lax.associative_scan(jax.vmap(linear), (decays, (x @ p["up"]).astype(complex)))[1].real

    return x + jax.vmap(one)(x) @ p["down"]


def attention(p, x):
    """Linear attention: running sums of keys times values, and of keys."""
    query, key = (jax.nn.elu(x @ p[name][:, :4]) + 1 for name in ("up", "gate"))
    value = x @ p["up"][:, 4:12]
    states = jnp.cumsum(key[..., None] * value[..., None, :], 1)
    mixed = jnp.einsum("btk,btkv->btv", query, states)
    return x + mixed / jnp.einsum("btk,btk->bt", query, jnp.cumsum(key, 1))[..., None] @ p["down"][:8]


def in_logarithms(p, x):
    decays = jnp.cumsum(jax.nn.log_sigmoid(x @ p["gate"]), 1)
    return x + jnp.exp(decays + lax.cumlogsumexp(jnp.tanh(x @ p["up"]) - decays, axis=1)) @ p["down"]


def layers(p, x):
    """A loop over layers, each computed again for the backward pass."""
    stacked = jax.tree.map(lambda a: jnp.stack([a, 0.9 * a]), p)
    return lax.scan(jax.checkpoint(lambda x, p: (both_ways(p, x), None)), x, stacked)[0]


MODELS = {f.__name__: f for f in (block, both_ways, of_each, attention, in_logarithms, layers)}


def parameters():
    shapes = {"gate": (WIDTH, STATE), "up": (WIDTH, STATE), "down": (STATE, WIDTH)}
    return {name: drawn(*shape, scale=0.2) for name, shape in shapes.items()}


def batch():
    x = np.random.default_rng(0).normal(size=(EXAMPLES, TIME, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.roll(x, 1, 1)}


def training(model):
    def step(params, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((model(p, batch["x"]) - batch["y"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def moved(step):
    """What a compiled step sends, and what its plan says: collectives by kind and bytes."""
    sent, told = Counter(), Counter()
    for c in step.report().collectives:
        sent[c.kind, c.bytes] += c.count
    for t in planned_collectives(step.entry.plan.run):
        told[t.kind, t.bytes] += t.count
    return sent, told


CASES = [("sp", "layers"), ("dp+sp", "both_ways"), ("tp+sp", "block")]
OTHERS = [(how, name) for how in (*ON, "fsdp", "tp") for name in MODELS if (how, name) not in CASES]


def trains_alike(how, name):
    step = training(MODELS[name])
    sharded = jaxshard_magic.shard(step, how, mesh=ON.get(how, "cpu:4 data=2 model=2"))
    return ran(sharded, step, parameters(), batch())


@pytest.mark.parametrize(("how", "name"), CASES)
def test_a_recurrence_trains_alike_and_gathers_one_element_of_each_block(how, name):
    step = trains_alike(how, name)
    sent, told = moved(step)
    assert sent == told
    spec = {leaf.path: leaf.spec for leaf in step.report().leaves}["batch.x"]
    assert spec[1] == "seq"
    gathered = [size for (kind, size), _ in sent.items() if kind == "all-gather"]
    assert gathered and max(gathered) <= 8 * EXAMPLES * STATE * 8  # bytes: blocks, complex states


@pytest.mark.full
@pytest.mark.parametrize(("how", "name"), OTHERS)
def test_a_recurrence_trains_alike_elsewhere(how, name):
    trains_alike(how, name)


@pytest.mark.ci
def test_a_device_holds_its_part_of_a_recurrence():
    x = jnp.zeros((1, 16 * TIME, WIDTH))

    def held(how, mesh):
        step = jaxshard_magic.shard(training(block), how, mesh=mesh)
        step(parameters(), {"x": x, "y": x})
        return step.report().memory.per_device[0].temporaries

    assert held("sp", "cpu:8 seq=8") < held("dp", "cpu:1 data=1") / 5


def test_the_report_tells_the_line_of_a_scan_in_blocks():
    step = jaxshard_magic.shard(training(block), "sp", mesh=ON["sp"])
    step(parameters(), batch())
    (told,) = (f.message for f in step.entry.plan.findings if f.code == "scans-in-blocks")
    assert "test_scans.py" in told
    assert "8 blocks" in told


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.gate, self.up = (nnx.Linear(WIDTH, STATE, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(STATE, WIDTH, rngs=rngs)

    def __call__(self, x):
        made = (nnx.sigmoid(self.gate(x)), jnp.tanh(self.up(x)))
        return x + self.down(associative_scan(linear, made, axis=1)[1])


@pytest.mark.ci
def test_an_nnx_recurrence_in_bfloat16_with_microbatches_trains_alike():
    def step(model, batch):
        def loss(model):
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return value

    options = {"precision": "bf16", "microbatches": 2}
    run = jaxshard_magic.shard(nnx.jit(step), "dp+sp", mesh="cpu:4 data=2 seq=2", **options)
    ours, theirs, plain = Recurrent(nnx.Rngs(0)), Recurrent(nnx.Rngs(0)), nnx.jit(step)
    for _ in range(3):
        same(run(ours, batch()), plain(theirs, batch()), 2e-2)


class Scanned(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        return x + jnp.cumprod(1 + 0.01 * jnp.tanh(x @ self.up), 0) @ self.down


def test_an_equinox_model_of_one_long_example_trains_alike():
    model = Scanned(drawn(WIDTH, STATE, scale=0.2), drawn(STATE, WIDTH, scale=0.2))

    @eqx.filter_jit
    def step(model, batch):
        def loss(model):
            return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), value

    one = jax.tree.map(lambda x: x[:1], batch())
    sharded, ours, theirs = jaxshard_magic.shard(step, "dp+sp", mesh="cpu:4 data=2 seq=2"), model, model
    for _ in range(3):
        (ours, got), (theirs, want) = sharded(ours, one), step(theirs, one)
        same(got, want)
    gathered = [c.bytes for c in sharded.report().collectives if c.kind == "all-gather"]
    assert max(gathered) == 4 * STATE * 4  # of four blocks, over both axes
