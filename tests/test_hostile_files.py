"""Whatever has become of a file, it is read as it was written, or one line says why it is not."""

import pytest
from hostile_files import FORMATS, faults


@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_file_is_read_or_told_in_one_line(kind):
    found, ends = faults(25, 7, (kind,))
    assert found == []
    assert ends["told"] > 3


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
def test_a_thousand_damaged_files_are_read_or_told_in_one_line(seed):
    assert faults(50, seed)[0] == []
