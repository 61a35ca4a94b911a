"""Folders that can't be saved into, files that were changed and threads are told in one line, and in time."""

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from support.refusals import refusal
from support.resumed import new_step

from jaxshard_magic import ShardError
from jaxshard_magic.checkpoints import CheckpointInfo, CheckpointStore, SavedLeaf
from jaxshard_magic.checkpoints.store import list_checkpoints
from jaxshard_magic.files import make_private

TREE = {"w": jnp.arange(4096.0)}
HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "w")
file.write("process 7 on elsewhere")
file.flush()
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("held", flush=True)
sys.stdin.read()
"""


def halved(w):
    return w / 2, jnp.sum(w)


def about(step: int) -> CheckpointInfo:
    return CheckpointInfo(step, "dp", "data=1", (SavedLeaf("w", (4096,), "float32"),))


@contextmanager
def no_room(size: int = 100) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def saved_into_by_another(folder: Path) -> Iterator[None]:
    folder.mkdir()
    command = [sys.executable, "-c", HOLDS, str(folder / ".jaxshard-saving")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        yield
        other.communicate()


def into_a_file(folder: Path) -> Any:
    folder.write_text("mine")
    return nullcontext()


CANT_SAVE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file": (into_a_file, "is a file"),
    "no room": (lambda _: no_room(), "write into"),
    "another process": (saved_into_by_another, "process 7 on elsewhere is saving checkpoints into it"),
}


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process and locks of a file are POSIX")
@pytest.mark.parametrize("kind", CANT_SAVE)
def test_a_folder_that_cant_be_saved_into_is_told_before_the_loop(kind, tmp_path):
    made, said = CANT_SAVE[kind]
    step = new_step(step=halved)
    with made(tmp_path / "run"):
        assert said in refusal(step.checkpoint, tmp_path / "run")
    assert step.calls == 0


def test_a_loop_takes_over_the_folder_of_one_that_was_given_up(tmp_path):
    first, second = new_step(step=halved), new_step(step=halved)
    first.checkpoint(tmp_path, every=1)
    w, _ = first(jnp.ones(4096))
    second.checkpoint(tmp_path, every=1)
    with pytest.raises(ShardError, match="another loop of this process saves into it by now"):
        first(w)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_that_call_a_loops_step_are_told_and_do_not_fail(threads, tmp_path, capsys):
    step, failed = new_step(step=halved), list[BaseException]()

    def trains(k: int) -> None:
        w = jnp.full(4096, float(k))
        try:
            for _ in range(6):
                w, _ = step(w)
        except BaseException as error:
            failed.append(error)

    with step.checkpoint(tmp_path, every=2):
        running = [threading.Thread(target=trains, args=(k,)) for k in range(threads)]
        for each in running:
            each.start()
        for each in running:
            each.join()
    assert failed == []
    assert capsys.readouterr().out.count("several threads call the step") == (threads > 1)
    assert CheckpointStore(tmp_path).latest() == 6 * threads


def test_a_numbered_folder_of_something_else_is_no_checkpoint(tmp_path):
    with CheckpointStore(tmp_path / "c", keep=2) as store:
        for step in (1, 2, 3):
            store.save(step, TREE, about(step))
            for name in ("500", "7", "x"):
                (tmp_path / "c" / name).mkdir(exist_ok=True)
                (tmp_path / "c" / name / "notes.txt").write_text("mine")
        assert "is no checkpoint, and stands where checkpoint 7 goes" in refusal(store.save, 7, TREE, about(7))
    assert store.steps() == [2, 3] and store.latest() == 3
    assert (tmp_path / "c" / "500" / "notes.txt").read_text() == "mine"
    assert list_checkpoints(store)[-1].endswith("as they don't tell what is in them: 500, 7")
    assert "checkpoint 500 of" in refusal(store.info, 500)


def counted_states() -> dict[str, tuple[Any, int | None]]:
    tx, params = optax.adam(1e-3), {"w": jnp.ones(8)}
    opt_state = tx.init(params)
    for _ in range(2):
        _, opt_state = tx.update(params, opt_state)
    module = nn.Dense(4)
    train_state: Any = TrainState.create(
        apply_fn=module.apply, params=module.init(jax.random.key(0), jnp.ones((1, 4))), tx=tx
    )
    optimizer = nnx.Optimizer(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
    optimizer.step[...] = jnp.asarray(9, "uint32")
    return {
        "optax": ((params, opt_state), 2),
        "TrainState": (train_state.replace(step=5), 5),
        "nnx.Optimizer": (optimizer, 9),
        "no count": (params, 1),
    }


@pytest.mark.parametrize("kind", counted_states())
def test_a_state_is_saved_under_the_steps_that_it_counts(kind, tmp_path):
    state, number = counted_states()[kind]
    step = new_step(step=halved)
    step(jnp.ones(8))
    assert step.save(tmp_path / "c", state) == number
    assert CheckpointStore(tmp_path / "c").steps() == [number]


def test_one_bit_that_differs_in_a_checkpoint_is_told(tmp_path):
    with CheckpointStore(tmp_path / "c") as store:
        store.save(1, {"w": TREE["w"]}, about(1))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {"w": jax.ShapeDtypeStruct((4096,), "float32", sharding=here)}
    assert np.array_equal(store.restore(1, target)["w"], TREE["w"])
    files = [path for path in (tmp_path / "c" / "1").rglob("*") if path.is_file()]
    under = [p for p in files if {"state", "meta"} & {*p.relative_to(tmp_path / "c" / "1").parts}]
    assert len(under) > 3
    for path in under:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert "its checksum differs" in refusal(store.restore, 1, target)
        path.write_bytes(data)
    assert np.array_equal(store.restore(1, target)["w"], TREE["w"])


@pytest.mark.skipif(sys.platform == "win32", reason="rights are kept in another way")
def test_the_rights_behind_a_link_of_another_user_stay_as_they_are(tmp_path, monkeypatch):
    file, link = tmp_path / "theirs", tmp_path / "link"
    file.write_text("")
    file.chmod(0o644)
    link.symlink_to(file)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        make_private(link)
    assert file.stat().st_mode & 0o777 == 0o644
    make_private(link)
    assert file.stat().st_mode & 0o777 == 0o600


FAILS = """
import resource, shutil, sys
import jax.numpy as jnp
import jaxshard_magic

