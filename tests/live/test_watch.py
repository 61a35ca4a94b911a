"""Which number a step returns is its loss, and what a `Watch` reads of the calls that have finished."""

import threading
import time

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxshard_magic
from jaxshard_magic.analysis.throughput import work_per_call
from jaxshard_magic.program.trace import path_name
from jaxshard_magic.step import LoopMonitor

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
    (loss, aux), grads = jax.value_and_grad(lambda p: (loss_fn(p, batch), jnp.sum(batch)), has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (aux, loss)


def epoch(params, batches):
    return jax.lax.scan(gradient_step(lambda new, loss, accuracy: (new, loss)), params, batches)


def optax_step(state, batch):
    params, moments = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, moments = optax.adam(1e-3).update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


SCALE = jnp.float32(1024)


def sgd(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def parts_step(result):
    """A step whose loss has parts with names, which it returns with `result(new params, loss, parts)`."""

    def loss_of(params, batch):
        kl, pg = jnp.mean(batch @ params["w"]), jnp.mean((batch @ params["w"]) ** 2)
        return pg + 0.1 * kl, {"kl_loss": kl, "pg_loss": pg}

    def step(params, batch):
        (loss, parts), grads = jax.value_and_grad(loss_of, has_aux=True)(params, batch)
        return result(sgd(params, grads), loss, parts)

    return step


def scaled_step(result):
    def step(params, batch):
        def scaled(params):
            loss = loss_fn(params, batch)
            return loss * SCALE, loss

        (value, loss), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        return result(sgd(params, jax.tree.map(lambda g: g / SCALE, grads)), value, loss)

    return step


def scale_given(params, batch, scale=SCALE):
    value, grads = jax.value_and_grad(lambda p: loss_fn(p, batch) * scale)(params)
    return sgd(params, jax.tree.map(lambda g: g / scale, grads)), value / scale


def kept_in_state(params, batch):
    value, grads = jax.value_and_grad(loss_fn)({"w": params["w"]}, batch)
    seen = params.get("seen", jnp.float32(0)) + value
    return sgd({"w": params["w"]}, grads) | {"loss": value, "seen": seen}


def microbatched_step(params, batch):
    def trip(sums, part):
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_fn)(params, part)), None

    start = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
    (loss, grads), _ = jax.lax.scan(trip, start, batch.reshape(2, -1, *batch.shape[1:]))
    return sgd(params, grads), {"rate": jnp.float32(0.1), "mean": loss / 2}


def per_example_step(params, batch):
    each = jax.vmap(jax.value_and_grad(lambda p, x: loss_fn(p, x[None])), in_axes=(None, 0))
    losses, grads = each(params, batch)
    return sgd(params, jax.tree.map(lambda g: g.mean(0), grads)), losses.std(), losses.mean()


def gradient_alone(result):
    def step(params, batch):
        grads = jax.grad(loss_fn)(params, batch)
        return result(sgd(params, grads), loss_fn(params, batch), optax.global_norm(grads))

    return step


def two_losses(result):
    def step(params, batch):
        one, first = jax.value_and_grad(loss_fn)(params, batch)
        other, second = jax.value_and_grad(lambda p: jnp.mean(batch @ p["w"]))(params)
        return result(sgd(sgd(params, first), second), one, other)

    return step


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
    "a total beside its parts": (parts_step(lambda new, loss, aux: (new, loss, aux)), "return.1"),
    "a total among named losses": (
        parts_step(lambda new, loss, aux: (new, aux | {"opt": loss})),
        "return.1.opt",
    ),
    "parts of it alone": (parts_step(lambda new, loss, aux: (new, aux)), None),
    "under a loss scale": (
        scaled_step(lambda new, value, loss: (new, {"scale": SCALE, "l": loss})),
        "return.1.l",
    ),
    "a scale taken off": (scaled_step(lambda new, value, loss: (new, value / SCALE)), "return.1"),
    "an argument's scale taken off": (scale_given, "return.1"),
    "kept in the state": (kept_in_state, "return.loss"),
    "a mean over microbatches": (microbatched_step, "return.1.mean"),
    "a mean over examples": (per_example_step, "return.2"),
    "computed beside the gradient": (
        gradient_alone(lambda new, loss, norm: (new, norm, {"my_loss": loss})),
        "return.2.my_loss",
    ),
    "the norm of its gradient": (gradient_alone(lambda new, loss, norm: (new, norm)), None),
    "an accuracy alone": (gradient_step(lambda new, loss, acc: (new, acc)), None),
    "the sum of two": (
        two_losses(lambda new, a, b: (new, {"actor": a, "critic": b, "loss": a + b})),
        "return.1.loss",
    ),
    "one of two": (two_losses(lambda new, a, b: (new, {"d_loss": a, "g_loss": b})), "return.1.d_loss"),
    "beside a running mean": (
        gradient_step(lambda new, loss, acc: (new, {"loss_mean": 0.9 * acc + 0.1 * loss, "now": loss})),
        "return.1.now",
    ),
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
    watch = LoopMonitor()
    watch.follow(sharded)
    state, *rest = args
    for _ in range(calls):
        out = sharded(state, *rest)
        state = out[0] if isinstance(out, tuple) else state if out is None else out
    return sharded, watch, out


