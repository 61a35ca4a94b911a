"""Which number a step returns is its loss, and what a `Watch` reads of the calls that have finished."""

import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxshard_magic
from jaxshard_magic.program.trace import path_name
from jaxshard_magic.step import Watch

PARAMS, BATCH = {"w": jnp.ones((4, 4))}, jnp.ones((8, 4))


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] - 1) ** 2)


def gradient_step(result):
    """A step that returns `result(new params, loss, accuracy)`."""

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return result(new, loss, jnp.mean(batch > 0, dtype=jnp.float32))

    return step


def aux_step(params, batch):
    (loss, aux), grads = jax.value_and_grad(lambda p: (loss_fn(p, batch), jnp.sum(batch)), has_aux=True)(
        params
    )
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (aux, loss)


def epoch(params, batches):
    return jax.lax.scan(gradient_step(lambda new, loss, accuracy: (new, loss)), params, batches)


def optax_step(state, batch):
    params, moments = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, moments = optax.adam(1e-3).update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


LOSSES = {
    "state and loss": (gradient_step(lambda new, loss, accuracy: (new, loss)), "return.1"),
    "loss and state": (gradient_step(lambda new, loss, accuracy: (loss, new)), "return.0"),
    "metrics by name": (
        gradient_step(lambda new, loss, acc: (new, {"acc": acc, "loss": loss})),
        "return.1.loss",
    ),
    "the total of named losses": (
        gradient_step(lambda new, loss, acc: (new, {"a_loss": acc, "total_loss": loss})),
        "return.1.total_loss",
    ),
    "what is differentiated of several": (gradient_step(lambda new, loss, acc: (new, acc, loss)), "return.2"),
    "what is made of it": (gradient_step(lambda new, loss, acc: (new, acc, jnp.exp(2 * loss))), "return.2"),
    "an auxiliary value beside it": (aux_step, "return.1.1"),
    "the only number": (lambda params, batch: (params, loss_fn(params, batch)), "return.1"),
    "an epoch's losses": (epoch, "return.1"),
    "a number that has another name": (gradient_step(lambda new, loss, acc: (new, {"accuracy": acc})), None),
    "no number": (gradient_step(lambda new, loss, acc: new), None),
}


@pytest.fixture(scope="module")
def mesh():
    return jaxshard_magic.mesh("data=2")


@pytest.mark.parametrize(("step", "path"), LOSSES.values(), ids=LOSSES)
def test_the_loss_of_a_step_that_returns(step, path, mesh):
    batch = jnp.stack([BATCH] * 3) if step is epoch else BATCH
    entry = jaxshard_magic.shard(step, "dp", mesh=mesh).prepare(PARAMS, batch)
    found = entry.plan.loss
    assert (found if found is None else path_name(entry.traced.out_paths[found])) == path


def followed(step, *args, calls: int = 3, **options):
    """A Watch of a step that was called on its own results."""
    sharded = jaxshard_magic.shard(step, "dp", **options)
    watch = Watch()
    watch.follow(sharded)
    state, *rest = args
    for _ in range(calls):
        out = sharded(state, *rest)
        state = out[0] if isinstance(out, tuple) else state if out is None else out
    return sharded, watch, out


def settled(watch: Watch, calls: int) -> float | None:
    until = time.perf_counter() + 30
    while watch.finished()[0] < calls and time.perf_counter() < until:
        time.sleep(0.01)
    finished, loss = watch.finished()
    assert finished == calls
    return loss


def test_a_watch_counts_the_calls_that_have_finished_and_reads_the_newest_loss(mesh):
    state = PARAMS, optax.adam(1e-3).init(PARAMS)
    _, watch, (_, loss) = followed(optax_step, state, BATCH, mesh=mesh)
    assert settled(watch, 3) == float(loss)


def test_a_watch_reads_the_last_loss_of_an_epoch_in_one_scan(mesh):
    _, watch, (_, losses) = followed(epoch, PARAMS, jnp.stack([BATCH] * 3), mesh=mesh)
    assert settled(watch, 3) == float(losses[-1])


def test_a_watch_reads_what_an_nnx_step_returns(mesh):
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    sharded = jaxshard_magic.shard(step, "dp", mesh=mesh)
    watch = Watch()
    watch.follow(sharded)
    losses = [sharded(model, optimizer, BATCH) for _ in range(3)]
    assert settled(watch, 3) == float(losses[-1])


def test_a_step_that_returns_nothing_is_counted(mesh):
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def step(model, batch):
        grads = nnx.grad(lambda m: jnp.mean(m(batch) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))

    _, watch, _ = followed(step, model, BATCH, mesh=mesh)
    assert settled(watch, 3) is None


def test_donated_state_is_counted_and_not_kept(mesh):
    sharded, watch, new = followed(
        gradient_step(lambda new, loss, acc: new), PARAMS, BATCH, mesh=mesh, donate=True
    )
    assert sharded.entry.donated
    assert settled(watch, 3) is None
    watch.leave()
    assert not new["w"].is_deleted()


class Result:
    """A loss whose call the device has not done yet, as jax shows it."""

    is_fully_replicated = is_fully_addressable = True

    def __init__(self, value: float):
        self.value, self.ready, self.deleted = value, False, False

    def is_ready(self) -> bool:
        if self.deleted:
            raise RuntimeError("Array has been deleted.")
        return self.ready

    def is_deleted(self) -> bool:
        return self.deleted

    def addressable_data(self, index: int) -> np.ndarray:
        self.is_ready()
        return np.float32(self.value)


@pytest.fixture
def begun() -> tuple[Watch, list[Result]]:
    """A watch of three calls that have returned, and their losses."""
    entry: Any = SimpleNamespace(plan=SimpleNamespace(loss=0), clock=SimpleNamespace())
    step: Any = SimpleNamespace(watch=None)
    watch, results = Watch(), [Result(n) for n in (3.0, 2.0, 1.0)]
    watch.follow(step)
    for result in results:
        entry.clock.sign = result
        step.watch(entry)
    return watch, results


def test_calls_that_the_device_has_not_done_are_not_counted(begun):
    watch, results = begun
    assert watch.calls == 3 and watch.finished() == (0, None)
    results[0].ready = results[1].ready = True
    assert watch.finished() == (2, 2.0)
    results[2].ready = True
    assert watch.finished() == (3, 1.0)


def test_a_loss_that_a_later_call_took_over_is_not_read(begun):
    watch, results = begun
    results[0].ready = True
    assert watch.finished() == (1, 3.0)
    results[1].deleted = True
    assert watch.finished() == (2, 3.0)


def test_a_loss_that_goes_while_it_is_looked_at_is_not_read(begun, monkeypatch):
    watch, results = begun
    results[2].deleted = True
    monkeypatch.setattr(Result, "is_deleted", lambda self: False)
    assert watch.finished() == (3, None)


def test_a_step_that_is_not_followed_leaves_nothing(mesh):
    sharded, watch, _ = followed(gradient_step(lambda new, loss, acc: (new, loss)), PARAMS, BATCH, mesh=mesh)
    watch.leave()
    sharded(PARAMS, BATCH)
    assert watch.calls == 3 and sharded.watch is None
