"""Gradients that a loop adds up are reduced between devices once, after it: the plain numbers, and fewer bytes."""

import functools
from collections import Counter
from math import prod

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxshard_magic
from jaxshard_magic.analysis.collectives import collectives
from jaxshard_magic.strategies.hold import Hold

TRIPS, LAYERS, EXAMPLES, WIDTH, HIDDEN, VOCAB, TIME = 4, 2, 64, 128, 256, 384, 8
F32 = 4
AR, RS, AG = "all-reduce", "reduce-scatter", "all-gather"
MESHES = {"dp": "data=8", "fsdp": "data=8", "fsdp+tp": "data=4 model=2"}


def ran(step, strategy, axes, reduce, *args):
    """The program that a step becomes, and what it gives."""
    run = jaxshard_magic.shard(step, strategy, mesh=jaxshard_magic.mesh(axes), reduce=reduce)
    return run.prepare(*args), run(*args)


def held(entry) -> Hold:
    assert isinstance(entry.plan.run, Hold)
    return entry.plan.run


def drawn(shapes):
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(
        tree, [0.1 * jax.random.normal(k, s) for k, s in zip(keys, leaves, strict=True)]
    )


def moved(entry, axis="data"):
    """`{(kind, bytes): count}` for one step, over mesh axes with `axis` among them."""
    found = collectives(entry.compiled.as_text(), dict(entry.plan.mesh.shape))
    out = Counter()
    for c in found:
        if axis in (c.axes or ()):
            out[c.kind, c.bytes] += c.count
    return out


def reductions(entry):
    return Counter({k: n for k, n in moved(entry).items() if k[0] in (AR, RS)})


def same(got, want, rtol=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x, "f8") for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


def halves(x):
    return x.reshape(TRIPS, -1, *x.shape[1:])


def swapped(x, shards=8):
    """A part of every shard's own examples in each microbatch."""
    x = x.reshape(shards, TRIPS, -1, *x.shape[1:]).swapaxes(0, 1)
    return x.reshape(TRIPS, -1, *x.shape[3:])


def descend(params, grads):
    return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads)


def accumulating(loss, split=halves, change=lambda grads: grads, dtype=None):
    """A step as people write it: a scan over microbatches that adds up loss and gradients."""

    def step(params, batch):
        def add(total, piece):
            value, grads = jax.value_and_grad(loss)(params, piece)
            grads = jax.tree.map(lambda g: g.astype(dtype or g.dtype), change(grads))
            return jax.tree.map(jnp.add, total, (value, grads)), None

        zeros = jnp.zeros(()), jax.tree.map(lambda p: jnp.zeros(p.shape, dtype or p.dtype), params)
        (value, grads), _ = lax.scan(add, zeros, jax.tree.map(split, batch))
        return descend(params, jax.tree.map(lambda g: g / TRIPS, grads)), value / TRIPS

    return step


def network(scanned):
    """Embedding, residual blocks with one bias, head: unrolled, or scanned with remat."""
    block = {"up": (WIDTH, HIDDEN), "bias": (HIDDEN,), "down": (HIDDEN, WIDTH)}
    stacked = {k: (LAYERS, *s) for k, s in block.items()}
    blocks = stacked if scanned else {f"block{i}": block for i in range(LAYERS)}
    params = drawn({"embed": (VOCAB, WIDTH), "blocks": blocks, "head": (WIDTH, VOCAB)})

    def layer(x, p):
        return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"], None

    def loss(params, batch):
        x = params["embed"][batch["token"]]
        if scanned:
            x, _ = lax.scan(jax.checkpoint(layer), x, params["blocks"])
        else:
            for p in params["blocks"].values():
                x, _ = layer(x, p)
        return jnp.mean((jax.nn.log_softmax(x @ params["head"]) * batch["weight"][:, None]) ** 2)

    token = jax.random.randint(jax.random.key(1), (EXAMPLES,), 0, VOCAB)
    return loss, params, {"token": token, "weight": jnp.linspace(0, 1, EXAMPLES)}


@functools.cache
def accumulated(scanned):
    """The step of `network` over microbatches, its arguments, and what it gives on one device."""
    loss, params, batch = network(scanned)
    step = accumulating(loss, swapped if scanned else halves)
    return step, params, batch, jax.jit(step)(params, batch)


def of_blocks(count, size, scanned):
    """How often which sizes are reduced in one pass over the layers, all together (True) or one by one."""
    return {LAYERS * size: count} if scanned else {size: LAYERS * count}


