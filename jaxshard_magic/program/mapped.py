"""A step written for one device of many: what each device takes of a call, and the step traced as one of them."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.core import extend_axis_env_nd  # binds the names of axes while a step is traced; no public form
from jax.extend.core import jaxpr_as_fun

from .flow import Flow
from .ir import Program
from .peel import Result
from .roles import Roles, find_roles
from .thread_state import Entered
from .trace import Traced

_WHOLE = object()  # None is no leaf of a tree
Name = Hashable  # of an axis, as the step has it in jax.lax.pmean(x, name)


@dataclass(frozen=True)
class Cut:
    """A device's part of an array: of dimension `dim`; with `device_axis` that is a place for each device, and the part
    does not have it."""

    dim: int
    device_axis: bool

    def of(self, shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
        """The shape of a part."""
        part = () if self.device_axis else (shape[self.dim] // devices,)
        return (*shape[: self.dim], *part, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class Mapped:
    """How a call is spread over the devices of a mesh.

    `axes`: for each axis name that the step uses, the mesh axes it stands for; `sizes`: how many devices are along it.
    `over`: the names that arrays are cut along. `cuts`: of every flat input, None where all devices take the whole.
    `out_axes`: with a device axis, where the results have it, as a prefix of their tree; `device_axis` False: they
    have none.
    """

    axes: Mapping[Name, tuple[str, ...]]
    sizes: Mapping[Name, int]
    over: tuple[Name, ...]
    cuts: tuple[Cut | None, ...]
    device_axis: bool
    out_axes: Any = 0

    @property
    def devices(self) -> int:
        """Into how many parts arrays are cut."""
        return prod(self.sizes[name] for name in self.over)

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes that arrays are cut over."""
        return tuple(a for name in self.over for a in self.axes[name])

    def parts(self, avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """What one device takes of the flat inputs."""
        return [
            aval
            if cut is None
            else jax.ShapeDtypeStruct(cut.of(aval.shape, self.devices), aval.dtype, weak_type=aval.weak_type)
            for aval, cut in zip(avals, self.cuts, strict=True)
        ]

    def traced(self, traced: Traced, result: Result) -> "PerDevice":
        """The step, traced with `bound` names on the `parts`, with what is known of the call."""
        kept = {f.name: getattr(traced, f.name) for f in fields(traced)}
        return PerDevice(**kept, mapped=self, result=result)


@dataclass(frozen=True)
class PerDevice(Traced):
    """A step traced as what one device does of it."""

    mapped: Mapped
    result: Result

    @property
    def cuts(self) -> tuple[Cut | None, ...]:
        """Those of the trace's inputs: all devices have the whole of what the step closes over."""
        return (*(None for _ in self.consts), *self.mapped.cuts)

    @cached_property
    def program(self) -> Program:
        return Program(self.closed)

    @cached_property
    def flow(self) -> Flow:
        return Flow(self.program)

    @cached_property
    def roles(self) -> Roles:
        return find_roles(self, self.flow)

    def like(self, traced: Traced) -> "PerDevice":
        """Another step of the same inputs and outputs, its own constants first, spread as this one."""
        return self.mapped.traced(traced, self.result)

    def whole(self, i: int) -> tuple[int, ...]:
        """The shape of the i-th input on all devices together."""
        return self.joined(self.closed.in_avals[i].shape, self.cuts[i])

    def joined(self, part: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
        """The shape of an array of which every device has a part of this shape."""
        if cut is None:
            return tuple(part)
        size = self.mapped.devices * (1 if cut.device_axis else part[cut.dim])
        return (*part[: cut.dim], size, *part[cut.dim + (not cut.device_axis) :])

    @cached_property
    def stacked(self) -> tuple[Cut | None, ...]:
        """Of results with a device axis: where each has it."""
        tree = self.result.tree
        axes = by_leaf(self.mapped.out_axes, tree.unflatten(range(tree.num_leaves)))
        kinds = (kind for kind, _ in self.result.leaves)
        returned = [a for a, kind in zip(axes, kinds, strict=True) if kind == "out"]
        ranks = [len(aval.shape) + 1 for aval in self.closed.out_avals]
        constants = set(self.in_paths[: len(self.consts)])
        written_back = self.out_paths[len(returned) :]
        rest = (None if path in constants else 0 for path in written_back)
        return tuple(
            None if a is None else Cut(a % rank, True)
            for a, rank in zip([*returned, *rest], ranks, strict=True)
        )

    def on_one(
        self, fun: Callable[..., Sequence[Any]], shapes: Sequence[tuple[int, ...]]
    ) -> Callable[..., list]:
        """`fun`, what one device does, for all of them at once and on one: under `jax.vmap` with the axis names.

        It takes whole flat inputs; its results are put together to `shapes`.
        """
        mapped = self.mapped
        cut_in = [cut is not None for cut in mapped.cuts]

        def every(*leaves):
            parts = [_parts(x, cut, mapped) for x, cut in zip(leaves, mapped.cuts, strict=True)]
            outs = _vmapped(fun, cut_in, mapped)(*parts)
            cuts = self.stacked[: len(shapes)] if mapped.device_axis else [None] * len(shapes)
            return [_together(x, cut, s, mapped) for x, cut, s in zip(outs, cuts, shapes, strict=True)]

        return every

    def together(self, shapes: Sequence[tuple[int, ...]]) -> Traced:
        """The step as one device has it for all of them: whole inputs, and the first results put together to
        `shapes`."""
        step, first = jaxpr_as_fun(self.closed), len(self.consts)

        def every(*inputs):
            consts, leaves = inputs[:first], inputs[first:]
            return self.on_one(lambda *parts: step(*consts, *parts)[: len(shapes)], shapes)(*leaves)

        avals = enumerate(self.closed.in_avals)
        closed = jax.make_jaxpr(every)(*(jax.ShapeDtypeStruct(self.whole(i), a.dtype) for i, a in avals))
        return Traced(closed, self.in_paths, self.out_paths[: len(shapes)], self.consts)


def by_leaf(axes: Any, tree: Any) -> list[int | None]:
    """The axis of each leaf of `tree`; `axes` is a prefix of it in which None says that there is none.

    >>> by_leaf((0, None), ({"w": 1, "b": 2}, 3))
    [0, 0, None]
    """
    prefix = jax.tree.map(lambda a: _WHOLE if a is None else a, axes, is_leaf=lambda a: a is None)
    return [None if a is _WHOLE else a for a in jax.tree.leaves(jax.tree.broadcast(prefix, tree))]


def on_a_device(mapped: Mapped | None) -> AbstractContextManager[Any]:
    """What one device does is traced in here: with its axis names bound and without a mesh, also where the user has
    set one. None: of a step that is written for whole arrays; nothing changes."""
    if mapped is None:
        return nullcontext()
    no_mesh = jax.sharding.AbstractMesh((), ())
    return Entered(
        partial(jax.sharding.use_abstract_mesh, no_mesh),
        partial(extend_axis_env_nd, list(mapped.sizes.items())),
    )


def _parts(x: Any, cut: Cut | None, mapped: Mapped) -> Any:
    """The parts of an array along leading dimensions, one for each name that arrays are cut along."""
    if cut is None:
        return x
    sizes = tuple(mapped.sizes[name] for name in mapped.over)
    if not cut.device_axis:
        part = x.shape[cut.dim] // mapped.devices
        x = x.reshape(*x.shape[: cut.dim], mapped.devices, part, *x.shape[cut.dim + 1 :])
    x = jnp.moveaxis(x, cut.dim, 0)
    return x.reshape(*sizes, *x.shape[1:])


def _vmapped(fun: Callable[..., Any], cut: Sequence[bool], mapped: Mapped) -> Callable[..., Any]:
    """Results have a leading dimension for each name: those that arrays are cut along first, the others after."""
    others = [name for name in mapped.axes if name not in mapped.over]
    for name, cuts in (*((n, False) for n in reversed(others)), *((n, True) for n in reversed(mapped.over))):
        fun = _over(fun, [0 if cuts and c else None for c in cut], name, mapped.sizes[name])
    return fun


def _over(fun: Callable[..., Any], axes: Sequence[int | None], name: Name, size: int) -> Callable[..., Any]:
    """jax wants one argument at least that is mapped."""
    each = jax.vmap(lambda _, *xs: fun(*xs), (0, *axes), axis_name=name)
    return lambda *xs: each(jnp.arange(size), *xs)


def _together(x: Any, cut: Cut | None, shape: tuple[int, ...], mapped: Mapped) -> Any:
    """What each device gave, as one array of `shape`; along other axes all give the same."""
    part = x.shape[len(mapped.axes) :]
    x = x.reshape(mapped.devices, prod(mapped.sizes.values()) // mapped.devices, *part)[:, 0]
    if cut is not None:
        return jnp.moveaxis(x, 0, cut.dim)
    dim = next((d for d, (a, b) in enumerate(zip(part, shape, strict=True)) if a != b), None)
    return x[0] if dim is None else jnp.moveaxis(x, 0, dim).reshape(shape)
