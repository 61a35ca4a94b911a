"""Expert parallel: each device has some of the experts, and tokens go to the devices that have theirs.

Examples are divided over the expert axes as well, beside the data axes, so that what is no expert's is as under data
parallelism. Parameters with a matrix for each expert are divided by expert and never gathered: between the tokens of a
device and those of its experts all-to-alls move what a one-hot product dispatched (GShard, Lepikhin et al. 2020,
section 3.2). Where all experts see all tokens, these are gathered over the expert axes, and results added up.
"""

from collections.abc import Iterable
from dataclasses import replace

from ..errors import ShardError
from ..program.experts import find_experts
from ..program.ir import Value
from .layout import Axes, Experts, Layout
from .sides import take_sides


def expert_parallel(layout: Layout, axes: Axes) -> None:
    """Divide the experts over `axes`, with what the step's equations that work expert by expert make.

    Raises `ShardError` where no dimension counts experts, or where they do not divide.
    """
    found = find_experts(layout.dims, layout.storage, layout.flow, layout.roles)
    if not found.classes:
        raise ShardError(_no_experts(axes))
    _divide(layout, found.classes, axes)
    if found.shared:
        layout.batch = replace(layout.batch, classes=layout.batch.classes - found.shared)
        layout.storage = layout.dims.storage(layout.batch.classes | found.shared)
    stored = frozenset(
        sc for i in found.weights for sc in _counting(layout, layout.program.inputs[i], found.classes)
    )
    experts = Experts(axes, found.classes, found.places, found.shared, stored)
    layout.experts = take_sides(layout, experts)
    over = "+".join(axes)
    for i in layout.roles.stored:
        value = layout.program.inputs[i]
        if layout.fixed_by(value):
            continue
        spec = layout.in_use(value)
        d = next((d for d, has in enumerate(spec) if has == axes), None)
        if d is None:
            layout.why[i].append(f"ep: a copy on every device of {over}")
        else:
            layout.stored[layout.storage.of(value)[d]] = axes
            layout.why[i].append(f"ep: experts, dim {d} over {over}")


def _counting(layout: Layout, value: Value, classes: frozenset[int]) -> Iterable[int]:
    """The storage classes of the dimensions of a parameter that count experts."""
    pairs = zip(layout.storage.of(value), layout.dims.of(value), strict=True)
    return (sc for sc, c in pairs if c in classes)


def _divide(layout: Layout, classes: frozenset[int], axes: Axes) -> None:
    n, over = layout.count(axes), "+".join(axes)
    odd = sorted(z for c in classes for z in layout.dims.all_sizes[c] if z > 1 and z % n)
    if odd:
        fitting = [m for m in range(n - 1, 1, -1) if all(z % m == 0 for z in odd)]
        hint = f"{over}={fitting[0]} would divide" if fitting else "use dp or fsdp"
        raise ShardError(f"ep: {odd[0]} experts do not divide by {over}={n}; {hint}")


def _no_experts(axes: Axes) -> str:
    return (
        "ep found no experts: no dimension of a weight goes through its products beside the two of a matrix, with "
        f"top_k, argmax or softmax over it of what tokens choose; use dp, fsdp or tp ({'+'.join(axes)} as data)"
    )
