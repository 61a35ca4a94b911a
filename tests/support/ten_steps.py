"""Ten optimizer steps of each kind of train step: as it is, in a narrower type by hand, over microbatches by hand."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import zoo
from flax import nnx
from zoo.equinox_steps import adam
from zoo.linen_steps import labelled
from zoo.nnx_steps import images, vectors
from zoo.nnx_transformers import sentences
from zoo.optax_steps import chain, every_second
from zoo.parts import cross_entropy, descend, mlp

STEPS, MICROBATCHES, EXAMPLES = 10, 4, 32
SCALE = 2.0**15  # of a loss in float16, whose gradients would vanish; exact in the other types
Numbers = list[dict[str, np.ndarray]]  # after each step, by name
F32, BF16, FP16 = (jnp.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))


@dataclass(frozen=True)
class Kind:
    """One kind of train step, as in the zoo.

    `batch(seed)`: half a batch, by the parameters that take it. `block`: a regular expression for something that the
    loss calls. `by_hand(dtype, shards)`: the step with its products in `dtype`. Where `looped`, the loss couples
    examples, and that step takes them in microbatches where `shards` is not None.
    """

    name: str
    batch: Callable[[int], dict[str, Any]]
    block: str
    by_hand: Callable[[Any, int | None], Callable[..., Any]]
    looped: bool = False

    @property
    def step(self) -> zoo.Step:
        return zoo.STEPS[self.name]

    def call(self, dtype: Any = F32) -> zoo.Call:
        """Fresh inputs; NNX modules compute in `dtype`."""
        call = self.step.make()
        for _, module in nnx.iter_graph([x for x in call.args if isinstance(x, nnx.Module)]):
            if isinstance(module, nnx.Module) and hasattr(module, "dtype"):
                setattr(module, "dtype", dtype)  # noqa: B010 - Module itself declares none
        return call


def trained(kind: Kind, fn: Callable[..., Any], dtype: Any = F32) -> Numbers:
    """The numbers after each of ten calls of `fn`, which is called as the zoo's step is, with a new batch each time."""
    call, found = kind.call(dtype), []
    for i in range(STEPS):
        halves = kind.batch(100 + 2 * i), kind.batch(101 + 2 * i)
        whole = jax.tree.map(lambda *parts: jnp.concatenate(parts), *halves)
        call = replace(call, args=tuple((call.arguments() | whole).values()))
        result = fn(*call.args)
        found.append(zoo.numbers(call, result))
        call = kind.step.advance(call, result)
    return found


@functools.cache
def plain(kind: Kind) -> Numbers:
    """The step as it is, on one device."""
    return trained(kind, kind.step.make().fn)


@functools.cache
def by_hand(kind: Kind, dtype: Any, shards: int | None) -> Numbers:
    """The step with its products in `dtype`, and a loss that couples examples in microbatches, on one device."""
    return trained(kind, kind.by_hand(dtype, shards), dtype)


def parts_of(batch: dict[str, Any], shards: int | None) -> Iterator[dict[str, Any]]:
    """The microbatches: of each an equal part of what every shard holds; the whole batch for None."""
    if shards is None:
        yield batch
        return
    for m in range(MICROBATCHES):
        rows = np.arange(EXAMPLES).reshape(shards, MICROBATCHES, -1)[:, m].ravel()
        yield jax.tree.map(lambda x, rows=rows: x[rows], batch)


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


def classified(logits: Any, labels: Any) -> tuple[Any, Any]:
    """The loss, in float32 whatever the logits are."""
    logits = logits.astype(F32)
    return cross_entropy(logits, labels), logits


def gradients(differentiate: Callable[..., Any], loss: Callable[..., Any], params: Any) -> tuple[Any, Any, Any]:
    """The value, logits and gradients of `loss`, which is scaled while it is differentiated."""

    def larger(p):
        value, logits = loss(p)
        return SCALE * value, (value, logits)

    (_, (value, logits)), grads = differentiate(larger, has_aux=True)(params)
    return value, logits, jax.tree.map(lambda g: g / SCALE, grads)


def mlp_gradients(params, batch, dtype):
    def loss(p):
        return classified(mlp(cast(p, dtype), cast(batch["x"], dtype)), batch["y"])

    return gradients(jax.value_and_grad, loss, params)


def descending(dtype, shards):
    @jax.jit
    def step(params, batch):
        value, _, grads = mlp_gradients(params, batch, dtype)
        return descend(params, grads), value

    return step


def optimising(optimizer, dtype, shards):
    @jax.jit
    def step(params, opt_state, batch):
        value, _, grads = mlp_gradients(params, batch, dtype)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def linen(dtype, shards):
    @jax.jit
    def step(state, batch):
        def loss(p):
            return classified(state.apply_fn({"params": cast(p, dtype)}, cast(batch["image"], dtype)), batch["label"])

        value, logits, grads = gradients(jax.value_and_grad, loss, state.params)
        right = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        return state.apply_gradients(grads=grads), {"loss": value, "accuracy": right}

    return step


def equinox(dtype, shards):
    @eqx.filter_jit
    def step(model, opt_state, x, y):
        def loss(m):
            return classified(jax.vmap(cast(m, dtype))(x.astype(dtype)), y)

        value, _, grads = gradients(eqx.filter_value_and_grad, loss, model)
        updates, opt_state = adam.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, value

    return step


def transformer(dtype, shards):
    @nnx.jit
    def step(model, optimizer, batch):
        def loss(m):
            return classified(m(batch["tokens"]), batch["next"])

        value, _, grads = gradients(nnx.value_and_grad, loss, model)
        optimizer.update(model, grads)
        return value

    return step


def convolutions(dtype, shards):
    def taken(model, part):
        return gradients(nnx.value_and_grad, lambda m: classified(m(part["image"]), part["label"]), model)

    @nnx.jit
    def step(batch, metrics, optimizer, model):
        parts = list(parts_of(batch, shards))
        values, logits, grads = zip(*(taken(model, part) for part in parts), strict=True)
        labels = jnp.concatenate([part["label"] for part in parts])
        metrics.update(loss=sum(values) / len(parts), logits=jnp.concatenate(logits), labels=labels)
        optimizer.update(model, jax.tree.map(lambda *g: sum(g) / len(parts), *grads))

    return step


KINDS = {
    "nnx-cnn": Kind(
        "nnx_cnn_returns_nothing", lambda seed: {"batch": images(seed)}, "^Conv", convolutions, looped=True
    ),
    "nnx-transformer": Kind("nnx_transformer", lambda seed: {"batch": sentences(seed)}, "Attention", transformer),
    "linen": Kind("linen_train_state", lambda seed: {"batch": labelled(seed, 8, 8)}, "Dense_0", linen),
    "pytree": Kind("dict_of_arrays", lambda seed: {"batch": vectors(seed)}, "^mlp$", descending),
    "equinox": Kind("equinox_filter_jit", vectors, "^Linear$", equinox),
    "clip-schedule": Kind(
        "clip_schedule_masked_decay",
        lambda seed: {"batch": vectors(seed)},
        "^mlp$",
        functools.partial(optimising, chain),
    ),
    "multi-steps": Kind(
        "multi_steps",
        lambda seed: {"batch": vectors(seed)},
        "^mlp$",
        functools.partial(optimising, every_second),
    ),
}
