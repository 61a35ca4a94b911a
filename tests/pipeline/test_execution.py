"""How a pipeline runs: in the order of its schedule, holding what the simulator counts, and nothing after the step."""

import gc
import time
import weakref
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.interpreters import pxla

import jaxshard_magic
from jaxshard_magic import schedule
from jaxshard_magic.pipeline.jobs import program_identity, reuse_executable
from jaxshard_magic.schedule.actions import entry_actions, parse_entry

BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)


def layers(n):
    return [jnp.eye(4) + 0.1 * jax.random.normal(jax.random.key(i), (4, 4)) for i in range(n)]


@pytest.fixture
def no_cache():
    config: Any = jax.config
    before = config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


def loss_of(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def descend(ws, x):
    value, grads = jax.value_and_grad(loss_of)(ws, x)
    return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value


def piped(step, stages, name="1f1b", microbatches=None, **options):
    chunks = 2 if schedule.NAMES[name].chunks != 1 else None
    how = {"mesh": f"pipe={stages}", "microbatches": microbatches or 2 * stages, "chunks": chunks}
    return jaxshard_magic.shard(step, "pp", schedule=name, **how | options)


def pipeline_of(step):
    assert step.entry is not None
    return step.entry.compiled


def close(found, wanted, atol=1e-6):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


SIZES = [(name, stages) for name in schedule.NAMES for stages in (2, 3, 4)]
QUICK = {("1f1b", 4), ("interleaved", 2), ("dualpipev", 2)}


@pytest.mark.parametrize(
    ("name", "stages"), [pytest.param(*row, marks=() if row in QUICK else pytest.mark.full) for row in SIZES]
)
def test_a_rank_holds_what_the_simulator_counts(name, stages):
    m = 2 * stages
    step, ws = piped(descend, stages, name, m), layers(2 * stages)
    x = jnp.ones((m, 4))
    close(step(ws, x), descend(ws, x))
    step(ws, x)
    pipe = pipeline_of(step)
    wanted = schedule.simulate(pipe.split.schedule).peak_activations
    assert pipe.peaks == wanted
    assert pipe.last_run is not None
    assert pipe.last_run.peaks == wanted


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("1f1b", marks=pytest.mark.full),
        "zb-h1",
        pytest.param("interleaved", marks=pytest.mark.full),
        "dualpipev",
    ],
)
def test_actions_keep_the_order_of_their_rank_and_wait_for_what_they_need(name):
    step, ws = piped(descend, 2, name, 4), layers(4)
    for _ in range(2):
        step(ws, BATCH)
    run = pipeline_of(step).last_run
    ends = {}
    for rank, row in enumerate(run.schedule.grid):
        mine = [e for e in run.events if e.rank == rank]
        assert [e.action for e in mine] == [str(a) for each in row for a in entry_actions(each)]
        assert all(a.end <= b.start for a, b in pairwise(mine))
    for e in run.events:
        (action,) = entry_actions(parse_entry(e.action))
        ends[action.kind, action.stage, action.microbatch] = e.end
    last = max(s for _, s, _ in ends)
    for e in run.events:
        (a,) = entry_actions(parse_entry(e.action))
        s, m = a.stage, a.microbatch
        if a.kind == "F" and s > 0:
            assert e.start >= ends["F", s - 1, m]
        if a.kind in "BI":
            assert e.start >= ends["F", s, m]
            if s < last:
                assert e.start >= min(ends[k, s + 1, m] for k in "BI" if (k, s + 1, m) in ends)
        if a.kind == "W":
            assert e.start >= ends["I", s, m]


def test_a_wait_in_the_inbox_of_the_same_rank_is_no_transfer():
    # Four stages on two ranks, as a V: ranks 0, 1, 1, 0.
    step, ws = piped(descend, 2, "dualpipev", 4), layers(4)
    for _ in range(2):
        step(ws, BATCH)
    run = pipeline_of(step).last_run
    assert {(h.from_stage, h.to_stage) for h in run.handovers} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    first, second, third = run.boundary_seconds()
    assert first is not None and second is None and third is not None


def adam(lr=0.01):
    optimizer = optax.adam(lr)

    def step(state, x):
        value, grads = jax.value_and_grad(loss_of)(state["ws"], x)
        updates, opt = optimizer.update(grads, state["opt"])
        return {"ws": optax.apply_updates(state["ws"], updates), "opt": opt}, value

    def start(n):
        ws = layers(n)
        return {"ws": ws, "opt": optimizer.init(ws)}

    return step, start


