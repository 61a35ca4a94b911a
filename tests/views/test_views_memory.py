"""The largest buffers and the measured peak in the forms without a widget."""

from dataclasses import replace

from support.sample_reports import MIB, attached, measured, toy

from jaxshard_magic.report import Buffer, Report
from jaxshard_magic.views import words

SCORES = Buffer(4 * MIB, 2, "f32", (1024, 512), "dot_general", "forward", "cell [7]", 12)
STRANGE = Buffer(MIB, 1, "bf16", (8, 4), "<script>", None, None, None)


def filled(buffers=(SCORES, STRANGE), **device) -> Report:
    report = attached()
    assert report.memory is not None
    rows = tuple(replace(d, **device) for d in report.memory.per_device)
    return replace(report, memory=replace(report.memory, per_device=rows, buffers=buffers, others=(3, 5 * MIB)))


def test_html_has_a_row_for_each_buffer_with_its_line():
    page = filled().to_html()
    assert "3 buffers are 50% of the temporaries in use there; 3 more are 5.00" in page
    assert "f32[1024,512] \u00d72" in page and ">[7]:12<" in page
    assert "&lt;script&gt;" in page and "<script>" not in page


def test_a_terminal_lists_the_largest_buffers_within_its_width():
    for width in (60, 80, 100):
        lines = filled().to_text(width).splitlines()
        (head,) = [i for i, line in enumerate(lines) if "at the peak" in line]
        assert "f32[1024,512] \u00d72" in lines[head + 1] and lines[head + 1].rstrip().endswith("[7]:12")
        assert lines[head + 2].rstrip().endswith("-")
        assert all(len(line) <= width for line in lines)


def test_a_measured_peak_is_told_with_its_error():
    report = filled(measured=5 * 2**30)
    assert report.memory is not None
    said = words.measured_text(report.memory)
    assert said is not None and said.startswith("measured 5.00") and said.endswith("than computed")
    assert said.replace("\u202f", " ") in report.to_text(100).replace("\n   ", "")
    assert "than computed" in report.to_html()


def test_html_has_a_tick_and_a_column_for_measured_peaks():
    page = measured().to_html().replace("\u202f", " ")
    assert "measured peak</th>" in page
    # of devices 1 to 7, alike at 4.63 GiB, the largest
    assert "4.72 GiB <small>2.0% more</small>" in page
    assert "<title>0: 5.09 of 15.75 GiB, measured 5.14 GiB, 1.0% more</title>" in page
    assert page.count("<title>") == 2


def test_without_a_measured_peak_there_is_no_tick_and_no_column():
    page = attached().to_html()
    assert "measured peak" not in page and "<title>" not in page


def test_a_device_that_was_not_measured_has_a_dash_in_that_column():
    report = measured()
    assert report.memory is not None
    first, *rest = report.memory.per_device
    rows = (first, *(replace(d, measured=None) for d in rest))
    page = replace(report, memory=replace(report.memory, per_device=rows)).to_html()
    assert page.count("<title>") == 1
    assert ">\u2013</td></tr>" in page.partition("1 to 7</td>")[2].partition("jss-bar")[0]


def test_the_error_is_of_the_computed_peak():
    device = attached().memory.per_device[0]  # type: ignore[union-attr]
    of = replace(device, peak=4000)
    assert words.error_text(replace(of, measured=5000)) == "25% more"
    assert words.error_text(replace(of, measured=3900)) == "2.5% less"
    assert words.error_text(of) is None
    assert words.error_text(replace(of, peak=None, measured=1)) is None


def test_nothing_is_said_of_buffers_that_are_not_known():
    assert "at the peak" not in filled(None).to_text()
    assert "at the peak" not in filled(()).to_html()


def test_bars_that_would_not_be_seen_beside_the_limit_have_a_scale_of_their_own():
    note = "Bars below are drawn 7,681 times as long as on the scale of the limit, 15.75"
    report = toy()
    for view in (report.to_text(100), report.to_html(), report.figure("memory").layout.title.text):
        assert note in view.replace("<br>", " ")
    (line,) = [line for line in report.to_text(100).splitlines() if line.startswith("    0  ")]
    assert line.count("\u2591") > 10 and "|" not in line and "\u00b7" not in line
    end = report.figure("memory").layout.xaxis.range[1]
    assert end < 4 * MIB and "limit 15.75" not in report.figure("memory").to_json()
    assert note not in attached().to_html() + attached().to_text(100)
