"""What stands in the place of JAX's own functions while steps are traced, by one thread or several."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax._src import ad_checkpoint, api, pjit
from jax._src.interpreters import partial_eval

from jaxshard_magic.program.hooks import hook_vjp, trace_afresh

PLACES = (
    (jax, "vjp"),
    (api, "vjp"),
    (partial_eval, "trace_to_jaxpr"),
    (pjit, "_infer_params_cached"),
    (ad_checkpoint, "_trace_to_jaxpr"),
)
WAIT_S = 20


def square(x):
    return x * x


def counting(calls: list, name: str):
    def seen(inner):
        def vjp(*args, **options):
            calls.append(name)
            return inner(*args, **options)

        return vjp

    return seen


def test_two_threads_that_trace_at_once_leave_jax_as_it_was():
    own = [getattr(*place) for place in PLACES]
    calls, errors = [], []
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def run(name, before, entered, until):
        try:
            assert before.wait(WAIT_S)
            with hook_vjp(counting(calls, name)):
                entered.set()
                assert until.wait(WAIT_S)
                jax.grad(square)(1.0)
        except BaseException as error:
            errors.append(error)

    def first():
        run("first", begin, first_in, second_in)
        first_out.set()

    begin = threading.Event()
    begin.set()
    # The second begins while the first traces, and ends after it.
    threads = [
        threading.Thread(target=first, daemon=True),
        threading.Thread(target=run, args=("second", first_in, second_in, first_out), daemon=True),
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        assert not errors
        assert calls == ["first", "second"]
        assert [getattr(*place) for place in PLACES] == own
    finally:
        for (module, name), original in zip(PLACES, own, strict=True):
            setattr(module, name, original)


def test_a_thread_that_does_not_trace_takes_its_gradients_itself():
    calls, values = [], []
    with hook_vjp(counting(calls, "ours")):
        thread = threading.Thread(target=lambda: values.append(float(jax.grad(square)(3.0))), daemon=True)
        thread.start()
        thread.join(WAIT_S)
    assert (values, calls) == ([6.0], [])


def test_the_inner_of_two_hooks_is_asked_first():
    calls = []
    with hook_vjp(counting(calls, "outer")):
        with hook_vjp(counting(calls, "inner")):
            jax.grad(square)(1.0)
        jax.grad(square)(1.0)
    assert calls == ["inner", "outer", "outer"]


def test_a_step_that_fails_leaves_jax_as_it_was():
    own = [getattr(*place) for place in PLACES]
    with pytest.raises(KeyError), hook_vjp(counting([], "ours")):
        raise KeyError
    assert [getattr(*place) for place in PLACES] == own


def doubled(x):
    return 2 * x


def body(carry, x):
    return carry + x, carry


def loss(x):
    x = jax.checkpoint(doubled)(jnp.where(x > 0, x, -x))
    return jax.lax.cond(x.sum() > 0, doubled, square, jax.lax.scan(body, 0.0, x)[0])


def test_caches_of_jax_hold_nothing_of_a_trace_that_is_over():
    gc.collect()
    before = partial_eval.trace_to_jaxpr.cache_info().currsize
    with trace_afresh():
        jaxpr = jax.make_jaxpr(jax.jit(loss))(jnp.ones(3))
        during = partial_eval.trace_to_jaxpr.cache_info().currsize
    kept = weakref.ref(jaxpr.jaxpr)
    del jaxpr
    gc.collect()
    assert during > before + 5
    assert partial_eval.trace_to_jaxpr.cache_info().currsize <= before
    assert kept() is None


def test_what_the_session_traced_itself_is_not_traced_again():
    traces = []

    @jax.jit
    def own(x):
        traces.append(x)
        return x + 1

    own(1.0)
    with trace_afresh():
        jax.make_jaxpr(own)(1.0)
        jax.make_jaxpr(own)(1.0)
    assert len(traces) == 2  # once for each: in a trace of ours once more
    own(2.0)
    jax.make_jaxpr(own)(1.0)
    assert len(traces) == 2
