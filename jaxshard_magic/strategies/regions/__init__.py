"""Regions: equations of a step with a special lowering, one kind a file, and the list of kinds."""

from collections.abc import Callable

from .deferred_reductions import find_deferred_reductions
from .expert_scans import find_expert_scans
from .fourier_transforms import find_fourier_transforms
from .fused_row_parallel import find_fused_row_parallel
from .grouped_convolutions import find_grouped_convolutions
from .hoisted_gathers import find_hoisted_gathers
from .reduction_dtypes import find_typed_reductions
from .region import Context, Emission, Region
from .ring import find_ring_attention
from .running_reductions import find_running_reductions
from .scattered_gradients import find_scattered_gradients
from .sorted_rows import find_sorted_rows
from .zigzag_region import find_zigzag_region

# From the outside in: of several regions of an equation the first is asked first, and the others are its `default`.
KINDS: tuple[Callable[[Context], Region], ...] = (
    find_zigzag_region,
    find_hoisted_gathers,
    find_sorted_rows,
    find_expert_scans,
    find_deferred_reductions,
    find_fused_row_parallel,
    find_scattered_gradients,
    find_typed_reductions,
    find_grouped_convolutions,
    find_ring_attention,
    find_running_reductions,
    find_fourier_transforms,
)

__all__ = ["KINDS", "Context", "Emission", "Region"]
