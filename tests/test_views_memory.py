"""The largest buffers and the measured peak in the forms without a widget."""

from dataclasses import replace

from sample_reports import MIB, attached

from jaxshard_magic.report import Buffer, Report
from jaxshard_magic.views import words

SCORES = Buffer(4 * MIB, 2, "f32", (1024, 512), "dot_general", "forward", "cell 7", 12)
STRANGE = Buffer(MIB, 1, "bf16", (8, 4), "<script>", None, None, None)


def filled(buffers=(SCORES, STRANGE), **device) -> Report:
    report = attached()
    assert report.memory is not None
    rows = tuple(replace(d, **device) for d in report.memory.per_device)
    return replace(
        report, memory=replace(report.memory, per_device=rows, buffers=buffers, others=(3, 5 * MIB))
    )


def test_html_has_a_row_for_each_buffer_with_its_line():
    page = filled().to_html()
    assert "3 buffers are 50% of the temporaries; 3 more are 5.00" in page
    assert "f32[1024,512] \u00d72" in page and ">12<" in page
    assert "&lt;script&gt;" in page and "<script>" not in page


def test_a_terminal_lists_the_largest_buffers_within_its_width():
    for width in (60, 80, 100):
        lines = filled().to_text(width).splitlines()
        (head,) = [i for i, line in enumerate(lines) if "at the peak" in line]
        assert "f32[1024,512] \u00d72" in lines[head + 1] and lines[head + 1].rstrip().endswith("12")
        assert lines[head + 2].rstrip().endswith("-")
        assert all(len(line) <= width for line in lines)


def test_a_measured_peak_is_told_with_its_error():
    report = filled(measured=5 * 2**30)
    assert report.memory is not None
    said = words.measured_text(report.memory)
    assert said is not None and said.startswith("measured 5.00") and said.endswith("than computed")
    assert said.replace("\u202f", " ") in report.to_text(100).replace("\n   ", "")
    assert "than computed" in report.to_html()


def test_nothing_is_said_of_buffers_that_are_not_known():
    assert "at the peak" not in filled(None).to_text()
    assert "at the peak" not in filled(()).to_html()
