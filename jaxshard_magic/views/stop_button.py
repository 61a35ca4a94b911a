"""Button that ends a long cell early if the page can interrupt the kernel; otherwise a line of instructions."""

from anywidget import AnyWidget

from jaxshard_magic.views.live_view import STATIC


class StopButton(AnyWidget):
    """Widget that interrupts its kernel; the running cell raises KeyboardInterrupt."""

    _esm = (STATIC / "stop.js").read_text(encoding="utf-8")
