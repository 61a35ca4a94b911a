"""Steps that `several_hosts` runs on every host, and what came of each beside one host's numbers."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxshard_magic as js
from jaxshard_magic.report import Report


def mlp() -> tuple[Any, Any, dict[str, np.ndarray]]:
    """A step of plain arrays, its state, and a batch as numpy."""
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {
        "up": jax.random.normal(keys[0], (32, 64)) / 8,
        "bias": jnp.zeros(64),
        "down": jax.random.normal(keys[1], (64, 32)) / 8,
    }
    adam = optax.adam(1e-2)
    x = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)

    @jax.jit
    def train_step(state, batch):
        weights, moments = state

        def loss_fn(weights):
            hidden = jax.nn.relu(batch["x"] @ weights["up"] + weights["bias"])
            return jnp.mean((hidden @ weights["down"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(weights)
        updates, moments = adam.update(grads, moments, weights)
        return (optax.apply_updates(weights, updates), moments), loss

    return train_step, (weights, adam.init(weights)), {"x": x, "y": np.roll(x, 1, axis=1)}


class Dropped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.relu(self.up(x))))


@nnx.jit
def nnx_step(model, optimizer, batch):
    def loss_fn(model):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def train(strategy: str, mesh: str, calls: int = 5, **options: Any) -> dict[str, Any]:
    """Losses of `calls` steps and what `--check` found, under a strategy."""
    step, state, batch = mlp()
    sharded = js.shard(step, strategy, mesh=mesh, check=True, **options)
    losses = []
    for _ in range(calls):
        state, loss = sharded(state, batch)
        losses.append(float(loss))
    gathered = sharded.gather(state)
    report = sharded.report()
    assert report.check is not None
    return {
        "losses": losses,
        "passed": report.check.passed,
        "sum": float(np.abs(np.asarray(gathered[0]["up"])).sum()),
        "processes": report.mesh.processes,
        "moved": [[c.kind, list(c.axes), c.count * c.bytes, c.wire_bytes] for c in report.collectives or ()],
        "left": [c.network_bytes for c in report.collectives or ()],
    }


def train_nnx(strategy: str, mesh: str, calls: int = 5) -> dict[str, Any]:
    """The same of NNX objects with dropout."""
    model = Dropped(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    _, _, batch = mlp()
    sharded = js.shard(nnx_step, strategy, mesh=mesh, check=True)
    losses = [float(sharded(model, optimizer, batch)) for _ in range(calls)]
    report = sharded.report()
    assert report.check is not None
    sharded.gather(model)
    return {
        "losses": losses,
        "passed": report.check.passed,
        "sum": float(np.abs(np.asarray(model.up.kernel[...])).sum()),
        "processes": report.mesh.processes,
        "moved": [[c.kind, list(c.axes), c.count * c.bytes, c.wire_bytes] for c in report.collectives or ()],
        "left": [c.network_bytes for c in report.collectives or ()],
    }


def several(cases: list[list[Any]]) -> list[dict[str, Any]]:
    """`train`, or another that begins so, of each case: which, strategy, mesh, options."""
    return [globals()[which](strategy, mesh, **options) for which, strategy, mesh, options in cases]


def data(how: str, mesh: str, strategy: str = "fsdp", **options: Any) -> dict[str, Any]:
    """What becomes of a batch of which each host has `how` much: "whole", "parts", "same" rows, "fewer" on the second,
    other "weights"."""
    step, state, batch = mlp()
    host, hosts = jax.process_index(), jax.process_count()
    if how in ("parts", "same", "fewer"):
        n = len(batch["x"]) // hosts - (2 * host if how == "fewer" else 0)
        first = n * host if how == "parts" else 0
        batch = {name: rows[first : first + n] for name, rows in batch.items()}
    if how == "weights":
        state[0]["up"] = state[0]["up"] + host
    losses = []
    try:
        sharded = js.shard(step, strategy, mesh=mesh, **options)
        for _ in range(3):
            state, loss = sharded(state, batch)
            losses.append(float(loss))
    except js.ShardError as error:
        return {"error": str(error), "fix": error.fix}
    report = sharded.report()
    assert report.check is None or report.check.passed
    return {"losses": losses, "advice": [a.message for a in report.advice if a.code == "same-rows"]}


def all_data(cases: list[list[Any]]) -> list[dict[str, Any]]:
    """`data` of each case: how, mesh, strategy, options."""
    return [data(how, mesh, strategy, **options) for how, mesh, strategy, options in cases]


def searched() -> dict[str, Any]:
    """What a comparison and a search find, and the losses of the step that was chosen."""
    step, state, batch = mlp()
    table = js.compare(step, "dp,fsdp,tp,pp", (state, batch), mesh="data=8", on="v5e")
    taken = []
    choice = js.choose(step, (state, batch), mesh="data=8", among="dp,fsdp", take=taken.append)
    assert choice.chosen is not None
    losses = []
    for _ in range(3):
        state, loss = taken[0](state, batch)
        losses.append(float(loss))
    return {
        "rows": [[t.strategy, t.report is not None and t.report.check is not None, t.why] for t in table.trials],
        "chosen": choice.chosen.line,
        "losses": losses,
    }


def train_linen(strategy: str, mesh: str, calls: int = 5) -> dict[str, Any]:
    """The same of a Linen `TrainState`."""
    from flax import linen
    from flax.training.train_state import TrainState

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(32)(linen.relu(linen.Dense(64)(x)))

    _, _, batch = mlp()
    net = Net()
    state = TrainState.create(apply_fn=net.apply, params=net.init(jax.random.key(0), batch["x"]), tx=optax.adam(1e-2))

    @jax.jit
    def train_step(state, batch):
        def loss_fn(params):
            return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return _trained(train_step, strategy, mesh, state, batch, calls)


def train_equinox(strategy: str, mesh: str, calls: int = 5) -> dict[str, Any]:
    """The same of an Equinox module."""
    import equinox as eqx

    _, _, batch = mlp()
    model = eqx.nn.MLP(32, 32, 64, 2, key=jax.random.key(0))

    @eqx.filter_jit
    def train_step(model, batch):
        def loss_fn(model):
            return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    return _trained(train_step, strategy, mesh, model, batch, calls)


def train_mapped(strategy: str, mesh: str, calls: int = 5) -> dict[str, Any]:
    """The same of a step that is written for one device."""
    _, (weights, _), batch = mlp()

    def train_step(weights, batch):
        def loss_fn(weights):
            hidden = jax.nn.relu(batch["x"] @ weights["up"] + weights["bias"])
            return jnp.mean((hidden @ weights["down"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(weights)
        loss, grads = jax.lax.pmean((loss, grads), "batch")
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    return _trained(train_step, strategy, mesh, weights, batch, calls)


def _trained(step: Any, strategy: str, mesh: str, state: Any, batch: Any, calls: int) -> dict[str, Any]:
    sharded = js.shard(step, strategy, mesh=mesh, check=True)
    losses = []
    for _ in range(calls):
        state, loss = sharded(state, batch)
        losses.append(float(jnp.mean(loss)))
    report = sharded.report()
    assert report.check is not None
    arrays = [x for x in jax.tree.leaves(sharded.gather(state)) if isinstance(x, jax.Array)]
    return {
        "losses": losses,
        "passed": report.check.passed,
        "sum": sum(float(np.abs(np.asarray(x)).sum()) for x in arrays),
        "processes": report.mesh.processes,
        "moved": [[c.kind, list(c.axes), c.count * c.bytes, c.wire_bytes] for c in report.collectives or ()],
        "left": [c.network_bytes for c in report.collectives or ()],
    }


def train_positions(strategy: str, mesh: str, calls: int = 5) -> dict[str, Any]:
    """The same of attention over positions."""
    keys = jax.random.split(jax.random.key(0), 4)
    weights = {name: jax.random.normal(key, (32, 32)) / 6 for name, key in zip("qkvo", keys, strict=True)}
    x = np.random.default_rng(0).normal(size=(8, 16, 32)).astype(np.float32)

    @jax.jit
    def train_step(weights, batch):
        def loss_fn(weights):
            q, k, v = (batch["x"] @ weights[name] for name in "qkv")
            scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / 6)
            return jnp.mean((scores @ v @ weights["o"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    return _trained(train_step, strategy, mesh, weights, {"x": x, "y": np.roll(x, 1, axis=1)}, calls)


def program(file: str) -> float:
    """The loss that a program of `%shard code` ends with, which needs nothing of ours."""
    import runpy

    return float(runpy.run_path(file)["loss"])


def profiled(strategy: str, mesh: str) -> dict[str, Any]:
    """What is measured of a step on all hosts, and what is said where one of them, each in its turn, can't record."""
    step, state, batch = mlp()
    sharded = js.shard(step, strategy, mesh=mesh)
    sharded.keep_arguments = True
    sharded(state, batch)
    report, host = sharded.report(), jax.process_index()
    entry = sharded.entry
    assert entry is not None

    def said(n: int = 2) -> str:
        try:
            sharded.profile(n)
        except (js.ShardError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
        return "recorded"

    def while_tracing(which: int) -> str:
        if host == which:
            jax.profiler.start_trace(tempfile.mkdtemp())
        try:
            return said()
        finally:
            if host == which:
                jax.profiler.stop_trace()

    def without_room(which: int) -> str:
        """The second call of the recording finds no room for its copies."""
        made: list[Any] = []

        def copies(inputs: Any) -> Any:
            made.append(inputs)
            if host == which and len(made) == 2:
                raise MemoryError("no room for copies")
            return type(entry).copy_donated(entry, inputs)

        entry.copy_donated = copies
        try:
            return said()
        finally:
            del entry.copy_donated

    everywhere = range(jax.process_count())
    refused = {
        "other": [said(1 + host)],
        "tracing": [while_tracing(which) for which in everywhere],
        "no room": [without_room(which) for which in everywhere],
    }
    measured = sharded.profile(2)
    after = sharded.report()
    return {
        "refused": refused,
        "measured": asdict(measured),
        "kept": after.measured is not None and Report.from_json(after.to_json()) == after,
        "kinds": sorted({c.kind for c in report.collectives or ()}),
        "given": sharded.profile(1, args=(state, batch)).read,
    }


def fed(how: str, strategy: str, mesh: str, **options: Any) -> dict[str, Any]:
    """Losses of a loop over differing batches, of which each host has the "whole" or its "parts", plain and fed; which
    of the fed ones lay on devices, those of host 0 from the second on; and how many programs there were, the first of
    which has the loop's number in it."""
    plain, _, first = mlp()

    def train_step(state, batch, rate):
        (weights, moments), loss = plain(state, batch)
        return (jax.tree.map(lambda w: w * rate, weights), moments), loss

    host, hosts = jax.process_index(), jax.process_count()
    rows = slice(None) if how == "whole" else slice(host * 16 // hosts, (host + 1) * 16 // hosts)

    def batches(sharded: js.ShardedStep) -> Iterator[dict[str, np.ndarray]]:
        for n in range(6):
            while host == 0 and n == 1 and sharded.calls == 0:
                time.sleep(0.01)
            yield {name: np.roll(x, n, axis=0)[rows] * (1 + n / 8) for name, x in first.items()}

    found: dict[str, Any] = {}
    for name, through in (("plain", iter), ("fed", js.feed)):
        sharded = js.shard(train_step, strategy, mesh=mesh, **options)
        _, state, _ = mlp()
        found[name], kinds = [], []
        for n, batch in enumerate(through(batches(sharded))):
            state, loss = sharded(state, batch, 1 - n / 100)
            found[name].append(float(loss))
            kinds.append(isinstance(batch["x"], jax.Array))
        found["kinds"] = kinds
        found["programs"] = len(sharded.programs.entries)
    return found


def all_fed(cases: list[list[Any]]) -> list[dict[str, Any]]:
    """`fed` of each case: how, strategy, mesh, options."""
    return [fed(how, strategy, mesh, **options) for how, strategy, mesh, options in cases]


def weights_of_hosts(folder: str) -> list[str]:
    """What a file of weights and a checkpoint have that all hosts write together: "same" where each reads its parts
    back; then what is said of a file that only the first host finds, and of one that none may write over."""
    step = js.shard(lambda w: jax.tree.map(lambda x: x * 1, w), "fsdp", mesh="data=8")
    w = step({"w": np.arange(256.0 * 128, dtype="float32").reshape(256, 128), "b": np.arange(8.0, dtype="float32")})
    path = Path(folder, "w.safetensors")
    step.save(path, w, rename=["fc.weight=w:T"])
    back = step.restore(path, like=w, rename=["fc.weight=w:T"])
    mine = all(
        np.array_equal(a.data, b.data)
        for name in w
        for a, b in zip(w[name].addressable_shards, back[name].addressable_shards, strict=True)
    )
    step.save(Path(folder, "c"), w)
    whole = step.restore(Path(folder, "c"), like=w)
    mine = mine and all(
        np.array_equal(a.data, b.data)
        for name in w
        for a, b in zip(w[name].addressable_shards, whole[name].addressable_shards, strict=True)
    )
    told = ["same" if mine else "other"]
    alone = path if jax.process_index() == 0 else path.with_name("none.safetensors")
    for do in (lambda: step.restore(alone, like=w, rename=["fc.weight=w:T"]), lambda: step.save(path, w)):
        try:
            do()
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told
