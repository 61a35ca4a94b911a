"""Agents as their repositories train them: target networks, several optimizers, epochs of minibatches in a scan."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from .parts import BATCH, Draw, adam, linen_variables, mlp, mlp_params, state_roles
from .registry import Call, step

SEEN, ACTIONS, DISCOUNT = 32, 8, 0.99


class QNetwork(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (128, 64):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(ACTIONS)(x)


class TargetState(TrainState):
    target_params: Any = None


Q = QNetwork()


@jax.jit
def dqn_update(q_state, observations, actions, next_observations, rewards, dones):
    next_values = jnp.max(q_state.apply_fn({"params": q_state.target_params}, next_observations), axis=-1)
    goals = rewards + (1 - dones) * DISCOUNT * next_values

    def mse_loss(params):
        values = q_state.apply_fn({"params": params}, observations)
        chosen = values[jnp.arange(values.shape[0]), actions.squeeze()]
        return ((chosen - goals) ** 2).mean(), chosen

    (loss, chosen), grads = jax.value_and_grad(mse_loss, has_aux=True)(q_state.params)
    q_state = q_state.apply_gradients(grads=grads)
    target = optax.incremental_update(q_state.params, q_state.target_params, 0.05)
    return loss, chosen, q_state.replace(target_params=target)


TRANSITIONS = ("observations", "actions", "next_observations", "rewards", "dones")


def transitions(d: Draw, actions: Any) -> tuple[Any, ...]:
    dones = (d.ids(8, BATCH) == 0).astype(jnp.float32)
    return d.normal(BATCH, SEEN), actions, d.normal(BATCH, SEEN), d.normal(BATCH), dones


@step(
    "public linen rl",
    batch=dict.fromkeys(TRANSITIONS, 0),
    roles=state_roles("q_state", target_params="other") | dict.fromkeys(TRANSITIONS, "batch"),
    feeds={"q_state": 2},
    notes="five arrays of a replay buffer; goals that no gradient meets, indices beside an arange",
)
def linen_deep_q(seed: int = 0) -> Call:
    d = Draw(seed)
    params = linen_variables(Q, seed, jnp.zeros((1, SEEN)))["params"]
    more = {"target_params": jax.tree.map(jnp.copy, params)}
    q_state = TargetState.create(apply_fn=Q.apply, params=params, tx=adam, **more)
    return Call(dqn_update, (q_state, *transitions(d, d.ids(ACTIONS, BATCH, 1))))


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x, a):
        x = jnp.concatenate([x, a], -1)
        for width in (128, 64):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(1)(x)


class Actor(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (128, 64):
            x = nn.relu(nn.Dense(width)(x))
        return nn.tanh(nn.Dense(ACTIONS)(x))


CRITIC, ACTOR = Critic(), Actor()


@jax.jit
def td3_update(actor_state, qf1_state, qf2_state, batch, key):
    """Twin critics move, then the actor; averages of all three follow."""
    key, noise_key = jax.random.split(key, 2)
    noise = jnp.clip(0.2 * jax.random.normal(noise_key, batch["actions"].shape), -0.5, 0.5)
    next_actions = actor_state.apply_fn({"params": actor_state.target_params}, batch["next_observations"]) + noise
    next_actions = jnp.clip(next_actions, -1.0, 1.0)
    nexts = [
        qf.apply_fn({"params": qf.target_params}, batch["next_observations"], next_actions)[:, 0]
        for qf in (qf1_state, qf2_state)
    ]
    goals = batch["rewards"] + (1 - batch["dones"]) * DISCOUNT * jnp.minimum(*nexts)

    def mse_loss(params, qf):
        values = qf.apply_fn({"params": params}, batch["observations"], batch["actions"])[:, 0]
        return ((values - goals) ** 2).mean(), values.mean()

    (loss1, mean1), grads1 = jax.value_and_grad(mse_loss, has_aux=True)(qf1_state.params, qf1_state)
    (loss2, mean2), grads2 = jax.value_and_grad(mse_loss, has_aux=True)(qf2_state.params, qf2_state)
    qf1_state = qf1_state.apply_gradients(grads=grads1)
    qf2_state = qf2_state.apply_gradients(grads=grads2)

    def actor_loss(params):
        actions = actor_state.apply_fn({"params": params}, batch["observations"])
        return -qf1_state.apply_fn({"params": qf1_state.params}, batch["observations"], actions).mean()

    actor_loss_value, grads = jax.value_and_grad(actor_loss)(actor_state.params)
    actor_state = actor_state.apply_gradients(grads=grads)
    moved = [
        state.replace(target_params=optax.incremental_update(state.params, state.target_params, 0.005))
        for state in (actor_state, qf1_state, qf2_state)
    ]
    return (*moved, key), (loss1, loss2, mean1, mean2, actor_loss_value)


@step(
    "public linen rl rng",
    batch={f"batch.{name}": 0 for name in TRANSITIONS},
    roles=state_roles("actor_state", target_params="other")
    | state_roles("qf1_state", target_params="other")
    | state_roles("qf2_state", target_params="other")
    | {"batch": "batch", "key": "rng"},
    feeds={"actor_state": (0, 0), "qf1_state": (0, 1), "qf2_state": (0, 2), "key": (0, 3)},
    notes="three train states, two of the same shapes; the third loss reads what the first moved",
)
def linen_twin_critics(seed: int = 0) -> Call:
    d, seen, acted = Draw(seed), jnp.zeros((1, SEEN)), jnp.zeros((1, ACTIONS))

    def state(model: nn.Module, own_seed: int, *example: jax.Array) -> TargetState:
        params = model.init(jax.random.key(own_seed), *example)["params"]
        more = {"target_params": jax.tree.map(jnp.copy, params)}
        return TargetState.create(apply_fn=model.apply, params=params, tx=adam, **more)

    states = (
        state(ACTOR, seed, seen),
        state(CRITIC, seed + 1, seen, acted),
        state(CRITIC, seed + 2, seen, acted),
    )
    batch = dict(zip(TRANSITIONS, transitions(d, jnp.tanh(d.normal(BATCH, ACTIONS))), strict=True))
    return Call(td3_update, (*states, batch, jax.random.PRNGKey(seed)))


class Soft(NamedTuple):
    """All that soft actor-critic trains."""

    actor: Any
    critics: Any
    targets: Any
    log_alpha: jax.Array
    opt_states: tuple[Any, Any, Any]


def sampled(actor: Any, seen: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Actions between -1 and 1, and how likely they were."""
    mean, log_std = jnp.split(mlp(actor, seen), 2, axis=-1)
    log_std = jnp.clip(log_std, -5, 2)
    raw = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
    likely = -0.5 * ((raw - mean) / jnp.exp(log_std)) ** 2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
    return jnp.tanh(raw), jnp.sum(likely - 2 * (jnp.log(2.0) - raw - jax.nn.softplus(-2 * raw)), axis=-1)


