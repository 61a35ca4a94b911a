"""Small train steps of every kind that people write, each as `make() -> (step, args)`, to be run as pipelines."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax

WIDTH, VOCABULARY, EXAMPLES, LENGTH = 16, 32, 16, 4
Made = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(seed, *shape, scale=0.2):
    return jax.random.normal(jax.random.key(seed), shape) * scale


def sentences():
    x, y = (jax.random.randint(jax.random.key(i), (EXAMPLES, LENGTH), 0, VOCABULARY) for i in (1, 2))
    return x, y


def block(h, w):
    return h + jax.nn.gelu(h @ w["a"]) @ w["b"]


def blocks(layers):
    return {"a": normal(3, layers, WIDTH, 2 * WIDTH), "b": normal(4, layers, 2 * WIDTH, WIDTH)}


def language_model(layers=4, *, scanned=False, tied=False):
    stack = blocks(layers)
    if not scanned:
        stack = [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(layers)]
    params = {"embedding": normal(5, VOCABULARY, WIDTH), "layers": stack}
    return params if tied else params | {"head": normal(6, WIDTH, VOCABULARY)}


def run_blocks(stack, h, apply=block):
    if isinstance(stack, list):
        for w in stack:
            h = apply(h, w)
        return h
    return jax.lax.scan(lambda h, w: (apply(h, w), None), h, stack)[0]


def logits(params, x, apply=block):
    h = run_blocks(params["layers"], params["embedding"][x], apply)
    return h @ (params["head"] if "head" in params else params["embedding"].T)


def per_example(scores, y):
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean(-1)


def mean_loss(params, x, y):
    return per_example(logits(params, x), y).mean()


def adam() -> optax.GradientTransformation:
    """With the usual `eps` the rounding of a gradient near zero would become a whole step."""
    return optax.adamw(1e-2, eps=1e-3)


def trained(params, loss=mean_loss, optimizer=None, data=None) -> Made:
    """The step that everybody writes, for `loss(params, x, y)`."""
    optimizer = optimizer or adam()

    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), *(data or sentences()))


def with_aux(params, loss, *more) -> Made:
    """The step of a `loss(params, x, y, *more)` with outputs beside it, which are returned."""

    def step(params, x, y, *more):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, x, y, *more)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, aux

    return step, (params, *sentences(), *more)


def mlp() -> Made:
    sizes = (784, 512, 256, 10)
    params = [{"w": normal(i, a, b, scale=a**-0.5), "b": jnp.zeros(b)} for i, (a, b) in enumerate(pairwise(sizes))]

    def loss(params, x, y):
        for i, p in enumerate(params):
            x = x @ p["w"] + p["b"]
            x = jax.nn.relu(x) if i < 2 else x
        return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()

    data = normal(9, EXAMPLES, 784), jax.random.randint(jax.random.key(8), (EXAMPLES,), 0, 10)
    return trained(params, loss, optax.sgd(0.1, momentum=0.9), data)


def unrolled() -> Made:
    return trained(language_model())


def scanned(layers=8) -> Made:
    return trained(language_model(layers, scanned=True))


def tied(stacked=False) -> Made:
    clipped = optax.chain(optax.clip_by_global_norm(0.1), adam())
    return trained(language_model(scanned=stacked, tied=True), optimizer=clipped)


def optimised(optimizer, layers=4, stacked=True) -> Made:
    return trained(language_model(layers, scanned=stacked), optimizer=optimizer)


def schedule():
    return optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 10)


def frozen() -> Made:
    params = language_model(scanned=True)
    mask = {"embedding": False, "layers": True, "head": True}
    optimizer = optax.chain(
        optax.masked(optax.adam(1e-2), mask),
        optax.masked(optax.set_to_zero(), {k: not v for k, v in mask.items()}),
    )
    return trained(params, optimizer=optimizer)


def adapters() -> Made:
    """Low-rank adapters trained beside frozen weights."""
    base = language_model(scanned=True)
    low = {"u": normal(7, 4, WIDTH, 2), "v": jnp.zeros((4, 2, WIDTH))}

    def step(base, low, x, y):
        def loss(low):
            h = base["embedding"][x]
            h, _ = jax.lax.scan(
                lambda h, w: (block(h, w[0]) + h @ w[1]["u"] @ w[1]["v"], None), h, (base["layers"], low)
            )
            return per_example(h @ base["head"], y).mean()

        value, grads = jax.value_and_grad(loss)(low)
        return jax.tree.map(lambda p, g: p - 0.1 * g, low, grads), value

    return step, (base, low, *sentences())


def stopped() -> Made:
    def loss(params, x, y):
        h = jax.lax.stop_gradient(params["embedding"])[x]
        return per_example(run_blocks(params["layers"], h) @ params["head"], y).mean()

    return trained(language_model(), loss)


def averaged() -> Made:
    """Averages of the parameters beside them, and a schedule."""
    step, (params, state, *data) = trained(language_model(scanned=True), optimizer=optax.sgd(schedule()))

    def averaging(params, ema, state, x, y):
        params, state, value = step(params, state, x, y)
        ema = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, ema, params)
        return params, ema, state, value

    return averaging, (params, params, state, *data)


def penalty() -> Made:
    def loss(params, x, y, strength):
        norm = sum(jnp.sum(p * p) for p in jax.tree.leaves(params))
        value = mean_loss(params, x, y)
        return value + strength * norm, {"plain": value, "penalty": strength * norm}

    return with_aux(language_model(), loss, jnp.float32(1e-3))


def masked_mean() -> Made:
    def loss(params, x, y):
        real = (y > 8).astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y)
        return (each * real).sum() / real.sum()

    return trained(language_model(), loss)


def total() -> Made:
    return trained(language_model(), lambda p, x, y: per_example(logits(p, x), y).sum(), optax.adam(1e-2))


def metrics() -> Made:
    def loss(params, x, y):
        scores = logits(params, x)
        each = per_example(scores, y)
        right = (scores.argmax(-1) == y).mean()
        return each.mean(), {
            "each": each,
            "right": right,
            "most": each.max(),
            "first": scores[:, 0],
            "two": 2,
        }

    return with_aux(language_model(), loss)


def dropout() -> Made:
    def loss(params, x, y, key):
        def dropped(h, w):
            return jnp.where(jax.random.bernoulli(w["key"], 0.8, h.shape), block(h, w) / 0.8, 0)

        keys = jax.random.split(key, 4)
        layers = [w | {"key": keys[i]} for i, w in enumerate(params["layers"])]
        return per_example(logits(params | {"layers": layers}, x, dropped), y).mean()

    def step(state, x, y):
        key, own = jax.random.split(state["key"])
        value, grads = jax.value_and_grad(loss)(state["params"], x, y, own)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "key": key}, value

    return step, ({"params": language_model(), "key": jax.random.key(11)}, *sentences())


def encoder_decoder() -> Made:
    """Every layer of the decoder reads what the encoder made, and the embedding's length mask."""

    def loss(params, x, y):
        memory = run_blocks(params["encoder"], params["embedding"][x])
        h = params["embedding"][y]
        for w in params["decoder"]:
            scores = jax.nn.softmax(h @ memory.transpose(0, 2, 1) + jnp.where(x > 4, 0, -1e9)[:, None])
            h = block(h, w) + scores @ memory
        return per_example(h @ params["head"], y).mean()

    model = language_model(6)
    params = {"encoder": model["layers"][:3], "decoder": model["layers"][3:]}
    return trained(params | {k: model[k] for k in ("embedding", "head")}, loss)


