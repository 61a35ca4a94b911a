"""What a save costs the loop that it is called in, and what a restore takes of memory, at 1 GB: 16 arrays, and one.

The save's call is held against a copy of the same shards to other host memory, three of each in turn. A restore runs in
a process of its own, onto 8 simulated devices, whose arrays are host memory: the peak of the resident memory over what
it was before is held against the bytes that were restored. Devices that are simulated have their arrays in host memory,
where a save's call need not copy them. Takes two minutes; exits with 1 above a limit.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard_magic.checkpoints import Saved, SavedLeaf, Store

ARRAYS, SHAPE = 16, (4096, 4096)  # 64 MiB each
SAVE, PEAK = 1.3, 1.2  # 32 MiB are read at once, and lie three times in memory until they are placed


def main() -> int:
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    key = jax.random.key(0)
    tree = {
        f"w{i}": jax.device_put(jax.random.normal(jax.random.fold_in(key, i), SHAPE), split)
        for i in range(ARRAYS)
    }
    jax.block_until_ready(tree)
    size = sum(x.nbytes for x in tree.values())
    leaves = tuple(SavedLeaf(name, x.shape, str(x.dtype)) for name, x in tree.items())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the folder goes
    with tempfile.TemporaryDirectory() as folder, Store(f"{folder}/saves", keep=2) as store:
        saves, copies, whole = [], [], []
        for n in range(4):
            start = time.perf_counter()
            copied = [np.array(s.data, copy=True) for x in tree.values() for s in x.addressable_shards]
            copies.append(time.perf_counter() - start)
            del copied
            start = time.perf_counter()
            saves.append(store.save(n, tree, Saved(n, "fsdp", "data=8", leaves)))
            store.wait()
            whole.append(time.perf_counter() - start)
        save, copy = statistics.median(saves[1:]), statistics.median(copies[1:])
        print(
            f"save of {size / 1e9:.2f} GB: the call {save:.3f} s, a copy to the host {copy:.3f} s: ", end=""
        )
        print(
            f"{save / copy:.2f}, limit {SAVE}; on disk after {statistics.median(whole[1:]):.1f} s", flush=True
        )
        within = save / copy <= SAVE
        shape = (ARRAYS * SHAPE[0], SHAPE[1])
        one = {"w": jax.device_put(jax.random.normal(key, shape), split)}
        store.save(4, one, Saved(4, "fsdp", "data=8", (SavedLeaf("w", shape, "float32"),)))
        store.wait()
        for step, of in ((3, f"{ARRAYS} arrays"), (4, "one array")):
            for cut in ("rows", "columns"):
                peak, seconds = restored(store.folder, step, cut)
                within = within and peak / size <= PEAK
                print(
                    f"restore of {of} by {cut}: {seconds:.1f} s, peak {peak / size:.2f} of the arrays, limit {PEAK}",
                    flush=True,
                )
    return 0 if within else 1


def restored(folder: Path, step: int, cut: str) -> tuple[int, float]:
    """Bytes at the peak of a restore in a process of its own, and its seconds."""
    command = [sys.executable, __file__, "--restore", str(folder), str(step), cut]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return found["peak"], found["seconds"]


def restore(folder: str, number: str, cut: str) -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    spec = PartitionSpec("data") if cut == "rows" else PartitionSpec(None, "data")
    jax.block_until_ready(jnp.ones(8))
    store, step = Store(folder), int(number)
    where = NamedSharding(mesh, spec)
    target = {
        x.path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for x in store.saved(step).leaves
    }
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    jax.block_until_ready(store.restore(step, target))
    seconds = time.perf_counter() - start
    with open("/proc/self/status") as status:  # ru_maxrss is the parent's as well
        [high] = [int(line.split()[1]) for line in status if line.startswith("VmHWM")]
    peak = high * 1024 - before
    print(json.dumps({"seconds": seconds, "peak": peak}))


if __name__ == "__main__":
    if "--restore" in sys.argv:
        restore(*sys.argv[-3:])
    else:
        sys.exit(main())
