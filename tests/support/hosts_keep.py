"""States that `several_hosts` saves and restores on every host, and what came of each there."""

import hashlib
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard_magic as js
from jaxshard_magic.checkpoints import CheckpointInfo, CheckpointStore, SavedLeaf
from jaxshard_magic.device_arrays import is_prng_key, to_numpy
from jaxshard_magic.step.checkpoint_loop import CheckpointLoop

TX = optax.adam(1e-2)
BATCH = np.random.default_rng(0).normal(size=(16, 32)).astype("f")


def new_state() -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    up, down = jax.random.normal(keys[0], (32, 2048)) / 8, jax.random.normal(keys[1], (2048, 32)) / 64
    params = {"up": up, "down": down}
    return params, TX.init(params), jax.random.key(7)


def train_step(state: Any, batch: Any) -> Any:
    """With dropout, whose key is part of the state."""
    params, opt_state, key = state
    key, sub = jax.random.split(key)

    def loss_fn(params: Any) -> Any:
        hidden = jnp.tanh(batch @ params["up"])
        hidden = hidden * jax.random.bernoulli(sub, 0.9, hidden.shape)
        return jnp.mean((hidden @ params["down"] - batch) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, key), loss


def digest(tree: Any) -> str:
    """The bits of a tree."""
    found = hashlib.sha256()
    for x in jax.tree.leaves(tree):
        bits = to_numpy(jax.random.key_data(x) if is_prng_key(x) else x)
        found.update(f"{bits.dtype}{bits.shape}".encode() + bits.tobytes())
    return found.hexdigest()[:16]


def step_under(strategy: str, mesh: str) -> Any:
    return js.shard(train_step, strategy, mesh=mesh)


def saved(folder: str, strategy: str, mesh: str) -> dict[str, Any]:
    """A state after two calls, saved and restored; and the losses of five calls more."""
    step, state = step_under(strategy, mesh), new_state()
    for _ in range(2):
        state, _ = step(state, BATCH)
    number, before = step.save(folder, state), digest(state)
    back = step.restore(folder, new_state())
    return {"number": number, "before": before, "after": digest(back), "losses": losses(step, back)}


def restored(folder: str, strategy: str, mesh: str) -> dict[str, Any]:
    """The state of a folder under another plan, and the losses of five calls more."""
    step = step_under(strategy, mesh)
    step.prepare(new_state(), BATCH)
    back = step.restore(folder, new_state())
    cut = sum(not x.sharding.is_fully_replicated for x in jax.tree.leaves(back[0]))
    return {"after": digest(back), "cut": cut, "losses": losses(step, back)}


def losses(step: Any, state: Any) -> list[float]:
    found = []
    for _ in range(5):
        state, loss = step(state, BATCH)
        found.append(float(loss))
    return found


class Place:
    """Where an iteration over batches is; each host's own have numbers of their own."""

    def __init__(self, loaded: list[int], count: int, hosts: int, host: int):
        self.loaded, self.count, self.hosts, self.host, self.at = loaded, count, hosts, host, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        self.loaded.append(self.at)
        rows = np.random.default_rng(self.at).normal(size=(16, 32)).astype("f")
        return rows.reshape(self.hosts, -1, 32)[self.host]

    def get_state(self) -> Any:
        return {"at": self.at, "host": self.host}

    def set_state(self, state: Any) -> None:
        assert state["host"] == self.host, "the state of this host's own iterator"
        self.at = state["at"]


class Loader:
    """Batches of a host's own rows, whose iterator has a state."""

    def __init__(self, count: int):
        self.loaded: list[int] = []
        self.count = count

    def __iter__(self) -> Any:
        return Place(self.loaded, self.count, jax.process_count(), jax.process_index())


