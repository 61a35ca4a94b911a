"""A state saved and restored is the same to the bit, under whatever plan; what can't be is told in one line."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from support.refusals import refusal
from support.thinned import CI, thinned

import jaxshard_magic
from jaxshard_magic.checkpoints import CheckpointInfo, CheckpointStore, SavedLeaf

TX = optax.adam(1e-2)
BATCH = np.random.default_rng(0).normal(size=(16, 32)).astype("float32")
POSITIONS = np.random.default_rng(0).normal(size=(8, 16, 32)).astype("float32")
WIDE = 1024  # each array has more elements than fsdp leaves whole


def state_of(width=64):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {f"l{i}": jax.random.normal(k, (32, width) if i % 2 == 0 else (width, 32)) / 8 for i, k in enumerate(keys)}
    return params, TX.init(params), jax.random.key(7)


def train(state, batch):
    """Of rows, or of rows of positions that look at each other."""
    params, opt, key = state
    key, drop = jax.random.split(key)
    mask = jax.random.bernoulli(drop, 0.9, (32,))

    def loss(params):
        x = batch * mask
        if x.ndim == 3:
            x = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x, x) / 6) @ x
        for i in (0, 2):
            x = x + jnp.tanh(x @ params[f"l{i}"]) @ params[f"l{i + 1}"]
        return jnp.mean((x - batch) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt = TX.update(grads, opt)
    return (optax.apply_updates(params, updates), opt, key), value


def bits(tree):
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(tree)
    ]


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


PLANS = {
    "dp": ("dp", "cpu:8 data=8", {}),
    "fsdp": ("fsdp", "cpu:8 data=8", {}),
    "tp": ("tp", "cpu:4 model=4", {}),
    "fsdp+tp": ("fsdp+tp", "cpu:8 data=4 model=2", {}),
    "pp": ("pp", "cpu:2 stage=2", {"microbatches": 2}),
    "sp": ("fsdp+sp", "cpu:8 data=4 seq=2", {}),
    "microbatched": ("fsdp", "cpu:4 data=4", {"microbatches": 2}),
}


def stepped(plan):
    strategy, mesh, more = PLANS[plan]
    return jaxshard_magic.shard(train, strategy, mesh=mesh, **more)


SLOW = {"pp", "sp"}
SELDOM = ["dp", "tp", "fsdp+tp", "microbatched"]


@pytest.mark.parametrize(
    "plan",
    [*thinned([p for p in PLANS if p not in SELDOM], {*PLANS} - SLOW - {*SELDOM}, CI), *thinned(SELDOM, ())],
)
def test_a_state_goes_to_another_plan_and_back_to_the_bit_and_trains_on(plan, tmp_path):
    here, there = stepped(plan), stepped("fsdp" if plan != "fsdp" else "tp")
    batch = POSITIONS if plan == "sp" else BATCH
    state, _ = here(state_of(WIDE), batch)
    assert here.save(tmp_path / "a", state) == 1
    there.prepare(state_of(WIDE), batch)
    moved = there.restore(tmp_path / "a", state_of(WIDE))
    assert same(moved, state)
    assert not any(x.sharding.is_fully_replicated for x in moved[0].values()), "each device reads its part"
    assert there.save(tmp_path / "b", moved) == 1
    back = here.restore(tmp_path / "b", state_of(WIDE))
    assert same(back, state)
    assert [x.sharding for x in jax.tree.leaves(back[0])] == [x.sharding for x in jax.tree.leaves(state[0])]
    for _ in range(5):
        state, loss = here(state, batch)
        back, again = here(back, batch)
        moved, far = there(moved, batch)
        assert float(again) == float(loss)
        np.testing.assert_allclose(float(far), float(loss), rtol=1e-6)
    assert same(back, state)


def nnx_state():
    model = nnx.Sequential(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


@pytest.mark.ci
def test_objects_of_nnx_are_restored_in_place_with_their_keys(tmp_path):
    @nnx.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return value

    sharded = jaxshard_magic.shard(step, "fsdp", mesh="cpu:8 data=8")
    model, optimizer = nnx_state()
    sharded(model, optimizer, BATCH)
    before = nnx.to_pure_dict(nnx.state((model, optimizer)))
    sharded.save(tmp_path / "c", (model, optimizer))
    after = [float(sharded(model, optimizer, BATCH)) for _ in range(5)]
    other, its = nnx_state()
    back = sharded.restore(tmp_path / "c", (other, its))
    assert back[0] is other
    assert same(nnx.to_pure_dict(nnx.state((other, its))), before)
    assert [float(sharded(other, its, BATCH)) for _ in range(5)] == after


MODULE = nn.Dense(32)
APPLY = MODULE.apply


def linen():
    params = MODULE.init(jax.random.key(0), BATCH)["params"]
    return TrainState.create(apply_fn=APPLY, params=params, tx=TX)


def linen_step(state, x):
    def loss(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - x) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def equinox():
    model = eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0))
    return model, TX.init(eqx.filter(model, eqx.is_array))


@eqx.filter_jit
def equinox_step(state, x):
    model, opt = state
    value, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - x) ** 2))(model)
    updates, opt = TX.update(grads, opt)
    return (eqx.apply_updates(model, updates), opt), value


@pytest.mark.ci
@pytest.mark.parametrize(("make", "step"), [(linen, linen_step), (equinox, equinox_step)])
def test_states_of_linen_and_equinox_come_back_as_themselves(make, step, tmp_path):
    sharded = jaxshard_magic.shard(step, "fsdp", mesh="cpu:8 data=8")
    state, _ = sharded(make(), BATCH)
    sharded.save(tmp_path / "c", state)
    back = sharded.restore(tmp_path / "c", make())
    assert type(back) is type(state)
    assert same(eqx.filter(back, eqx.is_array), eqx.filter(state, eqx.is_array))
    for _ in range(5):
        (state, loss), (back, again) = sharded(state, BATCH), sharded(back, BATCH)
        assert float(loss) == float(again)


def small(n=1, dtype="float32", name="w", shape=(8,)):
    return {name: jnp.full(shape, n, dtype)}


def about(n, tree):
    return CheckpointInfo(n, "fsdp", "data=8", tuple(SavedLeaf(k, x.shape, str(x.dtype)) for k, x in tree.items()))


def test_another_model_is_refused_by_its_first_leaf_before_anything_is_read(tmp_path, monkeypatch):
    step = jaxshard_magic.shard(lambda state: state, "dp", mesh="cpu:2 data=2")
    step(small())
    step.save(tmp_path / "c", small())
    monkeypatch.setattr(CheckpointStore, "restore", lambda *_: pytest.fail("read"))
    back = step.restore
    assert "w is float32[8] in c/1 and float32[4] here" in refusal(back, tmp_path / "c", small(shape=(4,)))
    assert "w is float32[8] in c/1 and int32[8] here; cast=True" in refusal(back, tmp_path / "c", small(dtype="int32"))
    renamed = refusal(back, tmp_path / "c", {"ww": jnp.ones(8)})
    assert "c/1 has no ww. Did you mean 'w'?" in renamed
    assert "no arrays" in refusal(back, tmp_path / "c", {})


def test_a_dtype_is_converted_where_asked(tmp_path):
    step = jaxshard_magic.shard(lambda state: state, "dp", mesh="cpu:2 data=2")
    step(small())
    step.save(tmp_path / "c", small(3))
    assert step.restore(tmp_path / "c", small(dtype="bfloat16"), cast=True)["w"].dtype == jnp.bfloat16


def test_folders_that_cant_be_saved_into_are_told_and_left_alone(tmp_path):
    tree = small()
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refusal(CheckpointStore(tmp_path / "file").save, 1, tree, about(1, tree))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert "notes.txt" in refusal(CheckpointStore(tmp_path / "full").save, 1, tree, about(1, tree))
    with CheckpointStore(tmp_path / "c") as first:
        first.save(1, tree, about(1, tree))
        assert "has a checkpoint 1 already" in refusal(first.save, 1, tree, about(1, tree))
        assert "is saving a checkpoint into it" in refusal(
            CheckpointStore(tmp_path / "c").save, 2, tree, about(2, tree)
        )
        forked = os.dup(first._lock._file.fileno())  # as a process has it that a loader forks from this one
    with CheckpointStore(tmp_path / "c") as second:
        second.save(2, tree, about(2, tree))
    os.close(forked)
    shutil.rmtree(tmp_path / "c" / "2")
    assert CheckpointStore(tmp_path / "c").steps() == [1]
    assert "it has 1" in refusal(CheckpointStore(tmp_path / "c").info, 5)


def test_arrays_that_the_plan_has_no_place_for_are_told_in_one_line(tmp_path):
    step = jaxshard_magic.shard(lambda state: state, "dp", mesh="cpu:2 data=2")
    state = {**small(3), "seen": jnp.arange(6), "epoch": jnp.asarray(2)}
    step(small())
    step.save(tmp_path / "c", state)
    with pytest.warns(UserWarning, match=r"^seen int32\[6\] whole on each of 2 devices: .* takes no input of this"):
        back = step.restore(tmp_path / "c", state)
    assert same(back, state)
    assert back["seen"].sharding.is_fully_replicated


def test_the_lock_is_imported_where_there_is_no_fcntl(monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    spec = importlib.util.find_spec("jaxshard_magic.checkpoints.folder")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def bare():
    """The environment of a process with this checkout and one CPU device."""
    here = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": here, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


LIMITED = """
import resource, sys, jax
from jaxshard_magic.checkpoints import CheckpointInfo, SavedLeaf, CheckpointStore
from jaxshard_magic.errors import ShardError
store, w = CheckpointStore(sys.argv[1]), jax.random.normal(jax.random.key(0), (1 << 20,))
for n in (1, 2):
    store.save(n, {"w": w}, CheckpointInfo(n, "dp", "data=1", (SavedLeaf("w", w.shape, str(w.dtype)),)))
    try:
        store.wait()
    except ShardError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