def settled(watch: LoopMonitor, calls: int) -> float | None:
    until = time.perf_counter() + 30
    while watch.finished_calls()[0] < calls and time.perf_counter() < until:
        time.sleep(0.01)
    finished, loss = watch.finished_calls()
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
    watch = LoopMonitor()
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
    sharded, watch, new = followed(gradient_step(lambda new, loss, acc: new), PARAMS, BATCH, mesh=mesh, donate=True)
    assert sharded.entry.donated
    assert settled(watch, 3) is None
    watch.stop()
    assert not new["w"].is_deleted()


def held(x, until: threading.Event):
    """The array `x`, for which whatever is called with it waits on the device until the event is set."""

    def wait(x):
        until.wait(30)
        return x

    return jax.jit(lambda x: jax.pure_callback(wait, jax.typeof(x), x), out_shardings=x.sharding)(x)


def test_a_step_that_still_runs_is_not_waited_for(mesh):
    """A step that the device is still busy with returns at once, and so does whoever looks at it."""

    def step(w):
        return w + 1, {"loss": w.sum(), "late": w.sum() + 1}

    sharded = jaxshard_magic.shard(step, "dp", mesh=mesh)
    watch, until = LoopMonitor(), threading.Event()
    watch.follow(sharded)
    w, _ = sharded(jnp.ones(4))
    jax.block_until_ready(w)
    sharded.loops.restart()  # so that no call is waited for to be timed
    before = watch.finished_calls()
    sharded(held(w, until))
    watch.read_ready()
    looked = watch.finished_calls()
    until.set()
    assert looked == before == (1, 4.0)
    assert settled(watch, 2) == 8.0


def test_every_scalar_that_is_no_state_is_a_metric_by_its_name(mesh):
    def step(state, batch):
        params, count = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), count + 1
        return new, {"train": {"loss": loss, "seen": jnp.sum(batch > 0)}, "rows": batch[:, 0]}, loss * 2

    _, watch, _ = followed(step, (PARAMS, jnp.int32(0)), BATCH, mesh=mesh)
    settled(watch, 3)
    watch.settle()
    assert set(watch.run.returned) == {"train.loss", "train.seen", "2"}
    assert watch.run.returned["train.seen"][-1].last == 32
    assert watch.run.returned["2"][-1].last == 2 * watch.run.returned["train.loss"][-1].last


def test_rows_go_to_those_who_take_them_in_order_and_none_twice(mesh):
    sharded, rows = jaxshard_magic.shard(optax_step, "dp", mesh=mesh), []
    sharded.on_metrics(rows.append)
    state, losses = (PARAMS, optax.adam(1e-3).init(PARAMS)), []
    for _ in range(5):
        state, loss = sharded(state, BATCH)
        losses.append(loss)
    metrics = sharded.report().metrics
    assert [row.step for row in rows] == [1, 2, 3, 4, 5]
    assert [row.values for row in rows] == [{"loss": float(loss)} for loss in losses]
    assert metrics is not None and metrics["loss"].count == metrics.steps == 5


