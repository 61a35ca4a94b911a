"""Weights gathered, and gradients scattered, in the steps that the compiler of the devices leaves what they are.

A step is left to the compiler wherever it does as it is told: only where one of the axes takes more than one step is it
written out, in a `shard_map`.
"""

from collections.abc import Iterator
from typing import Any

import jax

from ..plan import Finding, Sent
from ..program.ir import Value
from ..targets.gathers import Way, chip_under, gather, way
from .layout import Axes, Layout, partition_spec, without


def in_steps(layout: Layout, axes: Axes) -> bool:
    """Does the compiler make one gather over these axes together an all-reduce, and is there a way in steps?"""
    return len(way(layout.mesh, axes).steps) > 1


def gathered(layout: Layout, x: Any, weight: Value) -> Any | None:
    """A weight at rest, gathered over the axes that do not divide it in use, in steps; None where that takes none."""
    ways = _ways(layout, weight)
    if not any(len(each.steps) > 1 for each in ways.values()):
        return None
    rest = layout.at_rest(weight)

    def on_device(part: Any) -> Any:
        for dim, each in ways.items():
            part = gather(part, dim, each.steps, layout.mesh)
        return part

    return jax.shard_map(
        on_device,
        mesh=layout.mesh,
        in_specs=partition_spec(rest),
        out_specs=partition_spec(without(rest, layout.gathered_over(weight))),
        check_vma=False,
    )(x)


def gathers_sent(layout: Layout, weight: Value, trips: int, *, narrowed: bool = False) -> Iterator[Sent]:
    """The collectives that bring a weight from where it rests to where it is used, `trips` times; `narrowed`: in half
    of its bytes."""
    over = layout.gathered_over(weight)
    if not over:
        return
    size = layout.moving(weight, layout.in_use(weight)) // (2 if narrowed else 1)
    ways = _ways(layout, weight)
    if all(len(each.steps) == 1 and not each.reduced for each in ways.values()):
        yield Sent("all-gather", over, layout.count(over), size, trips)
        return
    size //= layout.count(over)
    for each in ways.values():
        for step in each.steps:
            size *= step.size
            kind = "all-reduce" if each.reduced else "all-gather"
            yield Sent(kind, step.axes, step.size, size, trips, step.apart)


def sent_in_pieces(layout: Layout, axes: Axes, rows: int, dtype: Any) -> bool:
    """Does a TPU's compiler make a sum over `axes` piece by piece, each sent on while the next is multiplied? It does
    where a product of `rows` on each device takes longer than to send a piece over one link: seen on v5e:4x4 above 256
    rows of bfloat16 (273 by this), v5e:2x4 above 512, v6e:4x4 above 512, v5p:2x2x4 above 256.
    """
    chip = chip_under(layout.mesh)
    if chip is None or chip.kind != "tpu" or not chip.link.bandwidth:
        return False
    multiplied = 2 * rows / (chip.peak(str(dtype)) or float("inf"))
    return multiplied > dtype.itemsize / layout.count(axes) / chip.link.bandwidth


def scatters_sent(
    layout: Layout, axes: Axes, size: int, trips: int, *, by_hand: bool, pieces: bool
) -> Iterator[Sent]:
    """The collectives that scatter a sum of `size` bytes over `axes`, `by_hand` or as the compiler does, which may send
    it in `pieces`."""
    each = way(layout.mesh, axes, scatters=by_hand)
    # XLA for the CPU adds up all by itself, then slices
    alone = not by_hand and (layout.simulated or len(each.steps) > 1)
    if not by_hand and not alone and not pieces:
        alone = len(way(layout.mesh, axes, scatters=True).steps) > 1
    if alone or each.reduced:
        yield Sent("all-reduce", axes, layout.count(axes), size, trips)
        return
    for step in reversed(each.steps):
        yield Sent("reduce-scatter", step.axes, step.size, size, trips, step.apart)
        size //= step.size


def about_steps(layout: Layout) -> Iterator[Finding]:
    """What the user should know of the ways in which parameters are gathered, one finding for each set of axes."""
    ways = dict.fromkeys(each for value in sorted(layout.state) for each in _ways(layout, value).values())
    for each in ways:
        over = tuple(dict.fromkeys(axis for step in reversed(each.steps) for axis in step.axes))
        devices = f"{'+'.join(over)}={layout.count(over)}"
        makes = f"the compiler makes one gather over {devices} of this slice an all-reduce, which sends twice the bytes"
        if len(each.steps) > 1:
            sizes = " and of ".join(str(step.size) for step in each.steps)
            message = f"weights are gathered in steps of {sizes} devices: {makes}"
            yield Finding("gathered-in-steps", "info", message)
        elif each.reduced:
            yield Finding("gathers-reduced", "warning", f"{makes}, and no steps are known that avoid it")


def _ways(layout: Layout, weight: Value) -> dict[int, Way]:
    """How each dimension of a weight is gathered that is at rest divided over more than in use. Empty where axes that
    stay divide what those that go do."""
    rest, gone = layout.at_rest(weight), set(layout.gathered_over(weight))
    ways: dict[int, Way] = {}
    for dim, has in enumerate(rest):
        over = tuple(axis for axis in has if axis in gone)
        if over and has[-len(over) :] != over:
            return {}
        if over:
            ways[dim] = way(layout.mesh, over)
    return ways
