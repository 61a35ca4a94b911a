"""Peak host memory of placing a numpy batch over 8 simulated devices, in copies of the batch.

    python benchmarks/bench_place.py [--mb N]

Each case runs in a fresh process: it compiles for the batch, notes the process's memory, calls the step
once and reads the peak. On CPU the devices' own memory is host memory: 1 copy is what the devices hold.
Prints the copies for a batch given as numpy, on the first and on a later call, and exits with 1 where there
are more than the limit; one full copy per device would be 8.
"""

import argparse
import os
import resource
import subprocess
import sys
from typing import Any

LIMIT = 1.5  # what the devices hold, and half as much in flight
DEVICES = 8


def copies(megabytes: int, warm: bool) -> float:
    """Peak memory of one call beyond what was in use before it, in batches."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxshard_magic

    def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
        return weights - 0.1 * grads, loss

    mesh = jaxshard_magic.mesh(f"cpu:{DEVICES} data={DEVICES}")
    wrapped = jaxshard_magic.shard(step, "dp", mesh=mesh)
    weights: Any = np.ones((256, 1), np.float32)
    batch = np.ones((megabytes * 1024, 256), np.float32)
    wrapped.prepare(weights, batch)
    for _ in range(3 * warm):
        weights, _ = jax.block_until_ready(wrapped(weights, batch))
        reset_peak()
    before = in_use()
    jax.block_until_ready(wrapped(weights, batch))
    return (peak() - before) / batch.nbytes


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def in_use() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak() -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description="peak host memory of placing a batch")
    parser.add_argument("--mb", type=int, default=256, metavar="N", help="size of the batch in MiB (default: 256)")
    parser.add_argument("--case", choices=["first", "later"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(copies(options.mb, options.case == "later"))
        return 0
    most = 0.0
    for case in ("first", "later"):
        command = [sys.executable, __file__, "--mb", str(options.mb), "--case", case]
        env = {"NPROC": "32", **os.environ}
        found = float(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)
        print(f"{case:6} call: {found:.2f} copies of the batch")
        most = max(most, found)
    print(f"peak / batch: {most:.2f}, at most {LIMIT}, {options.mb} MiB over {DEVICES} devices")
    return 0 if most <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
