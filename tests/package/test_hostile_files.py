"""Whatever has become of a file, it is read as it was written, or one line says why it is not."""

import pytest
from hostile_files import FORMATS, faults, told_when_nonsense


@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_file_is_read_or_told_in_one_line(kind):
    assert faults(25, 7, (kind,))[0] == []


@pytest.mark.parametrize("kind", FORMATS)
def test_bytes_that_mean_nothing_are_told(kind, tmp_path):
    assert told_when_nonsense(kind, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
def test_a_thousand_damaged_files_are_read_or_told_in_one_line(seed):
    assert faults(50, seed)[0] == []
