"""Fully sharded data parallel: parameters, moments and gradients sharded over the data axes, weights gathered for use.

ZeRO stage 3 (Rajbhandari et al. 2020, section 5), with the dimension chosen per leaf.
"""

import math

from ..program.ir import Value
from .layout import Axes, Layout

MIN_GATHERED_ELEMENTS = 2**14  # elements gathered at once: below, a gather costs more than a copy on every device


def is_small(elements: int) -> bool:
    """Return whether an array with this many elements is left whole on every device."""
    return elements < MIN_GATHERED_ELEMENTS


def fully_sharded(layout: Layout, axes: Axes) -> None:
    """Shard the largest divisible dimension of each leaf that tensor parallelism left free.

    Where tensor parallelism took the only divisible dimension, share it in the order (tensor, data).
    """
    for i in layout.roles.storage_order:
        value = layout.program.inputs[i]
        if layout.placement_source(value):
            continue
        spec = layout.stored_spec(value)
        sharded_dim = next((d for d, has in enumerate(spec) if set(axes) & set(has)), None)
        if sharded_dim is not None:
            layout.reasons[i].append(f"fsdp: dim {sharded_dim} over {'+'.join(axes)}")
        elif is_small(_elements_gathered_at_once(layout, value)):
            layout.reasons[i].append("fsdp: too small to be worth a gather")
        elif (d := _dim_to_shard(layout, value, axes)) is not None:
            c = layout.storage.classes_of(value)[d]
            layout.storage_class_axes[c] = (*layout.storage_class_axes.get(c, ()), *axes)
            layout.reasons[i].append(f"fsdp: dim {d} over {'+'.join(axes)}")
        else:
            _record_unsharded(layout, i, value, axes)


def _elements_gathered_at_once(layout: Layout, value: Value) -> int:
    """Return the elements gathered at once: for stacked weights of a loop, the elements of one trip."""
    sizes = zip(layout.storage.classes_of(value), layout.program.shapes[value], strict=True)
    return math.prod(size for c, size in sizes if c not in layout.storage.scanned)


def _dim_to_shard(layout: Layout, value: Value, axes: Axes) -> int | None:
    storage, shape, n = layout.storage, layout.program.shapes[value], layout.device_count(axes)
    classes = storage.classes_of(value)

    def divides(d: int) -> bool:
        c = classes[d]
        parts = n * layout.device_count(layout.storage_class_axes.get(c, ()))
        # All arrays of a storage class are sharded alike, so that the axes must divide every size in it.
        fits = all(z % parts == 0 for z in storage.sizes[c])
        return fits and not any(c in among for among in (storage.scanned, storage.windowed, storage.unshardable))

    free = [d for d, c in enumerate(classes) if divides(d) and c not in layout.storage_class_axes]
    # A dimension shared with tensor parallelism is the last choice. The data axes are the minor ones there, so that
    # gathering over them leaves each device its part of the tensor shard.
    usable = free or [d for d in range(len(classes)) if divides(d)]
    return max(usable, key=lambda d: (shape[d], -d), default=None)


def _record_unsharded(layout: Layout, i: int, value: Value, axes: Axes) -> None:
    shape, n = layout.program.shapes[value], layout.device_count(axes)
    layout.unsharded_axes[i] += axes
    sizes = " x ".join(map(str, shape))
    layout.reasons[i].append(f"fsdp: no dimension of {sizes} divides by {'+'.join(axes)}={n}")