folder, how = sys.argv[1:]
step = jaxshard_magic.shard(lambda w: (w * 2, jnp.sum(w)), "fsdp", mesh="cpu:2 data=2")
w = jnp.arange(2.0**18)
try:
    with step.checkpoint(folder, every=2):
        for i in range(8):
            w, loss = step(w)
            if i == 2:
                if how == "a file in its place":
                    shutil.rmtree(folder)
                    open(folder, "w").close()
                elif how == "no room":
                    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
                elif how == "no descriptors":
                    # Only the three standard ones: what the save under way closes is no use to the next one.
                    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
except jaxshard_magic.ShardError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted there")
@pytest.mark.parametrize(
    "how",
    [
        "no room",
        pytest.param("a file in its place", marks=pytest.mark.ci),
        pytest.param("no descriptors", marks=pytest.mark.ci),
    ],
)
def test_a_process_ends_after_a_save_that_failed(how, tmp_path):
    command = [sys.executable, "-c", FAILS, str(tmp_path / "run"), how]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    # A file, and the want of descriptors, are met where the save before is looked for, or where the next is written.
    told = ["write checkpoint"]
    told += {"a file in its place": ["is a file"], "no descriptors": ["too many files are open"]}.get(how, [])
    *before, last = ran.stdout.splitlines() or [""]
    assert any(x in last for x in told), ran.stdout + ran.stderr
    # A save that fails ends the loop; the one that was under way may be written still.
    assert len(before) <= 1 and all(x.startswith("saved at step ") for x in before), ran.stdout + ran.stderr