@pytest.mark.ci
@pytest.mark.parametrize("how", ["donate=True", "donate_argnums"])
def test_old_state_is_given_up_and_the_users_own_is_not(how):
    plain, start = adam()
    own = start(4)
    step = (
        piped(plain, 2, "zb-h1", donate=True)
        if how == "donate=True"
        else piped(jax.jit(plain, donate_argnums=0), 2, "zb-h1")
    )
    want = have = own
    for k in range(5):
        before = have
        have, loss = step(before, BATCH)
        want, value = jax.jit(plain)(want, BATCH)
        close((have, loss), (want, value), 1e-5)
        given_up = [a.is_deleted() for a in jax.tree.leaves(before["ws"])]
        assert given_up == [k > 0] * 4
    close(own, start(4))
    moments = jax.tree.leaves(before["opt"][0].mu)
    assert all(a.is_deleted() for a in moments)
    assert not BATCH.is_deleted()


def test_state_stays_where_it_was_without_donation():
    plain, start = adam()
    step = piped(plain, 2)
    first, _ = step(start(4), BATCH)
    step(first, BATCH)
    assert not any(a.is_deleted() for a in jax.tree.leaves(first))


@pytest.mark.parametrize("mesh", [pytest.param("pipe=4", marks=pytest.mark.full), "pipe=4 data=2"])
def test_a_stage_and_its_optimizer_state_live_on_its_own_devices(mesh):
    plain, start = adam()
    step = piped(plain, 4, mesh=mesh)
    state, _ = step(start(8), BATCH)
    ranks = pipeline_of(step).ranks.sub_meshes
    moments = state["opt"][0]
    for k in range(8):
        own = set(ranks[k // 2].devices.flat)
        for x in (state["ws"][k], moments.mu[k], moments.nu[k]):
            assert {shard.device for shard in x.addressable_shards} == own


@pytest.mark.ci
def test_nothing_of_a_step_is_held_after_it(monkeypatch):
    step, ws = piped(descend, 2), layers(4)
    step(ws, BATCH)
    pipe, seen = pipeline_of(step), []

    def watched(program):
        def call(*args):
            outs = program(*args)
            seen.extend(weakref.ref(x) for x in jax.tree.leaves(outs))
            return outs

        return call

    actions = (action for plan in pipe._plans for loss in plan.losses for action in loss.actions)
    for stage in {id(stage): stage for _, stage, *_ in actions}.values():
        programs = {kind: watched(program) for kind, program in stage.programs.items()}
        monkeypatch.setitem(stage.__dict__, "programs", programs)
    state, loss = step(ws, BATCH)
    kept = {id(x) for x in jax.tree.leaves((state, loss))}
    gc.collect()
    assert seen
    assert not [x for r in seen if (x := r()) is not None and id(x) not in kept]


def test_alike_stages_are_traced_once():
    step, ws = piped(descend, 4), layers(8)
    step(ws, BATCH)
    first, second, third, last = (stage._functions for stage in pipeline_of(step).stages)
    assert second is third
    assert first is not second  # no gradient of the batch is wanted
    assert last is not second  # it has the loss


def test_a_step_without_parameters_in_some_stages_runs():
    def step(w, x):
        def loss(w):
            h = x @ w
            for _ in range(3):
                h = jnp.tanh(h @ jnp.eye(4))
            return (h**2).mean()

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    w = jnp.eye(4)
    close(piped(step, 4)(w, BATCH), step(w, BATCH))


def test_a_program_runs_on_devices_that_it_was_not_compiled_for(no_cache, monkeypatch):
    x, unseen = jnp.arange(8.0).reshape(4, 2), time.time()  # nothing of it is in the cache on disk

    def on(k):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[k : k + 2]), ("data",))
        at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        run = jax.jit(lambda x: x - x.mean(0) + unseen, in_shardings=at, out_shardings=at)
        return mesh, at, run.lower(x)

    (_, elsewhere, first), (mesh, at, other) = on(0), on(4)
    assert program_identity(first) == program_identity(other)
    compiled = first.compile()
    with monkeypatch.context() as patch:
        patch.setattr(pxla, "_cached_compilation", None)  # nothing can be compiled
        moved = reuse_executable(other, compiled, mesh)
    for _ in range(2):
        made = moved(jax.device_put(x, at))
        assert made.sharding == at
        np.testing.assert_allclose(made, compiled(jax.device_put(x, elsewhere)))
    with pytest.raises(ValueError, match="sharding"):
        moved(jax.device_put(x, elsewhere))


def test_a_program_that_calls_back_is_like_no_other():
    def lowered():
        def run(x):
            return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        return jax.jit(run).lower(1.0)

    assert len({program_identity(lowered()) for _ in range(10)}) == 10


def test_programs_that_drop_other_arguments_are_unlike():
    def run(xs):
        return xs[0] + 1

    x = jnp.ones(3)
    one, other = jax.jit(run).lower([x]), jax.jit(run).lower([x, x])
    assert one.as_text() == other.as_text()
    assert program_identity(one) == program_identity(jax.jit(run).lower([x]))
    assert program_identity(one) != program_identity(other)