@jax.custom_vjp
def clipped_backward(x):
    return x


clipped_backward.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


def own_derivative() -> Made:
    def loss(params, x, y):
        return per_example(logits(params, x, lambda h, w: clipped_backward(block(h, w))), y).mean()

    return trained(language_model(), loss, optax.sgd(0.1))


def remat(stacked) -> Made:
    def loss(params, x, y):
        return per_example(logits(params, x, jax.checkpoint(block)), y).mean()

    return trained(language_model(scanned=stacked), loss)


def branches() -> Made:
    """A condition on a number, inside the loss and around the update."""

    def loss(params, x, y, t):
        value = mean_loss(params, x, y)
        return jax.lax.cond(t > 2, lambda v: v, lambda v: 2 * v, value)

    def step(params, t, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y, t)
        params = jax.lax.cond(
            value < 100, lambda p: jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), lambda p: p, params
        )
        return params, t + 1, value

    return step, (language_model(scanned=True), jnp.int32(0), *sentences())


def loops() -> Made:
    """Loops around the gradient: Newton's square root of the norm, and one over the layers."""

    def step(params, x, y):
        value, grads = jax.value_and_grad(mean_loss)(params, x, y)
        square = sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))
        norm = jax.lax.fori_loop(0, 20, lambda _, r: 0.5 * (r + square / r), jnp.float32(1))
        shrunk, _ = jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] / 2, c[1] + 1), (norm, 0))
        params = jax.tree.map(lambda p, g: p - 0.1 * g / (1 + shrunk), params, grads)
        _, sizes = jax.lax.scan(lambda c, w: (c, jnp.abs(w["a"]).max()), 0, params["layers"])
        return params, value, norm, sizes

    return step, (language_model(scanned=True), *sentences())


