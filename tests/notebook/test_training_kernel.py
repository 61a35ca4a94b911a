"""A cell that trains in a real kernel: what its notebook keeps when it ends, and when its kernel dies on the way."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

pytestmark = pytest.mark.ci

GIVEN = """
%load_ext jaxshard_magic
import os, time
import jax, jax.numpy as jnp
%mesh cpu:2 data=2;
w, batch = jnp.ones((64, 64)), jnp.ones((8, 64))
"""
TRAIN = """%%shard fsdp
@jax.jit
def train_step(w, batch):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(w)
    return w - 1e-4 * grads, {"loss": loss, "norm": jnp.sum(grads ** 2)}
for i in range(400):
    w, metrics = train_step(w, batch)
    time.sleep(0.01)
"""


class Outputs:
    """A cell's outputs as its notebook holds them: an update changes the one that it is of."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []
        self.updates = 0
        self._by_id: dict[str, int] = {}

    def hear(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "comm_msg" and content["data"].get("method") == "custom":
            self.updates += 1
        if kind not in ("display_data", "update_display_data"):
            return
        name = content.get("transient", {}).get("display_id")
        if kind == "update_display_data":
            self.shown[self._by_id[name]] = content["data"]
            return
        if name is not None:
            self._by_id[name] = len(self.shown)
        self.shown.append(content["data"])

    @property
    def html(self) -> list[str]:
        return [data.get("text/html", "") for data in self.shown]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """A kernel that has what the cells train; the last test ends it."""
    folder = tmp_path_factory.mktemp("kernel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSHARD_HISTORY", str(folder / "history.sqlite3"))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        manager, client = start_new_kernel(kernel_name="python3", cwd=str(Path(__file__).parents[2]))
    client.execute_interactive(GIVEN, output_hook=lambda _: None, timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.fixture
def client(kernel: tuple[KernelManager, BlockingKernelClient]) -> BlockingKernelClient:
    return kernel[1]


def test_a_cell_that_ends_leaves_its_curves_in_its_report(client: BlockingKernelClient):
    outputs = Outputs()
    longer = TRAIN.replace("sleep(0.01)", "sleep(0.02)")  # so that a loaded machine comes to draw it, too
    client.execute_interactive(longer, output_hook=outputs.hear, timeout=60)
    assert outputs.updates > 2
    assert not [html for html in outputs.html if "of 400, loss" in html], (
        "neither the line nor the last picture is left"
    )
    (report,) = [html for html in outputs.html if "Training: loss" in html]
    assert "after 400 steps" in report and report.count("<svg") > 4


def test_a_later_cells_loop_leaves_its_picture_and_other_cells_show_nothing(client: BlockingKernelClient):
    step, loop = TRAIN[: TRAIN.index("for i")], TRAIN[TRAIN.index("for i") :]
    client.execute_interactive(step, output_hook=lambda _: None, timeout=60)
    still, trains = Outputs(), Outputs()
    client.execute_interactive("time.sleep(2.5)", output_hook=still.hear, timeout=60)
    assert still.shown == [] and still.updates == 0
    client.execute_interactive(loop, output_hook=trains.hear, timeout=60)
    assert trains.updates
    (picture,) = [html for html in trains.html if "<svg" in html]
    assert "<b>loss</b>" in picture and "after 400 steps" in picture


def test_a_kernel_that_dies_leaves_the_last_picture(kernel: tuple[KernelManager, BlockingKernelClient]):
    manager, client = kernel
    outputs, alive = Outputs(), True
    client.execute(TRAIN + "    if i == 399: os._exit(1)")
    while alive:  # nobody says that it has ended
        alive = manager.is_alive()
        with suppress(Empty):
            while True:
                outputs.hear(client.get_iopub_msg(timeout=0.5))
    (picture,) = [html for html in outputs.html if "<svg" in html]
    assert "<b>loss</b>" in picture and "of 400, loss" in picture
