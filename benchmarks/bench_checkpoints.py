"""What a save costs the loop that it is called in, and what a restore takes of memory, at 1 GB: 16 arrays, and one.

The save's call is held against a copy of the same shards to other host memory, three of each in turn. A restore runs in
a process of its own, onto 8 simulated devices, whose arrays are host memory: the peak of the resident memory over what
it was before is held against the bytes that were restored. Devices that are simulated have their arrays in host memory,
where a save's call need not copy them. The same of a file of safetensors, which is mapped: its pages count while they
are read. Takes two minutes; exits with 1 above a limit.
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

from jaxshard_magic.checkpoints import CheckpointInfo, CheckpointStore, SavedLeaf
from jaxshard_magic.checkpoints.state_arrays import flatten_state
from jaxshard_magic.checkpoints.weight_loading import load_weights
from jaxshard_magic.checkpoints.weight_saving import save_weights as save_weights

ARRAYS, SHAPE = 16, (4096, 4096)  # 64 MiB each
SAVE, PEAK = 1.3, 1.2  # 16 MiB are read at once, and lie three times in memory until they are placed


def main() -> int:
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    key = jax.random.key(0)
    tree = {f"w{i}": jax.device_put(jax.random.normal(jax.random.fold_in(key, i), SHAPE), split) for i in range(ARRAYS)}
    jax.block_until_ready(tree)
    size = sum(x.nbytes for x in tree.values())
    leaves = tuple(SavedLeaf(name, x.shape, str(x.dtype)) for name, x in tree.items())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the folder goes
    with tempfile.TemporaryDirectory() as folder, CheckpointStore(f"{folder}/saves", keep=1) as store:
        saves, copies, whole = [], [], []
        for n in range(4):
            start = time.perf_counter()
            copied = [np.array(s.data, copy=True) for x in tree.values() for s in x.addressable_shards]
            copies.append(time.perf_counter() - start)
            del copied
            start = time.perf_counter()
            saves.append(store.save(n, tree, CheckpointInfo(n, "fsdp", "data=8", leaves)))
            store.wait()
            whole.append(time.perf_counter() - start)
        save, copy = statistics.median(saves[1:]), statistics.median(copies[1:])
        print(f"save of {size / 1e9:.2f} GB: the call {save:.3f} s, a copy to the host {copy:.3f} s: ", end="")
        print(f"{save / copy:.2f}, limit {SAVE}; on disk after {statistics.median(whole[1:]):.1f} s", flush=True)
        within = save / copy <= SAVE
        file = Path(folder, "w.safetensors")
        start = time.perf_counter()
        save_weights(file, tree, metadata={})
        print(f"{file.suffix} of them: {time.perf_counter() - start:.1f} s", flush=True)
        shape = (ARRAYS * SHAPE[0], SHAPE[1])
        one = {"w": jax.device_put(jax.random.normal(key, shape), split)}
        with CheckpointStore(f"{folder}/one array") as other:
            other.save(1, one, CheckpointInfo(1, "fsdp", "data=8", (SavedLeaf("w", shape, "float32"),)))
        for where in (store.folder, other.folder, file):
            for cut in ("rows", "columns"):
                command = [sys.executable, __file__, "--restore", str(where), cut]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found = json.loads(done.stdout)
                peak = found["peak"] / size
                within = within and peak <= PEAK
                print(
                    f"restore of {where.name} by {cut}: {found['seconds']:.1f} s, peak {peak:.2f} of the arrays, "
                    f"limit {PEAK}",
                    flush=True,
                )
    return 0 if within else 1


def restore(folder: str, cut: str) -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    spec = PartitionSpec("data") if cut == "rows" else PartitionSpec(None, "data")
    jax.block_until_ready(jnp.ones(8))
    where = NamedSharding(mesh, spec)
    target = {f"w{i}": jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=where) for i in range(ARRAYS)}
    if folder.endswith("one array"):
        target = {"w": jax.ShapeDtypeStruct((ARRAYS * SHAPE[0], SHAPE[1]), jnp.float32, sharding=where)}
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    if folder.endswith(".safetensors"):
        places = dict.fromkeys(target, where)
        jax.block_until_ready(load_weights(Path(folder), flatten_state(target), lambda: places, tell=print))
    else:
        store = CheckpointStore(folder)
        jax.block_until_ready(store.restore(max(store.steps()), target))
    seconds = time.perf_counter() - start
    with open("/proc/self/status") as status:  # ru_maxrss is the parent's as well
        [high] = [int(line.split()[1]) for line in status if line.startswith("VmHWM")]
    peak = high * 1024 - before
    print(json.dumps({"seconds": seconds, "peak": peak}))


if __name__ == "__main__":
    if "--restore" in sys.argv:
        restore(*sys.argv[-2:])
    else:
        sys.exit(main())
