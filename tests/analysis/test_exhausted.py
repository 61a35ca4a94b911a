"""A TPU compiler's errors for want of memory, as its versions write them, read into bytes."""

import pytest

from jaxshard_magic.analysis.memory import parse_required_bytes, with_needed
from jaxshard_magic.report import DeviceMemory, Memory

GIB = 2**30
OLDER = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (16.50G) "
    "exceeds available HBM (15.75G)."
)
NEWER = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (16.50G) exceeds available HBM (15.75G). HLO module: jit_step.\nSee https://openxla.org/xla/errors"
)
LISTED = "Ran out of memory in memory space hbm. Used 16.50G of 15.75G hbm. Exceeded hbm capacity by 768.00M."


@pytest.mark.parametrize("message", [OLDER, NEWER, LISTED])
def test_what_is_needed_is_read_from_every_form(message):
    assert parse_required_bytes(message) == int(16.5 * GIB)


@pytest.mark.parametrize(("text", "size"), [("512.00M", 2**29), ("1.50K", 1536), ("96", 96), ("2.00T", 2**41)])
def test_sizes_have_the_units_of_the_compiler(text, size):
    assert parse_required_bytes(f"Used {text} of 15.75G hbm.") == size


def test_other_errors_tell_no_sizes():
    assert parse_required_bytes("RESOURCE_EXHAUSTED: Attempting to allocate 2.00G") is None


def test_the_compiler_s_own_figure_is_the_peak_and_the_parts_add_up():
    stand_in = DeviceMemory(
        0, params=4 * GIB, optimizer=0, batch=GIB, other=GIB, temporaries=GIB, peak=7 * GIB, limit=None
    )
    found = with_needed(Memory((stand_in,), "compiled"), 17 * GIB, "v5p")
    one = found.per_device[0]
    assert (one.peak, one.temporaries, found.source) == (17 * GIB, 11 * GIB, "compiled for v5p")
    assert one.peak == one.params + one.optimizer + one.batch + one.other + one.temporaries
    assert with_needed(Memory((stand_in,), "compiled"), 17 * GIB, None).source == "refused"
