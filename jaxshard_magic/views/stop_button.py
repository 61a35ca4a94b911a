"""A button that ends a long cell early, where the page can interrupt the kernel; else a line that says how to."""

from pathlib import Path

from anywidget import AnyWidget

_STATIC = Path(__file__).parents[1] / "static"


class StopButton(AnyWidget):
    """Interrupts the kernel that it belongs to, which raises KeyboardInterrupt in the cell that runs."""

    _esm = (_STATIC / "stop.js").read_text(encoding="utf-8")
