"""One recorded step in lanes, as SVG: a lane for each device, painted by phase and kind."""

from jaxshard_magic.report import Measured
from jaxshard_magic.views import words
from jaxshard_magic.views.format import count_text
from jaxshard_magic.views.html_tags import escaped
from jaxshard_magic.views.measured import data
from jaxshard_magic.views.timeline import svg


def drawing(m: Measured) -> str:
    """Return one typical step as one `<svg>`; empty without lanes."""
    height, marks = lane_drawing(m)
    label = f"One recorded step in lanes, a device each, {len(m.lanes)} of {m.of_devices}"
    return svg.wrap_marks(height, marks, label) if marks else ""


def lane_drawing(m: Measured) -> tuple[float, str]:
    """Return the height of the lanes in px, and their marks; no marks without lanes."""
    names = [f"device {lane.device}" for lane in m.lanes]
    return svg.lane_marks(data.lane_events(m), names, data.idle_shares(m), data.lanes_end(m))


def legend(m: Measured) -> list[str]:
    """Return the entries of the legend as HTML."""
    keys = [f"{svg.kind_mark(kind)} {escaped(words.TIME_KINDS[kind])}" for kind in data.lane_letters(m)]
    lanes = "" if len(m.lanes) == m.of_devices else f", {len(m.lanes)} of {count_text(m.of_devices)} devices"
    about = f"one typical step{lanes}; at the right the share of it that is idle"
    return [*keys, f"{svg.idle_mark()} idle", about]
