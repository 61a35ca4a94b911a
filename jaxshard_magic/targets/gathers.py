"""In which steps an array is gathered over mesh axes, or a sum scattered, so that nothing is sent twice.

On wrapped cubes (v4, v5p, tpu7x) the TPU's compiler makes one gather over all chips an all-reduce of zeros, which sends
twice the bytes; over a line or a plane of them it stays a gather. One reduce-scatter over more than a line is an
all-reduce on all slices. Which it does is asked of the compiler itself, with a small program for these devices, and its
answer kept where `compiled` keeps all of them.
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
from . import compiled, target_of

_ROWS, _COLUMNS = 128, 1024  # of bfloat16 on each device
# A TPU runs an all-reduce and the slice after it as one reduce-scatter, in a fusion of this name.
_HEAD_OR_SUM = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$| all-reduce(?:-start)?\(", re.MULTILINE)
_SCATTERS = "all-reduce-scatter"

Sizes = AbstractMesh | Mesh


def _makes_program() -> tuple[str, str] | None:
    """What decides how a question becomes a program: this file's text, as it was imported, and jax; None where the text
    can't be had."""
    try:
        return inspect.getsource(sys.modules[__name__]), jax.__version__
    except OSError:
        return None


_MAKES_PROGRAM = _makes_program()


@dataclass(frozen=True)
class Step:
    """One collective over `size` devices along `axes`: all of them, or those that are `apart` places from each to the
    next along the one axis."""

    axes: tuple[str, ...]
    size: int
    apart: int = 1

    def devices(self, mesh: Sizes) -> int:
        """How many lie along the axes."""
        return math.prod(mesh.shape[axis] for axis in self.axes)

    def groups(self, mesh: Sizes) -> list[list[int]] | None:
        """The places along the axes that go together; None where all do.

        >>> Step(("data",), 2, 4).groups(AbstractMesh((8,), ("data",)))
        [[0, 4], [1, 5], [2, 6], [3, 7]]
        """
        devices = self.devices(mesh)
        if self.size == devices:
            return None
        places = np.arange(devices).reshape(-1, self.size, self.apart)
        return places.swapaxes(1, 2).reshape(-1, self.size).tolist()


@dataclass(frozen=True)
class Way:
    """The `steps` of a gather, the devices that are nearest first; a sum is scattered in the reverse order. `reduced`:
    the compiler makes an all-reduce of it, and no steps are known that avoid that."""

    steps: tuple[Step, ...]
    reduced: bool = False


def gather(x: Any, dim: int, steps: Sequence[Step], mesh: Sizes) -> Any:
    """Inside a `shard_map`: the parts of dimension `dim`, which lie in order along the steps' axes, put together."""
    for step in steps:
        x = lax.all_gather(x, step.axes, axis=dim, axis_index_groups=step.groups(mesh), tiled=True)
    return x


def scatter(x: Any, dim: int, steps: Sequence[Step], mesh: Sizes) -> Any:
    """Inside a `shard_map`: the sum over the steps' axes, of which each device keeps its part of dimension `dim`.

    In the scatter itself that dimension is the first, in memory, too: along any other a TPU's compiler adds up arrays
    of some sizes whole.
    """
    if dim:
        x = with_layout_constraint(jnp.moveaxis(x, dim, 0), Layout(tuple(range(x.ndim))))
    for step in reversed(steps):
        x = lax.psum_scatter(x, step.axes, axis_index_groups=step.groups(mesh), tiled=True)
    return jnp.moveaxis(x, 0, dim)


@lru_cache(256)
def way(mesh: Sizes, axes: tuple[str, ...], *, scatters: bool = False) -> Way:
    """How arrays are gathered over `axes` together, or with `scatters` sums scattered: at once, unless the compiler for
    these devices makes that an all-reduce; then axis by axis, and an axis in two steps.

    Raises `ShardError` where the compiler of hardware that isn't attached can't be had.
    """
    once = Step(axes, math.prod(mesh.shape[axis] for axis in axes))
    if not isinstance(mesh, Mesh) or once.size == 1 or not _may_reduce(mesh, scatters):
        return Way((once,))
    if _stays(mesh, (once,), scatters):
        return Way((once,))
    if len(axes) > 1:
        ways = [way(mesh, (axis,), scatters=scatters) for axis in reversed(axes) if mesh.shape[axis] > 1]
        return Way(tuple(step for each in ways for step in each.steps), any(each.reduced for each in ways))
    found = next((steps for steps in _splits(mesh, *axes) if _stays(mesh, steps, scatters)), None)
    return Way((once,), reduced=True) if found is None else Way(found)


