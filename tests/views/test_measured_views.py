"""What was measured of a step, as text, HTML and words: figures of a sample that were worked out by hand."""

import json
import re
from dataclasses import replace

import pytest
from support.sample_measured import STEP, measured
from support.sample_reports import attached, profiled

from jaxshard_magic.report import Measured, Report
from jaxshard_magic.views import measured as spent
from jaxshard_magic.views import words
from jaxshard_magic.views.timeline.svg import recorded_step_svg


def of(m: Measured, simulated: bool = False) -> Report:
    report = replace(attached(), measured=m)
    return replace(report, mesh=replace(report.mesh, source="simulated")) if simulated else report


def plain(text: str) -> str:
    return text.replace("\u202f", " ")


def test_the_step_is_divided_in_words():
    lead = plain("".join(span.text for span in words.measured_lead(measured())))
    # (33 + 7 * 30) / 8 = 30.4 of 47 ms; waiting (4 + 7 * 7) / 8 = 6.6
    assert lead == (
        "Measured 47.0 ms a step: 65% compute, 15% moving data, 14% waiting, 6.4% idle; 1.50 ms of what moves is "
        "hidden by compute."
    )
    assert plain(words.measured_about(measured())) == "5 recorded steps, 45.8 to 49.2 ms; 1,230 operations on a device."


def test_how_much_was_read_is_said():
    some = replace(measured(), read=2)
    assert words.measured_about(some).startswith("the last 2 of 5 recorded steps were read")
    many = measured(64)
    assert "devices are listed" not in " ".join(words.measured_notes(of(many)))
    fewer = replace(many, devices=many.devices[:16])
    assert "16 of 64 devices are listed." in words.measured_notes(of(fewer))


def test_times_of_simulated_devices_are_said_to_be_this_machines():
    assert any("the times are this machine's" in note for note in words.measured_notes(of(measured(), simulated=True)))
    assert not any("this machine" in note for note in words.measured_notes(of(measured())))


def test_on_several_hosts_it_is_said_whose_clock_the_lanes_go_by():
    report = of(measured())
    several = replace(report, mesh=replace(report.mesh, processes=2))
    assert any("its own first operation" in note for note in words.measured_notes(several))
    assert not any("host" in note for note in words.measured_notes(report))


def test_a_slow_device_and_unknown_time_are_named():
    notes = [plain(note) for note in words.measured_notes(of(measured()))]
    assert "Device 0 computes longest, 3.00 ms longer than the median one." in notes
    assert "No line is known of 0.8% of the step." in notes  # 0.375 of 47.0 ms


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("waits", [True, False])
def test_text_has_each_line_by_phase_and_keeps_to_its_width(width: int, waits: bool):
    text = of(measured(waits=waits)).to_text(width)
    assert all(len(line) <= width for line in text.splitlines())
    told = plain(text)
    start = told.index("Lines by measured time")
    first = told[start:].splitlines()[1]
    assert "backward" in first and ("17.0 ms" if waits else "16.0 ms") in first and "14.3 ms" in first
    if width == 100:
        assert re.search(r"all-gather +data +5\.50 ms +14\.3 ms +(4\.00 ms +)?72.7 GB/s +90 GB/s", told)


def test_the_lines_that_move_data_have_their_measured_time_beside():
    head = next(line for line in profiled().to_text(100).splitlines() if line.startswith("Lines that move data"))
    assert "measured" in head
    assert "measured" not in attached().to_text(100)
    row = next(line for line in plain(profiled().to_text(100)).splitlines() if re.match(r" +gpt2.py:46 ", line))
    assert "25.0 ms" in row and "# from [7]:12" in row  # 17 + 8 of its two phases


def test_html_tells_lines_collectives_devices_and_draws_a_lane_for_each():
    html = plain(profiled().to_html())
    assert "Measured 47.0 ms a step" in html
    assert "backward: compute 12.0 ms, moving 4.00 ms, waiting 1.00 ms" in html
    assert "72.7 GB/s" in html and "90 GB/s" in html
    picture = recorded_step_svg(measured())
    assert [f"device {d}" for d in range(8)] == re.findall(r"device \d", picture)
    assert {"F", "B", "R", "U", "O", "M", "X"} == set(re.findall(r'class="jss-k-(\w)"', picture))
    assert "<script" not in html


def test_a_lane_is_painted_by_phase_and_kind():
    first = spent.lane_events(measured())[0]
    assert [mark.actions[0].kind for mark in first] == ["F", "M", "R", "B", "M", "X", "U", "O"]
    assert first[0].end == pytest.approx(400 * STEP / 2000)


def test_of_one_device_nothing_is_slow():
    assert not any("longest" in note for note in words.measured_notes(of(measured(1))))
    assert "Lines by measured time" in of(measured(1)).to_text(80)


def test_a_report_without_a_recording_says_nothing_of_it():
    assert "Measured" not in attached().to_html() and "Lines by measured" not in attached().to_text()


def test_a_trace_has_a_thread_a_device_and_an_event_a_piece(tmp_path):
    text = measured().to_chrome_trace()
    events = [e for e in json.loads(text)["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 8 * 8 and {e["tid"] for e in events} == set(range(8))
    first = min((e for e in events if e["tid"] == 1), key=lambda e: e["ts"])
    assert (first["name"], first["dur"]) == (
        "gpt2.py:46 from [7]:12 forward",
        pytest.approx(380 * STEP / 2000 * 1e6),
    )
    assert measured().to_chrome_trace(tmp_path / "lanes.json").read_text() == text


def test_json_and_back():
    assert Report.from_json(profiled().to_json()) == profiled()
