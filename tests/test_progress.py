"""The line that long work shows."""

import io
import sys
import time

from jaxshard_magic import _progress


def test_long_work_is_one_line_that_is_updated_and_cleared(monkeypatch):
    monkeypatch.setattr(_progress, "FIRST", 0.0)
    monkeypatch.setattr(_progress, "TICK", 0.01)
    drawn: list[str] = []
    with _progress.Progress(drawn.append, of="train_step") as progress:
        progress("compiling for 8 devices")
        time.sleep(0.3)
    assert drawn[0] == "train_step: compiling for 8 devices, 0.0 s"
    assert "train_step: compiling for 8 devices, 0.1 s" in drawn
    assert drawn[-1] == ""


def test_short_work_and_no_work_show_nothing():
    drawn: list[str] = []
    with _progress.Progress(drawn.append) as progress:
        progress("tracing train_step")
    assert drawn == []


def test_a_terminal_gets_the_line_written_over_and_a_pipe_gets_nothing(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert _progress.line_for(object()) is None
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    draw = _progress.line_for(object())
    assert draw is not None
    draw("tracing, 1.0 s")
    draw("")
    assert terminal.getvalue() == "\r\x1b[Ktracing, 1.0 s\r\x1b[K"
