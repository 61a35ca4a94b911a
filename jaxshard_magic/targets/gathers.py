"""Plan gathers and reduce-scatters as steps over mesh axes, so that the compiler sends nothing twice.

On wrapped cubes (v4, v5p, tpu7x) the TPU compiler makes one gather over all chips an all-reduce of zeros, which sends
twice the bytes; over a line or a plane of chips it remains a gather. On all slices, one reduce-scatter over more than
a line becomes an all-reduce. The compiler itself is asked, with a small program for these devices, and its answer is
cached like all compiled programs.
"""

import inspect
import math
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..hardware import Chip, chip_of
from . import cache as kept
from . import compile_for_target, target_of

_ROWS, _COLUMNS = 128, 1024  # shape of a probe's array on each device, in bfloat16
# In HLO text: the head of a computation, with its name, or an all-reduce.
_HEAD_OR_SUM = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$| all-reduce(?:-start)?\(", re.MULTILINE)
# A TPU runs an all-reduce and the slice after it as one reduce-scatter, in a fusion of this name.
_SCATTERS = "all-reduce-scatter"

Sizes = AbstractMesh | Mesh


def _makes_program() -> tuple[str, str] | None:
    """Return what determines the program of a probe: the text of this file at import, and jax's version; None without
    the text."""
    try:
        return inspect.getsource(sys.modules[__name__]), jax.__version__
    except OSError:
        return None


_MAKES_PROGRAM = _makes_program()


@dataclass(frozen=True)
class CollectiveStep:
    """Collective over groups of devices along mesh axes.

    Attributes:
        axes: Mesh axes.
        size: Devices in a group: all along the axes, or a part of a single axis.
        stride: Distance along the single axis between neighbours in a group.
    """

    axes: tuple[str, ...]
    size: int
    stride: int = 1

    def devices(self, mesh: Sizes) -> int:
        """Return the number of devices along the axes."""
        return math.prod(mesh.shape[axis] for axis in self.axes)

    def groups(self, mesh: Sizes) -> list[list[int]] | None:
        """Return the groups, as positions along the axes; None for one group of all.

        >>> CollectiveStep(("data",), 2, 4).groups(AbstractMesh((8,), ("data",)))
        [[0, 4], [1, 5], [2, 6], [3, 7]]
        """
        devices = self.devices(mesh)
        if self.size == devices:
            return None
        places = np.arange(devices).reshape(-1, self.size, self.stride)
        return places.swapaxes(1, 2).reshape(-1, self.size).tolist()


@dataclass(frozen=True)
class GatherPlan:
    """Steps of a gather, or of a reduce-scatter, which takes them in reverse.

    Attributes:
        steps: Collectives, nearest devices first.
        is_all_reduce: Whether the compiler makes an all-reduce of it, and no steps are known to avoid that.
    """

    steps: tuple[CollectiveStep, ...]
    is_all_reduce: bool = False


def gather(x: Any, dim: int, steps: Sequence[CollectiveStep], mesh: Sizes) -> Any:
    """Gather dimension `dim` inside a `shard_map`.

    Args:
        x: Shard of this device; shards are in the order of the steps' axes.
        dim: Dimension to gather.
        steps: Collectives in order.
        mesh: Mesh of the `shard_map`.
    """
    for step in steps:
        x = lax.all_gather(x, step.axes, axis=dim, axis_index_groups=step.groups(mesh), tiled=True)
    return x


def scatter(x: Any, dim: int, steps: Sequence[CollectiveStep], mesh: Sizes) -> Any:
    """Reduce-scatter inside a `shard_map`: sum over the steps' axes and keep one shard of dimension `dim`.

    Args:
        x: Addend of this device.
        dim: Dimension to scatter.
        steps: Collectives as for `gather`; taken in reverse.
        mesh: Mesh of the `shard_map`.
    """
    # The scattered dimension must be the first, in memory as well: along any other, the TPU compiler sums arrays of
    # some sizes in full.
    if dim:
        x = with_layout_constraint(jnp.moveaxis(x, dim, 0), Layout(tuple(range(x.ndim))))
    for step in reversed(steps):
        x = lax.psum_scatter(x, step.axes, axis_index_groups=step.groups(mesh), tiled=True)
    return jnp.moveaxis(x, 0, dim)


@lru_cache(256)
def plan_gather(mesh: Sizes, axes: tuple[str, ...], *, scatters: bool = False) -> GatherPlan:
    """Return the steps that gather arrays over several axes, or that scatter sums.

    A single collective, unless the compiler for these devices makes an all-reduce of it; then one axis at a time, and
    an axis in two steps.

    Args:
        mesh: Mesh; without devices, a single collective is assumed to do.
        axes: Mesh axes to gather over.
        scatters: Whether to plan a reduce-scatter.

    Raises:
        ShardError: The compiler of hardware that isn't attached is missing.
    """
    once = CollectiveStep(axes, math.prod(mesh.shape[axis] for axis in axes))
    if not isinstance(mesh, Mesh) or once.size == 1 or not _may_reduce(mesh, scatters):
        return GatherPlan((once,))
    if _stays(mesh, (once,), scatters):
        return GatherPlan((once,))
    if len(axes) > 1:
        ways = [plan_gather(mesh, (axis,), scatters=scatters) for axis in reversed(axes) if mesh.shape[axis] > 1]
        return GatherPlan(tuple(step for each in ways for step in each.steps), any(each.is_all_reduce for each in ways))
    found = next((steps for steps in _splits(mesh, *axes) if _stays(mesh, steps, scatters)), None)
    return GatherPlan((once,), is_all_reduce=True) if found is None else GatherPlan(found)


def chip_under(mesh: Sizes) -> Chip | None:
    """Return the kind of accelerator of a mesh, attached or not; None if it is not known."""
    if not isinstance(mesh, Mesh):
        return None
    target = target_of(mesh)
    return chip_of(mesh.devices.flat[0].device_kind) if target is None else target.chip


def _may_reduce(mesh: Mesh, scatters: bool) -> bool:
    """Return whether all-reduces are known on this kind of device: chips in a torus, of three dimensions for
    gathers."""
    # Saves a probe on all other devices.
    chip = chip_under(mesh)
    return chip is not None and chip.link.topology in (("torus2d", "torus3d") if scatters else ("torus3d",))


def _stays(mesh: Mesh, steps: tuple[CollectiveStep, ...], scatters: bool) -> bool:
    """Return whether the compiler leaves the steps as they are."""
    client = mesh.devices.flat[0].client
    return _answer(_Probe(mesh, steps, scatters, client, _groups_of_devices(mesh, steps)))


def _groups_of_devices(mesh: Mesh, steps: tuple[CollectiveStep, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return, for each step, the ids of the devices in each group, in their order along the step's axes."""
    found, ids = [], np.array([device.id for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    for step in steps:
        along = [mesh.axis_names.index(axis) for axis in step.axes]
        together = np.moveaxis(ids, along, range(-len(along), 0)).reshape(-1, step.devices(mesh))
        if (groups := step.groups(mesh)) is not None:
            together = together[:, np.array(groups)].reshape(-1, step.size)
        found.append(tuple(sorted(map(tuple, together.tolist()))))
    return tuple(found)


@dataclass(frozen=True)
class _Probe:
    """Probe whether the compiler leaves steps as they are.

    Probes are equal for all meshes with the same groups of devices, whatever the axes' names: a search probes every
    mesh of a slice.

    Attributes:
        mesh: Mesh of the first probe; not compared.
        steps: Collectives; not compared.
        scatters: Whether the steps are of a reduce-scatter.
        client: JAX client of the devices; other clients have the same ids.
        groups: Ids of the devices in each group of each step.
    """

    mesh: Mesh = field(compare=False)
    steps: tuple[CollectiveStep, ...] = field(compare=False)
    scatters: bool
    client: Any
    groups: tuple[tuple[tuple[int, ...], ...], ...]


@lru_cache(1024)
def _answer(question: _Probe) -> bool:
    """Compile a probe, and return whether no all-reduce is in it except fused reduce-scatters."""
    wanted = copy_context()
    # JAX has the state of a trace per thread, and this thread may be tracing the user's step.
    with ThreadPoolExecutor(1) as alone:
        text = alone.submit(wanted.run, _compiled_text, question).result()
    inside = ""
    for found in _HEAD_OR_SUM.finditer(text):
        inside = found[1] or inside
        if found[1] is None and not inside.startswith(_SCATTERS):
            return False
    return True


def _compiled_text(question: _Probe) -> str:
    """Return the compiled HLO of a probe."""
    mesh = question.mesh
    target = target_of(mesh)
    if target is None:
        return _program(question).compile().as_text() or ""
    # A search makes about a hundred probes, and tracing one takes longer than reading a cached answer. So the cache key
    # is the question with what determines its program, not the program.
    asked = repr((_MAKES_PROGRAM, question.scatters, question.groups))
    key = kept.key_of(asked.encode(), target.topology(), (), False)
    if _MAKES_PROGRAM is None or (built := kept.get(key)) is None:
        # Text without source locations: they would make the program different for each caller.
        program = _program(question).as_text().encode()
        built = compile_for_target(target, program, [device.id for device in mesh.devices.flat])
        kept.put(key, built)
    return built.text


def _program(question: _Probe) -> jax.stages.Lowered:
    """Lower a probe: the steps on an array with 128 rows on each device."""
    mesh, steps, scatters = question.mesh, question.steps, question.scatters
    axes = tuple(axis for axis in mesh.axis_names if any(axis in step.axes for step in steps))
    size = math.prod(mesh.shape[axis] for axis in axes)
    whole, parts = PartitionSpec(), PartitionSpec(axes)
    probe = jax.jit(
        jax.shard_map(
            lambda x: (scatter if scatters else gather)(x, 0, steps, mesh),
            mesh=mesh,
            in_specs=whole if scatters else parts,
            out_specs=parts if scatters else whole,
            check_vma=False,
        ),
        in_shardings=NamedSharding(mesh, whole if scatters else parts),
    )
    return probe.lower(jax.ShapeDtypeStruct((size * _ROWS, _COLUMNS), jnp.bfloat16))


def _splits(mesh: Mesh, axis: str) -> Iterator[tuple[CollectiveStep, CollectiveStep]]:
    """Yield ways to split an axis into two steps, near devices and then far ones.

    Pairs that both cover whole dimensions of the torus come first, and of those the pairs with most devices in the
    second step, which moves nearly all of the bytes and so should use the most links.
    """
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])[0]
    places = np.array([(*d.coords, d.core_on_chip) if hasattr(d, "coords") else (d.id,) for d in devices])
    count = len(devices)

    def torn(near: int) -> bool:
        return not (_whole(places[:near], places) and _whole(places[::near], places))

    for near in sorted((n for n in range(2, count // 2 + 1) if count % n == 0), key=lambda n: (torn(n), n)):
        yield CollectiveStep((axis,), near), CollectiveStep((axis,), count // near, near)


def _whole(some: np.ndarray, places: np.ndarray) -> bool:
    """Return whether some positions fill whole dimensions of the box that all positions fill."""
    filled, there = ([len(set(column)) for column in which.T.tolist()] for which in (some, places))
    return math.prod(filled) == len(some) and all(n in (1, most) for n, most in zip(filled, there, strict=True))
