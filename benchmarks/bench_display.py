"""From the end of a cell's run to the report on the screen: `python benchmarks/bench_display.py`.

A real kernel runs a `%%shard` cell; the time starts when the cell's last statement ends and stops when the report's
last output has arrived here. On 512 devices, whose step no small machine can run, the step is only compiled, and read
ahead as the magic does, and the time starts there. What arrived is counted in bytes. The same report is then drawn in
a headless Chromium (it has to be installed), until the second frame after; then the leaves are scrolled to their end
and back, and frames are counted. Exits with 1 above a limit. Times are of this machine, with nothing else running.
"""

import base64
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from jupyter_client.manager import start_new_kernel
from jupyter_client.session import json_packer
from support.browsing import Stage, chromium, stage

from jaxshard_magic.report import Report
from jaxshard_magic.views.payload import packed_report

BYTES = 300_000
ROUNDS = 5
FRAME = 1 / 60
LATE = 0.01  # of the frames, at most

DRAW = """async given => {
  const start = performance.now();
  await stub.show(report, given); // two frames after render, when all is drawn
  return (performance.now() - start) / 1e3;
}"""

SCROLL = """async pixels => {
  const tree = document.querySelector("[role=tree]");
  const frame = () => new Promise(requestAnimationFrame);
  const times = [];
  let last = await frame();
  const turn = async way => {
    const end = () => way > 0 ? tree.scrollTop + tree.clientHeight >= tree.scrollHeight - 1 : tree.scrollTop <= 0;
    while (!end()) {
      tree.scrollTop += way * pixels;
      const now = await frame();
      times.push((now - last) / 1e3);
      last = now;
    }
  };
  await turn(1);
  await turn(-1);
  return times;
}"""

SETUP = """
import time, jax, jax.numpy as jnp, optax
%load_ext jaxshard_magic
%mesh cpu:{devices} data={data} model=2
LAYERS, WIDTH = {layers}, 128
params = {{f"part{{i % 7}}.stage{{i}}.proj": {{"w": jnp.full((WIDTH, WIDTH), 0.01), "b": jnp.zeros(WIDTH)}}
          for i in range(LAYERS)}}
tx = optax.adam(1e-3)
state, batch = (params, tx.init(params)), jnp.ones(({devices}, WIDTH))
"""

CELL = """%%shard fsdp@data -o report
def train_step(state, batch):
    params, moments = state

    def loss_fn(params):
        x = batch
        for layer in params.values():
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, moments = tx.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss

state, loss = jax.block_until_ready(train_step(state, batch))
print("ended", time.time(), flush=True)
"""

COMPILED = CELL.replace("%%shard fsdp@data -o report\n", "").replace(
    "state, loss = jax.block_until_ready(train_step(state, batch))\n",
    """import jaxshard_magic
step = jaxshard_magic.shard(train_step, "fsdp@data", mesh=jaxshard_magic.mesh("data=256 model=2"))
step.read_ahead = True
step.prepare(state, batch)
""",
)
COMPILED += "report = step.report()\nreport\n"


@dataclass(frozen=True)
class Size:
    devices: int
    layers: int
    cell: str
    seconds: float  # at most


SIZES = (Size(8, 100, CELL, 0.100), Size(512, 334, COMPILED, 0.350))


def executed(client: Any, code: str, timeout: float = 300) -> list[tuple[float, dict[str, Any]]]:
    """Every message that the cell published, with the time at which it came."""
    asked = client.execute(code)
    found = []
    while True:
        message = client.get_iopub_msg(timeout=timeout)
        if message["parent_header"].get("msg_id") != asked:
            continue
        found.append((time.time(), message))
        if message["msg_type"] == "error":
            raise RuntimeError("\n".join(message["content"]["traceback"]))
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return found


def run(client: Any, cell: str) -> tuple[float, int]:
    """Seconds from the end of the cell's own run to the report's last message, and the bytes of these."""
    messages = executed(client, cell)
    said = next((i, m["content"]["text"]) for i, (_, m) in enumerate(messages) if m["msg_type"] == "stream")
    ended = float(said[1].split()[1])
    shown = [(at, m) for at, m in messages[said[0] + 1 :] if m["msg_type"] != "status"]
    return shown[-1][0] - ended, sum(size(m) for _, m in shown)


def size(message: dict[str, Any]) -> int:
    return len(json_packer(message["content"])) + sum(len(b) for b in message.get("buffers") or ())


def seconds_to_draw(on: Stage, report: Report) -> float:
    """From the packed report to the second frame after it was drawn."""
    traits = {"packed": base64.b64encode(packed_report(report)).decode(), "traits": {}}
    return on.page.evaluate(DRAW, {**traits, "only": None, "width": 900, "theme": "light"})


def scroll_frames(on: Stage, report: Report, pixels: int = 60) -> list[float]:
    """Seconds of each frame while the leaves are scrolled, `pixels` a frame, to their end and back."""
    on(report, tab="layout")
    return on.page.evaluate(SCROLL, pixels)


def measured(size: Size, on: Stage) -> tuple[float, Report]:
    """Print what this size takes; returns the largest share of a limit, and the report."""
    os.environ.update(NPROC="32", JAX_PLATFORMS="cpu", JAXSHARD_VIEW="widget")
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        executed(client, SETUP.format(devices=size.devices, data=size.devices // 2, layers=size.layers))
        (first, sent), (again, resent) = run(client, size.cell), run(client, size.cell)
        text = executed(client, "print(report.to_json())")
        report = Report.from_json("".join(m["content"]["text"] for _, m in text if m["msg_type"] == "stream"))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    drawn = statistics.median(seconds_to_draw(on, report) for _ in range(ROUNDS))
    total = first + drawn
    print(f"{size.devices} devices, {len(report.leaves)} leaves")
    print(f"  kernel {1e3 * first:.0f} ms (again {1e3 * again:.0f} ms), drawing {1e3 * drawn:.0f} ms")
    print(f"  end of run to picture: {1e3 * total:.0f} ms, at most {1e3 * size.seconds:.0f} ms")
    print(f"  sent {sent / 1e3:.1f} kB, for a second report {resent / 1e3:.1f} kB, at most {BYTES / 1e3:.0f} kB")
    return max(total / size.seconds, sent / BYTES), report


def main() -> int:
    with chromium() as browser, stage(browser) as on:
        small, large = (measured(size, on) for size in SIZES)
        frames = scroll_frames(on, large[1])
    late = sum(f > 1.5 * FRAME for f in frames) / len(frames)
    print(f"scrolling {len(large[1].leaves)} leaves: {len(frames) / sum(frames):.1f} frames a second,", end=" ")
    print(f"{100 * late:.1f}% of {len(frames)} frames late, at most {100 * LATE:.0f}%")
    return max(small[0], large[0]) > 1 or late > LATE


if __name__ == "__main__":
    sys.exit(main())
