"""Steps whose loops add gradients up, and what their reductions move."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxshard_magic
from jaxshard_magic.analysis.collectives import collectives
from jaxshard_magic.strategies.regions.deferred_reductions import DeferredReductions
from jaxshard_magic.strategies.sharded_lowering import ShardedLowering

TRIPS, LAYERS, EXAMPLES, WIDTH, HIDDEN, VOCAB, TIME = 4, 2, 64, 128, 256, 384, 8
F32 = 4
AR, RS, AG = "all-reduce", "reduce-scatter", "all-gather"


def ran(step, strategy, axes, reduce, *args):
    """The program that a step becomes, and what it gives."""
    run = jaxshard_magic.shard(step, strategy, mesh=jaxshard_magic.mesh(axes), reduce=reduce)
    return run.prepare(*args), run(*args)


def held(entry) -> ShardedLowering:
    assert isinstance(entry.plan.run, ShardedLowering)
    return entry.plan.run


def deferred(hold: ShardedLowering) -> int:
    """How many gradients are reduced where a loop ends."""
    return sum(s.is_gradient for s in hold.region(DeferredReductions).loop_sums.values())


def drawn(shapes):
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(tree, [0.1 * jax.random.normal(k, s) for k, s in zip(keys, leaves, strict=True)])


def moved(entry, axis="data"):
    """`{(kind, bytes): count}` for one step, over all of mesh axes with `axis` among them."""
    found = collectives(entry.compiled.as_text(), dict(entry.plan.mesh.shape))
    out = Counter()
    for c in found:
        if axis in (c.axes or ()) and c.group_size == math.prod(entry.plan.mesh.shape[a] for a in c.axes):
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
