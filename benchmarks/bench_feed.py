"""A loop whose loader sleeps as long as its step takes: with `feed`, without, and with no loader at all.

The step sleeps in a callback, so that its time is known and loader and step share no core.
"""

import sys
import time
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

import jaxshard_magic

SLEEP_S, STEPS, ROUNDS, MOST = 0.03, 60, 3, 1.05


def slept(x):
    time.sleep(SLEEP_S)
    return np.asarray(x)


def train_step(w, batch):
    loss = jnp.mean((batch @ w) ** 2)
    loss = jax.pure_callback(slept, jax.ShapeDtypeStruct((), loss.dtype), loss)
    return w * 0.999, loss


def loader(seconds):
    batch = np.ones((64, 256), np.float32)
    for _ in range(STEPS):
        time.sleep(seconds)
        yield batch


def taken(step, loop):
    """Seconds a step, from the fifth on."""
    w, began = jnp.ones((256, 8)), 0.0
    for n, batch in enumerate(loop):
        if n == 4:
            began = time.perf_counter()
        w, loss = step(w, batch)
        float(loss)
    return (time.perf_counter() - began) / (STEPS - 4)


def main() -> int:
    step = jaxshard_magic.shard(train_step, "dp", mesh="data=1")
    alone, plain, fed = [], [], []
    for _ in range(ROUNDS):
        alone.append(taken(step, loader(0)))
        needs = alone[-1]
        plain.append(taken(step, loader(needs)))
        fed.append(taken(step, jaxshard_magic.feed(loader(needs))))
    without, with_feed = (median(a / b for a, b in zip(each, alone, strict=True)) for each in (plain, fed))
    print(f"step {median(alone) * 1e3:.1f} ms; loader as slow: without feed {without:.2f} of it")
    print(f"with feed {with_feed:.3f} (at most {MOST})")
    return with_feed > MOST


if __name__ == "__main__":
    sys.exit(main())