def half() -> Made:
    """Parameters in float32, products in bfloat16."""

    def loss(params, x, y):
        short = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return per_example(logits(short, x).astype(jnp.float32), y).mean()

    return trained(language_model(scanned=True), loss, optax.sgd(0.1))


def routed() -> Made:
    """What crosses between stages are numbers, whole numbers and keys."""

    def loss(params, x, y, key):
        h = params["embedding"][x]
        best = (h @ params["gate"]).argmax(-1)
        keys = jax.random.fold_in(key, params["embedding"].shape[0])
        for w in params["layers"]:
            h = block(h, w)
        experts = params["experts"][best]
        h = h + jnp.einsum("btd,btde->bte", h, experts) * (1 + 0.1 * jax.random.uniform(keys))
        return per_example(h @ params["head"], y).mean(), best

    more = {"gate": normal(21, WIDTH, 2), "experts": normal(22, 2, WIDTH, WIDTH)}
    return with_aux(language_model() | more, loss, jax.random.key(3))


def unread() -> Made:
    return trained(language_model() | {"spare": normal(30, 3, 5)}, optimizer=adam())


def average_of_layers() -> Made:
    """The step also tells the average of its layers, and a number that it has always known."""
    step, args = trained(language_model())

    def telling(params, state, x, y):
        params, *rest = step(params, state, x, y)
        return params, *rest, sum(w["a"] for w in params["layers"]) / 4, jnp.int32(3)

    return telling, args


def gradient_in_a_loop() -> Made:
    def step(params, x, y):
        def once(params, _):
            grads = jax.grad(mean_loss)(params, x, y)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), None

        return jax.lax.scan(once, params, length=3)[0]

    return step, (language_model(), *sentences())


def accumulated_in_a_loop() -> Made:
    def step(params, x, y):
        def add(total, part):
            grads = jax.grad(mean_loss)(params, *part)
            return jax.tree.map(jnp.add, total, grads), None

        parts = jax.tree.map(lambda a: a.reshape(4, -1, *a.shape[1:]), (x, y))
        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        return jax.tree.map(lambda p, g: p - 0.1 * g / 4, params, total)

    return step, (language_model(), *sentences())


def nothing_to_cut() -> Made:
    def loss(params, x, y):
        return jnp.sum(params["w"] ** 2) + jnp.mean(x * y)

    return trained({"w": normal(50, 8, 8)}, loss, data=(normal(51, EXAMPLES, 3), normal(52, EXAMPLES, 3)))