def expected_once(strategy, scanned):
    """Each parameter once, as large as it is on a device that holds it whole or its tensor parallel part; the loss,
    a number. Only what is too small to be stored in shares stays whole on every device."""
    cut = 2 if "tp" in strategy else 1
    whole = {"embed": VOCAB * WIDTH, "head": WIDTH * VOCAB}
    weights = [F32 * n // cut for n in whole.values()]
    kind = RS if "fsdp" in strategy else AR
    out = Counter({(AR, F32): 1})
    for size in weights:
        out[kind, size] += 1
    for size, n in of_blocks(2, F32 * WIDTH * HIDDEN // cut, scanned).items():
        out[kind, size] += n
    for size, n in of_blocks(1, F32 * HIDDEN // cut, scanned).items():
        out[AR, size] += n
    return out


@pytest.mark.parametrize(
    ("strategy", "scanned"), [("dp", False), ("fsdp", False), ("fsdp", True), ("fsdp+tp", True)]
)
def test_each_weights_gradient_is_reduced_once_per_step(strategy, scanned):
    step, params, batch, want = accumulated(scanned)
    entry, got = ran(step, strategy, MESHES[strategy], "once", params, batch)
    same(got, want)
    assert reductions(entry) == expected_once(strategy, scanned)
    assert held(entry).deferred == len(jax.tree.leaves(params))


def test_each_reduces_at_every_trip():
    step, params, batch, _ = accumulated(True)
    entry, _ = ran(step, "dp", "data=8", "each", params, batch)
    layer, whole = WIDTH * HIDDEN * F32, WIDTH * VOCAB * F32
    per_trip = {layer: 2 * LAYERS, HIDDEN * F32: LAYERS, whole: 2, F32: 1}
    assert reductions(entry) == Counter({(AR, b): TRIPS * n for b, n in per_trip.items()})
    assert held(entry).deferred == 0


def test_weights_can_be_gathered_once_for_all_microbatches():
    step, params, batch, want = accumulated(True)
    entry, got = ran(step, "fsdp", "data=8", "once-gathered", params, batch)
    same(got, want)
    stacked, whole = LAYERS * WIDTH * HIDDEN * F32, WIDTH * VOCAB * F32
    assert {k: n for k, n in moved(entry).items() if k[0] == AG} == {(AG, stacked): 2, (AG, whole): 2}
    assert reductions(entry) == expected_once("fsdp", True)


def test_over_several_batch_axes_each_reduces_what_the_other_left():
    step, params, batch, want = accumulated(True)
    entry, got = ran(step, "dp+fsdp+tp", "data=2 fsdp=2 model=2", "once", params, batch)
    same(got, want)
    sizes = {LAYERS * WIDTH * HIDDEN * F32 // 2: 2, WIDTH * VOCAB * F32 // 2: 2}
    found = collectives(entry.compiled.as_text(), {"data": 2, "fsdp": 2, "model": 2})
    scattered = {c.bytes: c.count for c in found if c.kind == RS and c.axes == ("fsdp",)}
    summed = {c.bytes: c.count for c in found if c.kind == AR and c.axes == ("data",)}
    assert scattered == sizes
    assert summed == {b // 2: n for b, n in sizes.items()}


def test_a_gradient_keeps_its_line_its_name_and_its_phase():
    step, params, batch, _ = accumulated(True)

    def told(reduce):
        run = jaxshard_magic.shard(step, "fsdp", mesh=jaxshard_magic.mesh("data=8"), reduce=reduce)
        run.prepare(params, batch)
        found = [c for c in run.report().collectives or () if c.kind in (AR, RS) and c.bytes > F32]
        return {(c.source, c.phase, c.what) for c in found}

    once = told("once")
    assert once == told("each")
    assert {phase for _, phase, _ in once} == {"backward"}
    assert ('x = params["embed"][batch["token"]]', "backward", "gradient of params.embed") in once


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_a_step_whose_loops_add_no_gradients_up_is_the_same_program(scanned):
    loss, params, batch = network(scanned)
    entry, _ = ran(lambda p, b: descend(p, jax.grad(loss)(p, b)), "fsdp", "data=8", "each", params, batch)
    layout = held(entry).layout
    inputs = layout.program.closed.in_avals
    each, once = (Hold(layout, reduce=how) for how in ("each", "once-gathered"))
    assert once.deferred == 0
    assert jax.jit(each.__call__).lower(*inputs).as_text() == jax.jit(once.__call__).lower(*inputs).as_text()


def recurrent():
    params = drawn({"w": (WIDTH, WIDTH), "u": (WIDTH, WIDTH), "bias": (WIDTH,), "out": (WIDTH, WIDTH)})

    def loss(params, batch):
        def cell(h, x):
            return jnp.tanh(x @ params["w"] + h @ params["u"] + params["bias"]), None

        h, _ = lax.scan(cell, jnp.zeros((batch["x"].shape[0], WIDTH)), batch["x"].swapaxes(0, 1))
        return jnp.mean((h @ params["out"]) ** 2)

    return loss, params, {"x": jax.random.normal(jax.random.key(1), (EXAMPLES, TIME, WIDTH))}


def test_a_recurrent_net_reduces_once_for_all_its_time_steps():
    loss, params, batch = recurrent()

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return descend(params, grads), value

    entry, got = ran(step, "fsdp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    weight = WIDTH * WIDTH * F32
    loop = {(RS, weight): 2, (AR, WIDTH * F32): 1}
    assert reductions(entry) == Counter({**loop, (AR, weight): 1, (AR, F32): 1})  # `out` is used after it


def test_a_loop_over_time_in_a_loop_over_microbatches_reduces_once_for_both():
    loss, params, batch = recurrent()
    step = accumulating(loss)
    entry, got = ran(step, "fsdp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    weight = WIDTH * WIDTH * F32
    assert reductions(entry) == Counter({(RS, weight): 3, (AR, WIDTH * F32): 1, (AR, F32): 1})


def test_convolutions_wait_too():
    params = drawn({"conv": (3, 3, 8, 32), "bias": (32,), "dense": (32, 16)})

    def loss(params, batch):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(batch["x"], params["conv"], (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.mean((jnp.tanh(x + params["bias"]).mean((1, 2)) @ params["dense"]) ** 2)

    batch = {"x": jax.random.normal(jax.random.key(1), (EXAMPLES, 6, 6, 8))}
    step = accumulating(loss)
    entry, got = ran(step, "dp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    sizes = [F32 * x.size for x in jax.tree.leaves(params)]
    assert reductions(entry) == Counter([(AR, F32), *((AR, b) for b in sizes)])


def regression(dtype=jnp.float32):
    params = jax.tree.map(lambda x: x.astype(dtype), drawn({"a": (WIDTH, HIDDEN), "c": (HIDDEN, WIDTH)}))

    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["c"] - 1) ** 2)

    return loss, params, {"x": jax.random.normal(jax.random.key(1), (EXAMPLES, WIDTH), dtype)}


def test_a_table_looked_up_at_every_time_step_is_reduced_once():
    def step(params, batch):
        def loss(params):
            def cell(h, i):
                return jnp.tanh(h + params["table"][i]), None

            h, _ = lax.scan(cell, jnp.zeros((EXAMPLES, WIDTH)), batch["i"].T)
            return jnp.sum(h**2)

        value, grads = jax.value_and_grad(loss)(params)
        return descend(params, grads), value

    params = drawn({"table": (VOCAB, WIDTH)})
    batch = {"i": jax.random.randint(jax.random.key(1), (EXAMPLES, TIME), 0, VOCAB)}
    entry, got = ran(step, "fsdp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    assert reductions(entry) == Counter({(RS, VOCAB * WIDTH * F32): 1, (AR, F32): 1})


def test_a_term_that_is_no_sum_over_examples_counts_once_and_moves_nothing():
    loss, params, batch = regression()

    def decayed(params, batch):
        return loss(params, batch) + sum(jnp.sum(p**2) for p in params.values())

    step = accumulating(decayed)
    entry, got = ran(step, "fsdp", "data=8", "once-gathered", params, batch)
    same(got, jax.jit(step)(params, batch))
    assert {k: n for k, n in moved(entry).items() if k[0] == AG} == {(AG, WIDTH * HIDDEN * F32): 2}


def test_a_loop_may_start_from_what_an_earlier_step_left():
    loss, params, batch = regression()

    def step(state, batch):
        def add(momentum, piece):
            grads = jax.grad(loss)(state["params"], piece)
            return jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, momentum, grads), None

        momentum, _ = lax.scan(add, state["momentum"], jax.tree.map(halves, batch))
        return {"params": descend(state["params"], momentum), "momentum": momentum}

    state = {"params": params, "momentum": jax.tree.map(jnp.ones_like, params)}
    entry, got = ran(step, "fsdp", "data=8", "once-gathered", state, batch)
    same(got, jax.jit(step)(state, batch))
    weight = WIDTH * HIDDEN * F32
    assert reductions(entry) == Counter({(RS, weight): 2})
    assert moved(entry)[AG, weight] == 2  # the weights, not the momentum


def clipped(grads):
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * jnp.minimum(1, 0.01 / norm), grads)


def test_what_is_not_linear_in_the_gradient_is_reduced_at_every_trip():
    loss, params, batch = regression()
    step = accumulating(loss, change=clipped)
    entry, got = ran(step, "fsdp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    assert held(entry).deferred == 0
    assert reductions(entry)[AR, WIDTH * HIDDEN * F32] == 2 * TRIPS


def test_one_sum_may_wait_while_another_cannot():
    loss, params, batch = regression()

    def first_clipped(grads):
        return {
            "a": clipped({"a": grads["a"]})["a"],
            "c": jnp.where(grads["c"].shape[0] > 1, 2 * grads["c"], 0),
        }

    step = accumulating(loss, change=first_clipped)
    entry, got = ran(step, "dp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    assert held(entry).deferred == 1
    assert reductions(entry)[AR, WIDTH * HIDDEN * F32] == TRIPS + 1


def test_counts_and_flags_come_out_exactly():
    loss, params, batch = regression()

    def step(params, batch):
        def add(total, piece):
            grads, positive = jax.grad(loss)(params, piece), jnp.sum(piece["x"] > 0)
            halved, large = total[2] + positive // 2, total[3] | (jnp.sum(piece["x"] > 2) > 170)
            return (jax.tree.map(jnp.add, total[0], grads), total[1] + positive, halved, large), positive

        zeros = jax.tree.map(jnp.zeros_like, params), jnp.int32(0), jnp.int32(0), jnp.bool_(False)
        (grads, *rest), each = lax.scan(add, zeros, jax.tree.map(halves, batch))
        return descend(params, grads), rest, each

    _, got = ran(step, "fsdp", "data=8", "once", params, batch)
    want = jax.jit(step)(params, batch)
    same(got[0], want[0])
    same(got[1:], want[1:], rtol=0)


def test_bfloat16_gradients_are_added_up_and_reduced_in_the_carrys_type():
    loss, params, batch = regression(jnp.bfloat16)
    step = accumulating(loss, dtype=jnp.float32)
    entry, got = ran(step, "fsdp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch), rtol=2**-7)
    assert reductions(entry)[RS, WIDTH * HIDDEN * F32] == 2


def test_a_loop_that_never_runs_gives_its_start():
    loss, params, batch = regression()

    def step(params, batch):
        def add(total, _):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, batch)), None

        total, _ = lax.scan(add, jax.tree.map(jnp.ones_like, params), None, length=0)
        return descend(params, total)

    _, got = ran(step, "fsdp", "data=8", "once-gathered", params, batch)
    same(got, jax.jit(step)(params, batch))


def test_microbatches_that_do_not_divide_over_the_shards_are_reduced_as_before():
    loss, params, batch = regression()
    batch = {"x": batch["x"][: TRIPS * 6].repeat(2, 0)[: TRIPS * 8].reshape(-1, WIDTH)}
    step = accumulating(loss, lambda x: x.reshape(8, -1, WIDTH))
    entry, got = ran(step, "fsdp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    assert held(entry).deferred == 0


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(nn.tanh(nn.Dense(HIDDEN)(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


def linen(x):
    module = Linen()
    return module.init(jax.random.key(0), x), module.apply


def nnx_split(_x):
    graph, params = nnx.split(Nnx(nnx.Rngs(0)))
    return params, lambda params, x: nnx.merge(graph, params)(x)


@pytest.mark.parametrize("library", [linen, nnx_split])
def test_flax_modules_are_reduced_once_per_step(library):
    batch = {"x": jax.random.normal(jax.random.key(1), (EXAMPLES, WIDTH))}
    params, call = library(batch["x"])
    step = accumulating(lambda params, piece: jnp.mean((call(params, piece["x"]) - 1) ** 2))
    entry, got = ran(step, "fsdp", "data=8", "once", params, batch)
    same(got, jax.jit(step)(params, batch))
    weights = Counter((RS if x.ndim > 1 else AR, F32 * prod(x.shape)) for x in jax.tree.leaves(params))
    assert reductions(entry) == weights + Counter({(AR, F32): 1})
