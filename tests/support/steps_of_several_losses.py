"""Train steps that take several gradients one after the other, each as `make() -> (step, args)`."""

import jax
import jax.numpy as jnp
import optax
from support.pipelined_steps import (
    EXAMPLES,
    WIDTH,
    Made,
    adam,
    language_model,
    mean_loss,
    normal,
    run_blocks,
    sentences,
)


def blocks(seed, layers=4):
    return [
        {"a": normal(seed + i, WIDTH, 2 * WIDTH), "b": normal(seed + 50 + i, 2 * WIDTH, WIDTH)} for i in range(layers)
    ]


def stack(seed, layers=4):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *blocks(seed, layers))


def numbers():
    return normal(1, EXAMPLES, WIDTH, scale=1.0), normal(2, EXAMPLES, WIDTH, scale=1.0)


def stepped(tx, state, grads, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def adversarial(make=blocks) -> Made:
    """A discriminator, on fakes of the generator as it was, then the generator through the new discriminator."""
    tx = adam()

    def score(critic, x):
        return run_blocks(critic, x).mean(-1)

    def fool(generator, critic, noise):
        return jax.nn.softplus(-score(critic, run_blocks(generator, noise))).mean()

    def tell(critic, real, fake):
        return (jax.nn.softplus(-score(critic, real)) + jax.nn.softplus(score(critic, fake))).mean()

    def step(generator, critic, first, second, noise, real):
        fake = jax.lax.stop_gradient(run_blocks(generator, noise))
        told, grads = jax.value_and_grad(tell)(critic, real, fake)
        critic, second = stepped(tx, second, grads, critic)
        fooled, grads = jax.value_and_grad(fool)(generator, critic, noise)
        generator, first = stepped(tx, first, grads, generator)
        return generator, critic, first, second, told, fooled

    generator, critic = make(10), make(20)
    return step, (generator, critic, tx.init(generator), tx.init(critic), *numbers())


def sharpness_aware() -> Made:
    """The gradient where the first gradient leads uphill to: the same loss twice."""
    tx = adam()

    def step(params, state, x, y):
        value, grads = jax.value_and_grad(mean_loss)(params, x, y)
        uphill = 0.05 / optax.tree.norm(grads)
        higher = jax.tree.map(lambda p, g: p + uphill * g, params, grads)
        params, state = stepped(tx, state, jax.grad(mean_loss)(higher, x, y), params)
        return params, state, value

    params = language_model()
    return step, (params, tx.init(params), *sentences())


def actor_and_critic(make=blocks) -> Made:
    """A critic towards a target network, the actor through the new critic, and the target's average."""

    def values(critic, x):
        return run_blocks(critic, x).mean(-1)

    def step(actor, critic, target, states, x, rewards):
        goal = rewards.mean(-1) + 0.9 * values(target, run_blocks(actor, x))

        def error(critic):
            return ((values(critic, x) - goal) ** 2).mean()

        def loss(actor):
            return -values(critic, run_blocks(actor, x)).mean(), jax.tree.leaves(actor)[0].sum()

        off, grads = jax.value_and_grad(error)(critic)
        critic, second = stepped(tx, states[1], grads, critic)
        (gain, aux), grads = jax.value_and_grad(loss, has_aux=True)(actor)
        actor, first = stepped(tx, states[0], grads, actor)
        target = jax.tree.map(lambda t, c: 0.95 * t + 0.05 * c, target, critic)
        return actor, critic, target, (first, second), {"critic": off, "actor": gain, "aux": aux}

    tx = adam()
    actor, critic = make(10), make(20)
    return step, (actor, critic, make(30), (tx.init(actor), tx.init(critic)), *numbers())


def alone_each() -> Made:
    """Two losses of the same model that know nothing of each other."""

    def step(params, x, y):
        first = jax.grad(mean_loss)(params, x, y)
        second = jax.grad(lambda p: jnp.sum(p["head"] ** 2) * mean_loss(p, y, x))(params)
        return (jax.tree.map(lambda p, *gs: p - 0.1 * sum(gs), params, first, second),)

    return step, (language_model(), *sentences())


def in_a_function_and_in_a_condition() -> Made:
    """Gradients that a jitted function of its own takes, and of which a condition chooses one."""

    def squares(layers, x):
        return (run_blocks(layers, x) ** 2).mean()

    inner = jax.jit(jax.grad(squares))

    def step(first, second, x, y):
        chosen = jax.lax.cond(
            x.sum() > 0,
            inner,
            lambda p, x: jax.grad(lambda p: jnp.tanh(run_blocks(p, x)).mean())(p),
            first,
            x,
        )
        second = jax.tree.map(lambda p, g: p - 0.1 * g, second, jax.grad(squares)(second, y))
        return jax.tree.map(lambda p, g: p - 0.1 * g, first, chosen), second

    return step, (blocks(10), blocks(20), *numbers())


def one_without_examples() -> Made:
    def step(params, x, y):
        first = jax.grad(mean_loss)(params, x, y)
        second = jax.grad(lambda p: 0.1 * sum(jnp.sum(w["a"] ** 2) for w in p["layers"]))(params)
        return (jax.tree.map(lambda p, *gs: p - 0.1 * sum(gs), params, first, second),)

    return step, (language_model(), *sentences())