def chip_under(mesh: Sizes) -> Chip | None:
    """The kind of accelerator that a mesh is of, attached or not; None where that is not known."""
    if not isinstance(mesh, Mesh):
        return None
    target = target_of(mesh)
    return chip_of(mesh.devices.flat[0].device_kind) if target is None else target.chip


def _may_reduce(mesh: Mesh, scatters: bool) -> bool:
    """Are the devices of a kind on which an all-reduce was seen: chips in a torus, for gathers of three dimensions? It
    saves asking."""
    chip = chip_under(mesh)
    return chip is not None and chip.link.topology in (("torus2d", "torus3d") if scatters else ("torus3d",))


def _stays(mesh: Mesh, steps: tuple[Step, ...], scatters: bool) -> bool:
    """Does the compiler leave the steps of a gather, or of a sum that is scattered, what they are?"""
    client = mesh.devices.flat[0].client
    return _answer(_Question(mesh, steps, scatters, client, _groups_of_devices(mesh, steps)))


def _groups_of_devices(mesh: Mesh, steps: tuple[Step, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The ids of the devices that go together in each step, in their order along its axes."""
    found, ids = [], np.array([device.id for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    for step in steps:
        along = [mesh.axis_names.index(axis) for axis in step.axes]
        together = np.moveaxis(ids, along, range(-len(along), 0)).reshape(-1, step.devices(mesh))
        if (groups := step.groups(mesh)) is not None:
            together = together[:, np.array(groups)].reshape(-1, step.size)
        found.append(tuple(sorted(map(tuple, together.tolist()))))
    return tuple(found)


@dataclass(frozen=True)
class _Question:
    """Whether the compiler leaves `steps` on a mesh what they are: one question for all meshes on which the same
    devices go together, whatever their axes are called. A search asks it of every mesh of a slice."""

    mesh: Mesh = field(compare=False)
    steps: tuple[Step, ...] = field(compare=False)
    scatters: bool
    client: Any  # of the devices, whose ids are those of other clients' too
    groups: tuple[tuple[tuple[int, ...], ...], ...]


@lru_cache(1024)
def _answer(question: _Question) -> bool:
    """Ask the compiler, in a thread of its own: jax keeps what it is tracing, such as the step that asks, by thread."""
    wanted = copy_context()
    with ThreadPoolExecutor(1) as alone:
        text = alone.submit(wanted.run, _compiled_text, question).result()
    inside = ""
    for found in _HEAD_OR_SUM.finditer(text):
        inside = found[1] or inside
        if found[1] is None and not inside.startswith(_SCATTERS):
            return False
    return True


def _compiled_text(question: _Question) -> str:
    """A program of the steps alone, as the compiler for the devices of the mesh makes it."""
    mesh = question.mesh
    target = target_of(mesh)
    if target is None:
        return _program(question).compile().as_text() or ""
    # A search asks some hundred of these, and to trace one takes longer than to read what was said of it: kept by the
    # question, and by what makes the program of it.
    asked = repr((_MAKES_PROGRAM, question.scatters, question.groups))
    key = kept.key_of(asked.encode(), target.topology(), (), False)
    if _MAKES_PROGRAM is None or (built := kept.get(key)) is None:
        # as text: what says from where it was traced would make each another program
        program = _program(question).as_text().encode()
        built = compiled(target, program, [device.id for device in mesh.devices.flat])
        kept.put(key, built)
    return built.text


def _program(question: _Question) -> jax.stages.Lowered:
    """The steps on an array of each device's own."""
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


def _splits(mesh: Mesh, axis: str) -> Iterator[tuple[Step, Step]]:
    """An axis in two steps: near devices, then far ones. First where both go over whole dimensions of the torus, and
    of those where the second one, which moves nearly all, has the most devices and so the most links."""
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])[0]
    places = np.array([(*d.coords, d.core_on_chip) if hasattr(d, "coords") else (d.id,) for d in devices])
    count = len(devices)

    def torn(near: int) -> bool:
        return not (_whole(places[:near], places) and _whole(places[::near], places))

    for near in sorted((n for n in range(2, count // 2 + 1) if count % n == 0), key=lambda n: (torn(n), n)):
        yield Step((axis,), near), Step((axis,), count // near, near)


def _whole(some: np.ndarray, places: np.ndarray) -> bool:
    """Do some of the places fill whole dimensions of those that all of them fill?"""
    filled, there = ([len(set(column)) for column in which.T.tolist()] for which in (some, places))
    return math.prod(filled) == len(some) and all(
        n in (1, most) for n, most in zip(filled, there, strict=True)
    )