print(store.steps())
"""


@pytest.mark.ci
@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are POSIX")
def test_a_save_that_fails_is_one_line_and_keeps_the_one_before(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "c")], env=bare(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    line, steps = done.stdout.splitlines()
    assert "can't write checkpoint 2 into" in line
    assert line.endswith("the last one is 1")
    assert steps == "[1]"
    assert "Traceback" not in done.stderr
    assert "orbax" not in done.stderr
    assert [x.name for x in (tmp_path / "c").iterdir() if not x.name.startswith(".")] == ["1"]


STEP = """%%shard dp
def train(state, batch, *, scale, rate=0.5):
    g = jax.grad(lambda s: scale * jnp.mean((batch - s["w"]) ** 2))(state)
    return {"w": state["w"] - rate * g["w"]}
"""
GIVEN = """
import jax, jax.numpy as jnp
state, batch, rate, scale = {"w": jnp.arange(4.0)}, jnp.ones((8, 4)), 0.25, 2.0
%mesh data=4;
"""


def test_the_notebooks_state_goes_to_disk_and_comes_back_under_its_name(notebook, tmp_path, capsys):
    notebook.run(GIVEN)
    notebook.run(f"{STEP}\nstate = train(state, batch, scale=scale)\nstate = train(state, batch, scale=scale)")
    saved = np.asarray(notebook["state"]["w"])
    notebook.run(f"%shard save {tmp_path}/c state")
    assert "checkpoint 2 saved into" in capsys.readouterr().out
    notebook.run("state = train(state, batch, scale=scale)")
    assert not np.array_equal(notebook["state"]["w"], saved)
    notebook.run(f"%shard load {tmp_path}/c state")
    assert "state restored from checkpoint 2 of" in capsys.readouterr().out
    assert np.array_equal(notebook["state"]["w"], saved)
    notebook.run(f"%shard load {tmp_path}/c")
    said = capsys.readouterr().out.strip()
    assert said.startswith("checkpoint 2: 1 arrays, dp on data=4, ")
    assert "jax " in said and "hash " in said and "\n" not in said
    assert np.array_equal(notebook["state"]["w"], saved)


def test_a_state_is_loaded_before_the_first_call_of_a_step_with_keywords(notebook, tmp_path, capsys):
    tree = {"w": jnp.asarray([4.0, 3, 2, 1])}
    with CheckpointStore(tmp_path / "c") as store:
        store.save(7, tree, about(7, tree))
    notebook.run(GIVEN)
    notebook.run(STEP)
    notebook.run(f"%shard load {tmp_path}/c state")
    assert "state restored from checkpoint 7 of" in capsys.readouterr().out
    assert notebook["state"]["w"].tolist() == [4, 3, 2, 1]
    notebook.run("after = train(state, batch, scale=scale)")
    expected = np.array([4.0, 3, 2, 1]) - 0.5 * 2 * 2 / 4 * (np.array([4.0, 3, 2, 1]) - 1)
    np.testing.assert_allclose(notebook["after"]["w"], expected, rtol=1e-6)
    notebook.run(f"%shard save {tmp_path}/c after")
    assert "checkpoint 8 saved into" in capsys.readouterr().out


KILLED = """
import sys, jax.numpy as jnp
from jaxshard_magic.checkpoints import CheckpointInfo, SavedLeaf, CheckpointStore
store, n = CheckpointStore(sys.argv[1], keep=2), 0
while True:
    n += 1
    tree = {f"w{i}": jnp.full((256, 256), n, "float32") for i in range(8)}
    leaves = tuple(SavedLeaf(k, x.shape, str(x.dtype)) for k, x in tree.items())
    store.save(n, tree, CheckpointInfo(n, "fsdp", "data=1", leaves))
    print(n, flush=True)
"""


def killed_in_a_save(folder, delay):
    """The number of the last save that was whole before the process was killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=bare(),
    )
    assert process.stdout is not None
    for _ in range(2):  # the second was begun: the first is whole
        process.stdout.readline()
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    said = process.stdout.read().split()
    process.wait()
    return int(said[-1]) - 1 if said else 1


@pytest.mark.parametrize("times", [pytest.param(3, marks=pytest.mark.ci), pytest.param(50, marks=pytest.mark.full)])
def test_a_process_killed_during_a_save_leaves_the_last_whole_checkpoint(times, tmp_path):
    moments, cut = np.random.default_rng(5).uniform(0, 0.3, times), 0
    for i, delay in enumerate(moments):
        folder = tmp_path / str(i)
        whole = killed_in_a_save(folder, delay)
        store = CheckpointStore(folder)
        assert store.latest() in (whole, whole + 1)
        cut += bool(store.remove_interrupted())
        for n in store.steps():
            leaves = store.info(n).leaves
            here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            target = {x.path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for x in leaves}
            assert all(np.all(np.asarray(x) == n) for x in store.restore(n, target).values())
        assert not store.remove_interrupted()
        store.close()
    assert times < 50 or cut, "no moment was inside a save"
