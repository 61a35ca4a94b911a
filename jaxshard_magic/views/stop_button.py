"""A button that ends a long cell early, where the page can interrupt the kernel; else a line that says how to."""

from anywidget import AnyWidget

from jaxshard_magic.views.live_view import STATIC


class StopButton(AnyWidget):
    """Interrupts the kernel that it belongs to, which raises KeyboardInterrupt in the cell that runs."""

    _esm = (STATIC / "stop.js").read_text(encoding="utf-8")
