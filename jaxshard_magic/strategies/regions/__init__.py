"""What a step emits in another way than equation by equation: one kind of region a file, and the list of them."""

from collections.abc import Callable

from .ahead import gathered_ahead
from .dealt import dealt_once
from .grouped import grouped
from .own_experts import own_experts
from .partials import partial_sums
from .region import Context, Emission, Region
from .ring import ring_attention
from .running import running
from .scattered import scattered
from .sorted_rows import sorted_rows
from .sum_types import typed_sums
from .transforms import transforms
from .unreduced import unreduced

# From the outside in: of an equation that is a member of several, the first is asked first.
KINDS: tuple[Callable[[Context], Region], ...] = (
    dealt_once,
    gathered_ahead,
    sorted_rows,
    own_experts,
    unreduced,
    partial_sums,
    scattered,
    typed_sums,
    grouped,
    ring_attention,
    running,
    transforms,
)

__all__ = ["KINDS", "Context", "Emission", "Region"]
