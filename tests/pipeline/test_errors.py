"""What goes wrong in a stage ends the step with that error, leaves the state whole, and the next step works."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.fuses import Fuse, fused

import jaxshard_magic

STAGES, MICROBATCHES = 3, 4
STATE = [jnp.eye(4) * (1 + i) / 2 for i in range(STAGES)]
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)


def with_fuse(fuse, where, when):
    """A train step with a fuse behind layer `where`, in its forward or its backward pass."""
    layer = fused(fuse, when)

    def step(ws, x):
        def loss(ws):
            h = x
            for i, w in enumerate(ws):
                h = jnp.tanh(h @ w)
                h = layer(h) if i == where else h
            return (h**2).mean()

        value, grads = jax.value_and_grad(loss)(ws)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value

    return step


def piped(step, **options):
    how = {"mesh": f"pipe={STAGES}", "microbatches": MICROBATCHES} | options
    return jaxshard_magic.shard(step, "pp", **how)


def threads():
    return {t for t in threading.enumerate() if t.name.startswith("pipeline rank")}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    ("where", "when"),
    [
        (0, "forward"),
        pytest.param(1, "backward", marks=pytest.mark.full),
        pytest.param(2, "forward", marks=pytest.mark.full),
        (2, "backward"),
    ],
)
def test_an_error_in_a_stage_ends_the_step_and_leaves_the_state(where, when, donate):
    fuse = Fuse()
    step = piped(with_fuse(fuse, where, when), donate=donate)
    plain = jax.jit(with_fuse(fuse, where, when))
    state, _ = step(STATE, X)
    before = [np.array(w) for w in state]
    fuse.left = 2
    with pytest.raises(Exception, match="in the user's layer") as caught:
        jax.block_until_ready(step(state, X))
    notes = " ".join(getattr(caught.value, "__notes__", []))
    assert "of the pipeline" in notes
    assert "fuses.py" in str(caught.value)  # the user's own line
    fuse.left = None
    for kept, w in zip(state, before, strict=True):
        np.testing.assert_array_equal(kept, w)
    want, _ = plain(before, X)
    later, _ = step(state, X)
    for a, b in zip(later, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert all(w.is_deleted() == donate for w in state)


def test_the_note_names_the_action_that_failed():
    fuse = Fuse()
    step = piped(with_fuse(fuse, 2, "forward"), donate=True)
    state, _ = step(STATE, X)
    fuse.left = 1
    with pytest.raises(Exception, match="in the user's layer") as caught:
        step(state, X)
    assert any("2F1" in note for note in caught.value.__notes__), caught.value.__notes__
    assert "in rank 2 of the pipeline" in caught.value.__notes__


@pytest.mark.ci
def test_errors_follow_each_other():
    fuse = Fuse()
    step = piped(with_fuse(fuse, 1, "forward"), donate=True)
    state, _ = step(STATE, X)
    for left in (0, 3, 1):
        fuse.left = left
        with pytest.raises(Exception, match="in the user's layer"):
            step(state, X)
    fuse.left = None
    state, _ = step(state, X)
    assert all(np.isfinite(w).all() for w in state)


def test_threads_end_with_the_step():
    before = threads()
    step = piped(with_fuse(Fuse(), 0, "forward"))
    step(STATE, X)
    assert len(threads() - before) == STAGES
    del step
    end = time.monotonic() + 10
    while threads() - before:
        assert time.monotonic() < end, "threads outlive their step"
        gc.collect()
        time.sleep(0.01)


@pytest.mark.ci
def test_two_pipelines_called_in_turns_and_from_two_threads():
    plain = with_fuse(Fuse(), 0, "forward")
    both = [piped(plain), piped(plain, schedule="zb-h1")]
    want, value = jax.jit(plain)(STATE, X)

    def called(step, n, found):
        for _ in range(n):
            found.append(step(STATE, X))

    found = []
    for _ in range(3):
        for step in both:
            called(step, 1, found)
    workers = [threading.Thread(target=called, args=(step, 5, found)) for step in (*both, both[0])]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert len(found) == 6 + 15
    for state, loss in found:
        np.testing.assert_allclose(loss, value, atol=1e-6)
        for a, b in zip(state, want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


INTERRUPTED = """
import time
from test_errors import Fuse, STATE, X, np, piped, with_fuse

class Slow(Fuse):
    seconds = 0.0
    def __call__(self, x):
        time.sleep(self.seconds)
        return np.asarray(x)

slow = Slow()
step = piped(with_fuse(slow, 1, "backward"), donate=True)
state, _ = step(STATE, X)
before = [np.array(w) for w in state]
slow.seconds = 2.0
try:
    print("begun", flush=True)
    step(state, X)
    print("was not interrupted")
except KeyboardInterrupt:
    print("interrupted", flush=True)
slow.seconds = 0.0
assert all((np.array(w) == b).all() for w, b in zip(state, before))
state, loss = step(state, X)
print("the next step works", all(np.isfinite(w).all() for w in state))
"""


@pytest.mark.ci
def test_an_interrupt_ends_a_long_step_soon_and_the_next_step_works():
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (here, *here.parents[:2])))}
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        time.sleep(0.4)
        start = time.monotonic()
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "interrupted\n"
        assert time.monotonic() - start < 5  # one backward pass takes 2 s, and all of them 8
        out, err = child.communicate(timeout=60)
        assert out == "the next step works True\n", err
    finally:
        child.kill()
        child.wait()
