"""A folder of checkpoints is let go of when what was begun is written, and what fails of that is told in one line."""

import signal
import threading

import jax.numpy as jnp
import pytest
from support.refusals import refusal

from jaxshard_magic.checkpoints import CheckpointInfo, CheckpointStore, SavedLeaf
from jaxshard_magic.checkpoints import store as closing

TREE = {"w": jnp.ones(8)}


def about(n):
    return CheckpointInfo(n, "fsdp", "data=8", (SavedLeaf("w", (8,), "float32"),))


def test_an_interrupted_wait_leaves_the_folder_to_the_save_until_written(tmp_path, monkeypatch):
    written, store = threading.Event(), CheckpointStore(tmp_path / "c")
    manager = store._open_manager()
    wait = manager.wait_until_finished

    def late():
        if threading.current_thread() is not threading.main_thread():  # which `save` has it asked in
            written.wait(60)
        wait()

    monkeypatch.setattr(manager, "wait_until_finished", late)
    store.save(1, TREE, about(1))
    stop = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    stop.start()
    with pytest.raises(KeyboardInterrupt):
        store.close()
    monkeypatch.setattr(closing, "LAST_SAVE_S", 0.1)
    assert "what was saved last is still being written" in refusal(
        CheckpointStore(tmp_path / "c").save, 2, TREE, about(2)
    )
    written.set()
    monkeypatch.setattr(closing, "LAST_SAVE_S", 60)
    with CheckpointStore(tmp_path / "c") as other:
        other.save(2, TREE, about(2))
    assert other.steps() == [1, 2]


def test_what_fails_of_closing_is_told(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path / "c")
    store.save(1, TREE, about(1))
    end = store._manager.close

    def failed():
        end()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store._manager, "close", failed)
    assert "there is no room left to end saving into" in refusal(store.close)
    with CheckpointStore(tmp_path / "c") as other:
        other.save(2, TREE, about(2))