def both(critics: Any, seen: jax.Array, actions: jax.Array) -> jax.Array:
    """Values (2, batch) of the two critics, which are stacked."""
    x = jnp.concatenate([seen, actions], axis=-1)
    return jax.vmap(mlp, in_axes=(0, None))(critics, x)[..., 0]


@jax.jit
def soft_step(state: Soft, batch, key):
    next_key, actor_key = jax.random.split(key)
    alpha = jnp.exp(state.log_alpha)
    next_actions, next_likely = sampled(state.actor, batch["next_observations"], next_key)
    future = both(state.targets, batch["next_observations"], next_actions).min(0) - alpha * next_likely
    goals = batch["rewards"] + (1 - batch["dones"]) * DISCOUNT * future

    def critic_loss(critics):
        return jnp.mean((both(critics, batch["observations"], batch["actions"]) - goals) ** 2)

    def actor_loss(actor):
        actions, likely = sampled(actor, batch["observations"], actor_key)
        return jnp.mean(alpha * likely - both(state.critics, batch["observations"], actions).min(0)), likely.mean()

    c_loss, c_grads = jax.value_and_grad(critic_loss)(state.critics)
    (a_loss, likely), a_grads = jax.value_and_grad(actor_loss, has_aux=True)(state.actor)
    t_loss, t_grads = jax.value_and_grad(lambda t: -jnp.exp(t) * (likely - ACTIONS))(state.log_alpha)
    new, opt_states = [], []
    trained = (state.actor, state.critics, state.log_alpha)
    for params, grads, opt_state in zip(trained, (a_grads, c_grads, t_grads), state.opt_states, strict=True):
        updates, opt_state = adam.update(grads, opt_state)
        new.append(optax.apply_updates(params, updates))
        opt_states.append(opt_state)
    actor, critics, log_alpha = new
    targets = optax.incremental_update(critics, state.targets, 0.005)
    return Soft(actor, critics, targets, log_alpha, tuple(opt_states)), {
        "c": c_loss,
        "a": a_loss,
        "t": t_loss,
    }


