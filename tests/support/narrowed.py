"""Losses with their products in a shorter type, beside themselves in float32."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from zoo.parts import Draw, cross_entropy, mlp, mlp_params
from zoo.transformers import TIME, VOCAB, Form, decode, decoder_params

from jaxshard_magic.gradients.float32_recompute import recompute_float32
from jaxshard_magic.gradients.precision import CastLoss, cast_loss
from jaxshard_magic.program.ir import Program

ROUNDING = 2.0**-8  # of bfloat16
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


class Loss:
    """`f(params, *data)` as a flat jaxpr, cast, and the ways to run both."""

    def __init__(self, f, params, *data, how="bf16"):
        self.leaves, tree = jax.tree.flatten(params)
        self.data, n = data, len(self.leaves)

        def flat(*xs):
            return jax.tree.leaves(f(tree.unflatten(xs[:n]), *xs[n:]))

        self.closed = jax.make_jaxpr(flat)(*self.leaves, *data)
        self.cast: CastLoss = cast_loss(self.closed, how)

    def run(self, closed):
        return jax.jit(jaxpr_as_fun(closed))(*self.leaves, *self.data)

    def value(self, closed):
        fun = jaxpr_as_fun(closed)
        return lambda *leaves: fun(*leaves, *self.data)[0]

    def grads(self, closed):
        places = tuple(range(len(self.leaves)))
        return jax.jit(jax.value_and_grad(self.value(closed), argnums=places))(*self.leaves)

    @functools.cached_property
    def found(self):
        """The value and gradients of the cast loss."""
        return self.grads(recompute_float32(self.cast.closed))

    @functools.cached_property
    def reference(self):
        """The value and gradients of the loss as it was written."""
        return self.grads(self.closed)

    def differentiated(self, closed):
        return jax.make_jaxpr(jax.grad(self.value(closed), argnums=tuple(range(len(self.leaves)))))(*self.leaves)

    def kept_bytes(self, closed):
        """Bytes that the backward pass is handed, but for the parameters themselves."""

        def residuals(*leaves):
            return jax.tree.leaves(jax.vjp(self.value(closed), *leaves)[1])

        shapes = {x.shape for x in self.leaves}
        kept = jax.make_jaxpr(residuals)(*self.leaves).out_avals
        return sum(x.size * x.dtype.itemsize for x in kept if x.shape not in shapes)


def off(grads, reference):
    """The largest difference of two lists of arrays, relative to the largest number."""
    largest = max(float(jnp.abs(b).max()) for b in reference)
    return max(float(jnp.abs(a - b).max()) for a, b in zip(grads, reference, strict=True)) / max(largest, 1e-30)


def types_of(closed, name):
    """The dtypes of the results of every equation of this name."""
    return [e.jaxpr_eqn.outvars[0].aval.dtype for e in Program(closed).equations if e.name == name]


def classifier():
    d = Draw(0)
    return mlp_params(d, 8, 32, 32, 4), d.normal(64, 8), d.ids(4, 64)


def classify(params, x, labels):
    return cross_entropy(mlp(params, x), labels)


def decoder(form, batch=4):
    d = Draw(0)

    def loss(params, tokens):
        return cross_entropy(decode(params, tokens[:, :-1], form), tokens[:, 1:])

    return loss, decoder_params(d, form), d.ids(VOCAB, batch, TIME + 1)


class Pictures(nn.Module):
    dtype: jnp.dtype = F32

    @nn.compact
    def __call__(self, x):
        for width in (8, 16):
            x = nn.Conv(width, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        return nn.Dense(4, dtype=self.dtype)(x.mean(axis=(1, 2)))


def pictures(dtype=F32):
    d, model = Draw(0), Pictures(dtype)
    x, labels = d.normal(16, 8, 8, 3), d.ids(4, 16)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    stats, tree = jax.tree.flatten(variables["batch_stats"])

    def loss(params, x, labels, *stats):
        given = {"params": params, "batch_stats": tree.unflatten(stats)}
        logits, after = model.apply(given, x, mutable=["batch_stats"])
        return cross_entropy(logits.astype(F32), labels), after

    return loss, variables["params"], x, labels, *stats


def nnx_network():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)
            self.norm = nnx.LayerNorm(32, rngs=rngs)

        def __call__(self, x):
            return self.down(self.norm(nnx.silu(self.up(x))))

    d = Draw(0)
    graph, params = nnx.split(Network(nnx.Rngs(0)))
    return (lambda p, x, y: cross_entropy(nnx.merge(graph, p)(x), y)), params, d.normal(64, 8), d.ids(4, 64)


@jax.custom_vjp
def gentle(x):
    return jnp.square(x).mean()


gentle.defvjp(lambda x: (gentle(x), x), lambda x, g: (g * jnp.clip(2 * x, -1, 1) / x.size,))


def huber():
    d = Draw(0)
    return (lambda p, x, y: gentle(mlp(p, x) - y)), mlp_params(d, 8, 32, 1), d.normal(64, 8), d.normal(64, 1)


@functools.cache
def model(name):
    dots = jax.checkpoint_policies.dots_saveable
    made = {
        "mlp": lambda: (classify, *classifier()),
        "transformer": lambda: decoder(Form()),
        "scanned and remat": lambda: decoder(Form(fused=True, tied=True, scanned=True, remat=dots)),
        "linen with BatchNorm": pictures,
        "nnx": nnx_network,
        "a derivative rule of its own": huber,
    }
    return Loss(*made[name]())