def test_what_a_taker_of_rows_raises_the_loop_raises_and_the_state_is_whole(mesh):
    def refuse(row):
        raise OSError("disk full")

    sharded = jaxshard_magic.shard(optax_step, "dp", mesh=mesh, donate=True)
    sharded.on_metrics(refuse)
    state, _ = sharded((PARAMS, optax.adam(1e-3).init(PARAMS)), BATCH)
    jax.block_until_ready(state)
    assert sharded.watched is not None
    sharded.watched.read_ready()
    with pytest.raises(OSError, match="disk full"):
        sharded(state, BATCH)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_the_first_step_whose_loss_is_nan_is_known(mesh):
    def step(w, batch):
        loss = jnp.where(batch.sum() > 100, jnp.nan, jnp.sum(w * batch))
        return w, loss

    sharded = jaxshard_magic.shard(step, "dp", mesh=mesh)
    sharded.on_metrics()
    w = jnp.ones((8, 4))
    for n in range(1, 9):
        sharded(w, BATCH * (10 if n >= 6 else 1))
    metrics = sharded.report().metrics
    assert metrics is not None and (metrics["loss"].astray, metrics["loss"].before) == (6, 5)


@pytest.mark.parametrize("examples", [8, 7])
def test_examples_and_tokens_are_counted_by_the_batch_and_the_rule_is_told(mesh, examples):
    """Without the rows that are added to it."""

    def step(table, batch):
        loss, grads = jax.value_and_grad(lambda t: jnp.mean(t[batch["ids"]] ** 2 + batch["label"].sum()))(table)
        return table - grads, loss

    batch = {"ids": jnp.zeros((examples, 16), jnp.int32), "label": jnp.zeros(examples, jnp.int32)}
    entry = jaxshard_magic.shard(step, "dp", mesh=mesh, pad=True).prepare(jnp.ones((32, 4)), batch)
    assert bool(entry.padding) == (examples == 7)
    known = work_per_call(entry)
    assert (known.examples, known.tokens) == (examples, examples * 16)
    assert known.tokens_rule == f"{examples * 16} a step, batch.ids[{examples},16]"
    assert known.examples_rule == f"{examples} a step, of batch.ids[{examples},16]"
    assert known.ideal_s is None, "a CPU has no published peak"


def test_a_step_that_is_not_followed_leaves_nothing(mesh):
    sharded, watch, _ = followed(gradient_step(lambda new, loss, acc: (new, loss)), PARAMS, BATCH, mesh=mesh)
    watch.stop()
    sharded(PARAMS, BATCH)
    assert watch.calls == 3 and sharded.watch is None


def test_what_passes_after_the_loop_is_no_time_of_its_steps(mesh):
    sharded, watch, _ = followed(gradient_step(lambda new, loss, acc: (new, loss)), PARAMS, BATCH, mesh=mesh)
    watch.finished_calls()
    jax.block_until_ready(sharded(PARAMS, BATCH))
    watch.stop()
    time.sleep(0.6)  # a recording, or whatever the notebook does until the report is asked for again
    watch.settle()
    assert watch.run.steps == watch.calls == 4
    metrics = watch.run.metrics()
    assert metrics is not None and "step_s" not in {curve.name for curve in metrics.curves}


def test_a_recording_after_the_loop_is_no_time_of_it(mesh):
    sharded = jaxshard_magic.shard(gradient_step(lambda new, loss, accuracy: (new, loss)), "dp", mesh=mesh)
    watch, until, began, said = LoopMonitor(), threading.Event(), [], {}
    watch.on_first_call = lambda: began.append(time.perf_counter())
    watch.follow(sharded)
    params, _ = sharded(PARAMS, BATCH)
    jax.block_until_ready(params)
    sharded.loops.restart()  # so that no call is waited for to be timed
    sharded({"w": held(params["w"], until)}, BATCH)
    watch.stop()
    finished = watch.finished_calls()[0]
    until.set()
    assert finished == 1, "the last call is still under way, as when a cell's loop ends"
    sharded.say = lambda doing: said.setdefault(doing, time.perf_counter())
    sharded.profile(3, args=(PARAMS, BATCH))
    metrics = sharded.report().metrics
    assert metrics is not None and metrics.steps == 2
    assert metrics.seconds < said["recording 3 steps"] - began[0] + 1e-3