@step(
    "public rl rng",
    batch={f"batch.{name}": 0 for name in TRANSITIONS},
    roles={"state.actor": "params", "state.critics": "params", "state.log_alpha": "params"}
    | {"state.targets": "other", "state.opt_states": "optimizer", "batch": "batch", "key": "rng"},
    feeds={"state": 0},
    notes="three losses and optimizers, two critics under vmap, a temperature that is one number",
)
def soft_actor_critic(seed: int = 0) -> Call:
    d = Draw(seed)
    actor = mlp_params(d, SEEN, 128, 64, 2 * ACTIONS)
    critics = jax.tree.map(lambda *x: jnp.stack(x), *(mlp_params(d, SEEN + ACTIONS, 128, 64, 1) for _ in range(2)))
    log_alpha = jnp.asarray(-1.0)
    opts = (adam.init(actor), adam.init(critics), adam.init(log_alpha))
    state = Soft(actor, critics, jax.tree.map(jnp.copy, critics), log_alpha, opts)
    batch = dict(zip(TRANSITIONS, transitions(d, jnp.tanh(d.normal(BATCH, ACTIONS))), strict=True))
    return Call(soft_step, (state, batch, jax.random.key(seed)))


class ActorCritic(nn.Module):
    """A policy and a value on one trunk."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(128)(x))))
        return nn.Dense(ACTIONS)(x), nn.Dense(1)(x)[..., 0]


class Transition(NamedTuple):
    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    done: jax.Array
    estimate: jax.Array
    log_prob: jax.Array


AC, EPOCHS, MINIBATCHES, STEPS = ActorCritic(), 2, 2, 8
WHERE = {f"traj.{name}": 1 for name in Transition._fields} | {"last_obs": 0}
ROLES = state_roles("train_state") | {"traj": "batch", "last_obs": "batch"}
clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))


def rollout(d: Draw) -> tuple[Transition, jax.Array]:
    """Eight steps in each of sixteen environments, and what comes after."""
    shape = (STEPS, BATCH)
    done = (d.ids(8, *shape) == 0).astype(jnp.float32)
    log_prob = d.normal(*shape, scale=0.1) - 2.0
    seen, acted, reward, value = (
        d.normal(*shape, SEEN),
        d.ids(ACTIONS, *shape),
        d.normal(*shape),
        d.normal(*shape),
    )
    return Transition(seen, acted, reward, done, value, log_prob), d.normal(BATCH, SEEN)


def advantages_of(traj: Transition, last_value: jax.Array) -> jax.Array:
    """Generalised advantage estimates, backward in time."""

    def back(carry, t):
        advantage, next_value = carry
        delta = t.reward + DISCOUNT * next_value * (1 - t.done) - t.estimate
        advantage = delta + DISCOUNT * 0.95 * (1 - t.done) * advantage
        return (advantage, t.estimate), advantage

    return jax.lax.scan(back, (jnp.zeros_like(last_value), last_value), traj, reverse=True)[1]


def ac_state(seed: int) -> TrainState:
    params = linen_variables(AC, seed, jnp.zeros((1, SEEN)))["params"]
    return TrainState.create(apply_fn=AC.apply, params=params, tx=clipped)


@jax.jit
def ppo_update(train_state, traj, last_obs, rng):
    """PureJaxRL: epochs in a scan, in each a permutation and a scan over its minibatches."""
    _, last_value = train_state.apply_fn({"params": train_state.params}, last_obs)
    advantages = advantages_of(traj, last_value)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (traj, advantages, advantages + traj.estimate))

    def loss_fn(params, minibatch):
        t, gae, targets = minibatch
        logits, value = train_state.apply_fn({"params": params}, t.obs)
        scores = jax.nn.log_softmax(logits)
        log_prob = jnp.take_along_axis(scores, t.action[:, None], axis=1)[:, 0]
        ratio = jnp.exp(log_prob - t.log_prob)
        gae = (gae - gae.mean()) / (gae.std() + 1e-8)
        gain = jnp.minimum(ratio * gae, jnp.clip(ratio, 0.8, 1.2) * gae).mean()
        entropy = -jnp.sum(jnp.exp(scores) * scores, axis=-1).mean()
        return 0.5 * jnp.square(value - targets).mean() - gain - 0.01 * entropy

    def on_minibatch(state, minibatch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, minibatch)
        return state.apply_gradients(grads=grads), loss

    def epoch(carry, _):
        state, rng = carry
        rng, order_rng = jax.random.split(rng)
        order = jax.random.permutation(order_rng, STEPS * last_obs.shape[0])
        shuffled = jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), rows)
        state, losses = jax.lax.scan(on_minibatch, state, shuffled)
        return (state, rng), losses

    (train_state, rng), losses = jax.lax.scan(epoch, (train_state, rng), None, EPOCHS)
    return train_state, rng, losses


@step(
    "public linen rl rng scan",
    batch=WHERE,
    roles=ROLES | {"rng": "rng"},
    feeds={"train_state": 0, "rng": 1},
    tolerance=2e-3,
    notes="gradients inside two loops; minibatches are drawn from all steps and environments",
)
def linen_ppo_epochs(seed: int = 0) -> Call:
    return Call(ppo_update, (ac_state(seed), *rollout(Draw(seed)), jax.random.PRNGKey(seed)))


@functools.partial(jax.jit, static_argnames="entropy_weight")
def a2c_update(train_state, traj, last_obs, *, entropy_weight):
    """One gradient over all steps of all environments."""
    _, last_value = train_state.apply_fn({"params": train_state.params}, last_obs)
    advantages = advantages_of(traj, last_value)

    def loss_fn(params):
        logits, value = train_state.apply_fn({"params": params}, traj.obs)
        scores = jax.nn.log_softmax(logits)
        log_prob = jnp.take_along_axis(scores, traj.action[..., None], axis=-1)[..., 0]
        policy = -jnp.mean(log_prob * jax.lax.stop_gradient(advantages))
        entropy = -jnp.mean(jnp.sum(jnp.exp(scores) * scores, axis=-1))
        critic = jnp.mean(jnp.square(value - (advantages + traj.estimate)))
        return policy + 0.5 * critic - entropy_weight * entropy, {"policy": policy, "critic": critic}

    (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(train_state.params)
    return train_state.apply_gradients(grads=grads), metrics | {"loss": loss}


@step("public linen rl scan", batch=WHERE, roles=ROLES, feeds={"train_state": 0}, tolerance=1e-3)
def linen_advantage_actor_critic(seed: int = 0) -> Call:
    """Advantages by a scan backward in time; environments are the second dimension."""
    return Call(a2c_update, (ac_state(seed), *rollout(Draw(seed))), {"entropy_weight": 0.01})
