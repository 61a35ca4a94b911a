"""Where the time of a step went, in the widget: a line tells its measured time aloud, and long tables are folded."""

import re
from dataclasses import replace

from support.browsing import Stage, expect
from support.sample_measured import CELL, measured
from support.sample_reports import attached, profiled

from jaxshard_magic.report import LineTime


def test_a_line_tells_a_screen_reader_its_measured_time(show: Stage):
    shown = show(profiled(), ["communication"])
    said = shown.panel.get_by_role("button", name=re.compile(r"^cell \[7\], line 14: ")).get_attribute("aria-label")
    # line 14 was measured forward alone: 3 ms of compute and 6 ms of waiting
    assert "; measured 8.63\u202fms; 22% of the step; " in (said or "")


def test_of_many_measured_lines_twelve_are_listed_and_a_button_lists_the_rest(show: Stage):
    rows = tuple(LineTime(CELL, line, "forward", 1e-3 * (49 - line), 0.0, 0.0) for line in range(1, 49))
    shown = show(replace(attached(), measured=replace(measured(), lines=rows)), ["measured"])
    listed = shown.panel.get_by_role("table", name="Lines by measured time").locator("tbody tr")
    expect(listed).to_have_count(12)
    expect(shown.panel.locator(".jsm-more")).to_have_text("36 more rowsShow all")
    shown.panel.get_by_role("button", name="Show all").click()
    expect(listed).to_have_count(48)
    expect(listed.nth(12)).to_be_focused()
    expect(listed.nth(47)).to_contain_text("1.00")
    expect(shown.panel.locator(".jsm-more")).to_have_count(0)
