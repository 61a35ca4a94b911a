"""Panning over 10,000 actions in a headless Chromium: `python benchmarks/bench_timeline.py`.

A pipeline of 16 stages and 312 microbatches under 1F1B, 9,984 actions, is drawn by its widget and dragged from end to
end, the pointer some pixels further in each frame, once where numbers are read and once where half of the time is on
show, with a microbatch marked and without. Prints frames a second, the time that the page's own script takes for a
frame, the time until it is first drawn, and the bytes that are sent. Exits with 1 above a limit. Times are of this
machine, with nothing else running.
"""

import base64
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.browsing import Stage, chromium, stage

from jaxshard_magic import schedule
from jaxshard_magic.schedule import Costs
from jaxshard_magic.schedule.timeline import timeline
from jaxshard_magic.views.timeline.payload import packed_pipeline

STAGES, MICROBATCHES = 16, 312
FRAME = 1 / 60
LATE = 0.01  # of the frames, at most
BYTES = 300_000
FRAMES = 180
ROUNDS = 5

DRAW = """async given => {
  const start = performance.now();
  await stub.show(report, given); // two frames after render, when all is drawn
  return (performance.now() - start) / 1e3;
}"""

# Drags the lanes by some pixels in each frame, back and forth; seconds between frames, and of each drawing.
PAN = """async frames => {
  const plot = document.querySelector(".jsm-pp-plot");
  const box = plot.getBoundingClientRect();
  const [times, drawn] = [[], []];
  const told = (type, x) => plot.dispatchEvent(new PointerEvent(type, {
    bubbles: true, button: 0, pointerId: 1, isPrimary: true, clientX: x, clientY: box.top + 30,
  }));
  plot.setPointerCapture = () => {};
  const asked = requestAnimationFrame;
  globalThis.requestAnimationFrame = draw => asked(now => {
    const start = performance.now();
    draw(now);
    drawn.push((performance.now() - start) / 1e3);
  });
  const frame = () => new Promise(resolve => asked(resolve));
  let [x, way] = [box.left + box.width / 2, -4];
  told("pointerdown", x);
  let last = await frame();
  for (let i = 0; i < frames; i += 1) {
    if (x < box.left + 20 || x > box.right - 20) way = -way;
    told("pointermove", (x += way));
    const now = await frame();
    times.push((now - last) / 1e3);
    last = now;
  }
  told("pointerup", x);
  globalThis.requestAnimationFrame = asked;
  return [times, drawn];
}"""


def panned(on: Stage) -> tuple[float, float, float]:
    """Frames a second, the share of them that came late, and the median of the script's seconds for one."""
    times, drawn = on.page.evaluate(PAN, FRAMES)
    late = sum(t > 1.5 * FRAME for t in times) / len(times)
    return len(times) / sum(times), late, statistics.median(drawn)


IDLE = """async frames => {
  const frame = () => new Promise(requestAnimationFrame);
  const start = await frame();
  let last = start;
  for (let i = 0; i < frames; i += 1) last = await frame();
  return (1e3 * frames) / (last - start);
}"""


def zoomed_out(on: Stage) -> None:
    """Half of the time on show."""
    on.page.get_by_role("button", name="Show the whole time").click()
    for _ in range(2):
        on.page.get_by_role("button", name="Zoom in").click()


def main() -> int:
    made = schedule.make("1f1b", stages=STAGES, microbatches=MICROBATCHES)
    costs = Costs([1e-3] * (STAGES - 1) + [1.1e-3], 1e-3, 1e-3, transfer=5e-5)
    data = packed_pipeline(timeline(made, costs, "s"))
    given = {"packed": base64.b64encode(data).decode(), "traits": {}, "only": None, "width": 900, "theme": "light"}
    worst = 0.0
    with chromium() as browser, stage(browser) as on:
        first = statistics.median(on.page.evaluate(DRAW, given) for _ in range(ROUNDS))
        print(
            f"{made.actions:,} actions on {STAGES} stages: {len(data) / 1e3:.1f} kB sent, at most {BYTES / 1e3:.0f} kB"
        )
        print(
            f"drawn after {1e3 * first:.0f} ms;"
            f" with nothing to draw {on.page.evaluate(IDLE, FRAMES):.1f} frames a second"
        )
        for name, prepare in (("numbers read", lambda on: None), ("half on show", zoomed_out)):
            on.page.evaluate(DRAW, given)
            prepare(on)
            for marked in (False, True):
                if marked:
                    on.page.locator(".jsm-pp-plot").focus()
                    on.page.keyboard.press("ArrowRight")
                    on.page.keyboard.press("Enter")
                rate, late, script = panned(on)
                worst = max(worst, late)
                said = f"panning, {name}{', a microbatch marked' * marked}: {rate:.1f} frames a second,"
                print(f"{said} {100 * late:.1f}% of {FRAMES} late, {1e3 * script:.1f} ms of script each")
    print(f"late frames: at most {100 * LATE:.0f}%")
    return worst > LATE or len(data) > BYTES


if __name__ == "__main__":
    sys.exit(main())
