"""Fully sharded data parallel: parameters, moments and gradients divided over the data axes, gathered for use.

ZeRO stage 3 (Rajbhandari et al. 2020, section 5), with the dimension chosen per leaf.
"""

import math

from ..program.ir import Value
from .layout import Axes, Layout

SMALL = 2**14  # elements that are gathered at once: below, a gather costs more than the copy


def is_small(elements: int) -> bool:
    """Return whether an array of so many elements is left whole on every device."""
    return elements < SMALL


def fully_sharded(layout: Layout, axes: Axes) -> None:
    """Divide the largest dimension that divides and that tensor parallelism did not take; where it took the only
    one, share it in the order (tensor, data)."""
    for i in layout.roles.stored:
        value = layout.program.inputs[i]
        if layout.fixed_by(value):
            continue
        spec = layout.at_rest(value)
        taken = next((d for d, has in enumerate(spec) if set(axes) & set(has)), None)
        if taken is not None:
            layout.why[i].append(f"fsdp: dim {taken} over {'+'.join(axes)}")
        elif is_small(_gathered_at_once(layout, value)):
            layout.why[i].append("fsdp: too small to be worth a gather")
        elif (d := _dimension(layout, value, axes)) is not None:
            c = layout.storage.of(value)[d]
            layout.stored[c] = (*layout.stored.get(c, ()), *axes)
            layout.why[i].append(f"fsdp: dim {d} over {'+'.join(axes)}")
        else:
            _say_lost(layout, i, value, axes)


def _gathered_at_once(layout: Layout, value: Value) -> int:
    """Elements: of what a loop steps over, those of one trip."""
    sizes = zip(layout.storage.of(value), layout.program.shapes[value], strict=True)
    return math.prod(size for c, size in sizes if c not in layout.storage.looped)


def _dimension(layout: Layout, value: Value, axes: Axes) -> int | None:
    storage, shape, n = layout.storage, layout.program.shapes[value], layout.count(axes)
    classes = storage.of(value)

    def divides(d: int) -> bool:
        c = classes[d]
        parts = n * layout.count(layout.stored.get(c, ()))
        fits = all(z % parts == 0 for z in storage.sizes[c])
        return fits and not any(
            c in among for among in (storage.looped, storage.windowed, storage.unshardable)
        )

    free = [d for d, c in enumerate(classes) if divides(d) and c not in layout.stored]
    usable = free or [d for d in range(len(classes)) if divides(d)]
    return max(usable, key=lambda d: (shape[d], -d), default=None)


def _say_lost(layout: Layout, i: int, value: Value, axes: Axes) -> None:
    shape, n = layout.program.shapes[value], layout.count(axes)
    layout.wanted[i] += axes
    sizes = " x ".join(map(str, shape))
    layout.why[i].append(f"fsdp: no dimension of {sizes} divides by {'+'.join(axes)}={n}")
