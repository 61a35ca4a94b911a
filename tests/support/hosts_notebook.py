"""A notebook whose cells run on two real processes, what is done to it, and what it trains."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Notebook, shell
from IPython.utils.capture import CapturedIO, capture_output

from jaxshard_magic.hosts.cluster import Cluster

SETUP = """
import jax, jax.numpy as jnp, numpy as np, os, time
state = {"up": jnp.ones((32, 64)) / 8, "down": jnp.ones((64, 32)) / 8}
x = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
batch = {"x": x, "y": x}
"""
STEP = """
@jax.jit
def train_step(weights, batch):
    def loss_fn(weights):
        return jnp.mean((jax.nn.relu(batch["x"] @ weights["up"]) @ weights["down"] - batch["y"]) ** 2)
    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), loss
state, loss = train_step(state, batch)
"""
# It ends where no interrupt ends it, and the test says so.
LOOP = """
n, end = 0, time.monotonic() + 100
while time.monotonic() < end:
    state, loss = train_step(state, batch)
    n += 1
"""


class Hosts:
    """A notebook on hosts; `folder` is empty, for what its cells write."""

    def __init__(self, notebook: Notebook, folder: Path):
        self.notebook, self.folder = notebook, folder
        self.magics = notebook.shell.magics_manager.registry["ShardMagics"]

    @property
    def cluster(self) -> Cluster:
        return self.magics.hosts.cluster

    @property
    def pids(self) -> list[int]:
        return [joined.pid for joined in self.cluster.joined]

    def cell(self, code: str) -> CapturedIO:
        """What a cell says that ends as it should."""
        with capture_output() as said:
            self.notebook.run(code)
        return said

    def fails(self, code: str) -> tuple[str, str]:
        """The line of a cell that ends early, and all else that it says."""
        with capture_output() as said:
            error = self.notebook.fails(code)
        return str(error), said.stderr

    def fails_in_steps(self, do: Callable[[], Any]) -> tuple[str, str]:
        """What `fails` returns for a loop of steps, in which something is done once every host has made three steps,
        however long a slow machine takes to begin it."""
        for mark in (marks := [self.folder / str(host) for host in range(len(self.cluster))]):
            mark.unlink(missing_ok=True)
        once(lambda: all(mark.exists() for mark in marks), do)
        here = f"os.path.join({str(self.folder)!r}, str(jax.process_index()))"
        return self.fails(f"{LOOP}    if n == 3: open({here}, 'w').close()")

    def everywhere(self, expression: str) -> list[Any]:
        """What an expression is on each host."""
        code = f"__import__('IPython').get_ipython().user_ns['{expression}']"
        return [self.cluster.client[i].apply_async(eval, code).get(20) for i in self.cluster.ids]


@contextmanager
def unopened(folder: Path) -> Iterator[Hosts]:
    """A shell with the extension, in which a test opens hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("JAXSHARD_HISTORY", str(folder / "history.db"))
        with shell() as found:
            found.run_line_magic("load_ext", "jaxshard_magic")
            (written := folder / "written").mkdir()
            hosts = Hosts(Notebook(found), written)
            try:
                yield hosts
            finally:
                hosts.magics.hosts.close()


@contextmanager
def opened(folder: Path, line: str = "hosts:2 data=8") -> Iterator[Hosts]:
    with unopened(folder) as hosts:
        hosts.cell(f"%mesh {line}")
        hosts.cell(SETUP)
        yield hosts


@contextmanager
def training(folder: Path, line: str) -> Iterator[Hosts]:
    """The same, on which `line` has trained once."""
    with opened(folder) as found:
        found.cell(f"{line}\n{STEP}")
        yield found


def later(seconds: float, do: Callable[[], Any]) -> list[float]:
    """Do something in the middle of a cell; when that was. All garbage is collected first: Python drops an interrupt
    that comes during a collection, which takes long in a process of tests, and may come as the cell begins."""
    at: list[float] = []
    gc.collect()

    def timed() -> None:
        at.append(time.monotonic())
        do()

    threading.Timer(seconds, timed).start()
    return at


def once(is_so: Callable[[], bool], do: Callable[[], Any]) -> None:
    """Do something in the middle of a cell, as soon as something is so, or after a minute."""

    def waited() -> None:
        end = time.monotonic() + 60
        while not is_so() and time.monotonic() < end:
            time.sleep(0.02)
        do()

    later(0, waited)


def gone(pids: list[int], seconds: float = 10) -> bool:
    """Whether processes end within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(map(runs, pids)):
            return True
        time.sleep(0.05)
    return False


def runs(pid: int) -> bool:
    """Whether a process has not ended; one may end while it is asked."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