def looped(
    folder: str | None, calls: int = 14, stop: int | None = None, slow: float = 0, **saving: Any
) -> dict[str, Any]:
    """A loop over a feed that has each host's own rows; left after `stop` calls as by the end of the process."""
    several = jax.process_count() > 1
    step = js.shard(train_step, "fsdp", mesh="data=8", data="per-host" if several else "whole")
    said: list[str] = []
    state, loader, found = new_state(), Loader(calls), []
    keeper = None
    if folder is not None:
        keeper = step.checkpoint_loop = step.last_checkpoint_loop = CheckpointLoop(folder, say=said.append, **saving)
    for batch in js.feed(loader):
        if len(found) == stop:
            assert keeper is not None
            keeper._store.close()
            break
        time.sleep(slow * jax.process_index())
        state, loss = step(state, batch)
        found.append(loss)
    else:
        if keeper is not None:
            said.append(keeper.end())
    saves = [] if keeper is None else [save.step for save in keeper.summary.saves]
    return {
        "losses": [float(x) for x in found],
        "state": digest(state),
        "loaded": loader.loaded,
        "said": said,
        "saves": saves,
        "computed": step.calls,
    }


def first(folder: str) -> dict[str, Any]:
    """What two hosts do that begin."""
    return {
        "saved": saved(f"{folder}/state", "fsdp", "data=8"),
        "whole": looped(None),
        "stopped": looped(f"{folder}/loop", every=4, stop=6),
        "timed": looped(f"{folder}/timed", calls=36, slow=0.1, every="1s", keep=None),
        "refused": refused(folder),
        "full": full(f"{folder}/full"),
    }


def second(folder: str) -> dict[str, Any]:
    """What two others do, with what the first left and one process has gone on with."""
    return {
        "restored": restored(f"{folder}/one", "fsdp", "data=8"),
        "resumed": looped(f"{folder}/loop", every=4, resume=True),
        "after one": looped(f"{folder}/loop of one", every=4, resume=True),
    }


def line(do: Callable[[], Any]) -> str:
    """What is said of something that is refused."""
    try:
        do()
    except js.ShardError as error:
        return str(error)
    return "done"


def refused(folder: str) -> dict[str, Any]:
    """Folders that one host has not, or can't write into."""
    host = jax.process_index()
    own, closed = Path(f"{folder}/own {host}/ckpt"), Path(f"{folder}/closed")
    if host == 0:
        shutil.copytree(f"{folder}/state", own)
        closed.mkdir()
    step = step_under("fsdp", "data=8")
    step.prepare(new_state(), BATCH)
    found = {
        "read": line(lambda: step.restore(own, new_state())),
        "written": line(lambda: step.save(own.parent / "new", new_state())),
        "in a loop": line(lambda: step.checkpoint(own.parent / "loop")),
    }
    if os.geteuid() == 0:
        if host == 1:
            os.seteuid(65534)  # nobody's
        found["closed"] = line(lambda: step.checkpoint(closed))
        os.seteuid(0)
    return {name: said.replace(str(own.parent), "FOLDER").replace(folder, "FOLDER") for name, said in found.items()}


def full(folder: str) -> dict[str, Any]:
    """Saves of which one host can't write its part, then another one; then all can."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    bits = np.random.default_rng(0).normal(size=1 << 20).astype("f")
    w = jax.make_array_from_callback(bits.shape, cut, lambda part: bits[part])
    store, said, start = CheckpointStore(folder), [], time.monotonic()
    for n, host in enumerate([None, 1, 0, None], 1):
        limit = 100_000 if host == jax.process_index() else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        def saved(n: int = n) -> None:
            store.save(n, {"w": w}, CheckpointInfo(n, "fsdp", "data=8", (SavedLeaf("w", w.shape, "float32"),)))
            store.wait()

        said.append(line(saved))
    back = store.restore(4, {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=cut)})
    store.close()
    return {
        "said": said,
        "steps": store.steps(),
        "left": sorted(os.listdir(folder)),
        "same": digest(back) == digest({"w": w}),
        "seconds": time.monotonic() - start,
    }


def saving(folder: str) -> None:
    """Saves, one after the other, of arrays that have the save's number everywhere; says each that was begun."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    store, n = CheckpointStore(folder, keep=2), 0
    while True:
        n += 1
        numbers = np.full((256, 256), n, "f")
        tree = {
            f"w{i}": jax.make_array_from_callback(numbers.shape, cut, lambda at, x=numbers: x[at]) for i in range(8)
        }
        leaves = tuple(SavedLeaf(name, x.shape, "float32") for name, x in tree.items())
        store.save(n, tree, CheckpointInfo(n, "fsdp", f"data={len(jax.devices())}", leaves))
        print("begun", n, flush=True)
