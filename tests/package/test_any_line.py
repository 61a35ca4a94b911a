"""Whatever is typed after a magic runs, or one line says why it does not, and neither takes long."""

import pytest
from any_line import faults


def test_a_line_runs_or_is_told_in_one_line():
    assert faults(40)[0] == []


@pytest.mark.full
def test_a_thousand_lines_run_or_are_told_in_one_line():
    assert faults(1000, 1)[0] == []
