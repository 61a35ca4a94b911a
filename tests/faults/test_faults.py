"""The faults that the suite must find can be planted: each text that they replace is there, once."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(Path(__file__).parent))
from plant import faults  # noqa: E402


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_a_fault_has_its_place_in_the_sources(fault):
    assert fault.text in fault.place(ROOT).read_text("utf-8")
    assert all((ROOT / "tests" / file).exists() for file in fault.files)


def test_there_are_twenty():
    assert len(faults()) == 20
