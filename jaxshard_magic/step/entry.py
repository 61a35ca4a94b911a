"""`Entry`: one compiled program of a step, for one set of shapes and held values."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..gradients.rewrite import Rewritten
from ..placing import from_rows, hosts_of, is_part, own_copy, put
from ..plan import Plan
from ..program import settings
from ..program.batching.padding import padded
from ..program.peel import Peeled, Result
from ..program.routing import Route
from ..program.trace import Traced, path_name
from ..temporary import within
from .clock import Clock
from .donation import Ours
from .load import Counted
from .sign import sign_of


@dataclass(eq=False)
class Entry:
    """One program of a step: traced, planned and compiled.

    It is called as `call(consts, args, kwargs)` with the user's own trees where `whole`, else as
    `call(consts, kept, given)` with the flat inputs, those of `donated` in `given`. `clock` measures its calls, but for
    the very first.
    """

    traced: Traced
    plan: Plan
    compiled: Any
    result: Result
    tree: Any  # the PyTreeDef of (args, kwargs)
    call: Any  # the function, None where the devices aren't attached
    whole: bool
    consts: list[Any]
    shardings: list[NamedSharding]
    donated: tuple[int, ...]
    trace_s: float
    compile_s: float | None  # None where the compiler failed
    reads: tuple[bool, ...]  # whether the program reads each of its arguments: jax drops the others
    home: str | None = None  # the file that defines the step, as Python knows it
    complaints: tuple[str, ...] = ()  # what the compiler wrote in its log
    call_of: Peeled | None = None  # the call that it was made for, with shapes for arrays
    rewritten: Rewritten | None = None  # how its gradient calls were
    planned: "Entry | None" = None  # its plan alone, where that was told while the compiler worked
    rows: Mapping[int, int] = field(
        default_factory=dict
    )  # the dimension of flat inputs that hosts have in parts
    peaks: tuple[int | None, ...] = ()  # bytes that the devices had held at most before it first ran
    load: Mapping[Route, Counted] | None = None  # the rows of experts, where they were counted
    calls: int = 0
    clock: Clock = field(default_factory=lambda: Clock(first=2))
    _sign_of: Callable[[Any], Any] | None = None
    _lock: Any = field(
        default_factory=threading.RLock
    )  # an interrupt may leave it with the thread that has it

    def __post_init__(self) -> None:
        self.hosts = hosts_of(self.plan.mesh)
        given = set(self.donated)
        self.kept = tuple(i for i in range(len(self.shardings)) if i not in given)
        self._pick_kept, self._pick_given = picker(self.kept), picker(self.donated)

    @cached_property
    def out_shardings(self) -> list[NamedSharding]:
        """Where its flat outputs lie."""
        return self.plan.out_shardings

    @property
    def order(self) -> list[int]:
        """The position among the trace's inputs of each argument of the program."""
        n = len(self.consts)
        flat = range(len(self.shardings)) if self.whole else (*self.kept, *self.donated)
        return [*range(n), *(n + i for i in flat)]

    def run(self, inputs: tuple[Any, ...]) -> Any:
        """The program's results. Raises ShardError for inputs, and FloatingPointError for results, that the settings of
        JAX refuse."""
        if settings.are_usual():
            return self._run(inputs)
        settings.refuse_disabled("the step" if self.call_of is None else self.call_of.step.name)
        leaves = self.leaves(inputs)
        settings.refuse_host_arrays(leaves, [path_name(p) for p in self.traced.in_paths[-len(leaves) :]])
        with settings.own_work():
            outs = self._run(inputs)
        if (kind := settings.invalid(outs)) is not None:
            raise settings.located(self.call_of, leaves, kind)
        return outs

    def _run(self, inputs: tuple[Any, ...]) -> Any:
        clock = self.clock
        if clock.calls + 1 < clock.next:
            if clock.opens:
                clock.open()
            outs = self.call(*inputs)
        else:
            outs = self.timed(inputs, clock.waited)
            clock.ended()
        if self._sign_of is None:
            self._sign_of = sign_of(self)
        clock.sign = self._sign_of(outs)
        with self._lock:
            self.calls += 1
            clock.calls += 1
        return outs

    def takes(self, inputs: tuple[Any, ...]) -> bool:
        """Is a call's arranged input of the kind that the program was compiled for: would it run?"""
        if self.whole and jax.tree.structure(inputs[1:]) != self.tree:
            return False
        avals = self.traced.closed.in_avals[len(self.consts) :]
        return all(map(_fits, self.leaves(inputs), avals, self.shardings))

    def timed(self, inputs: tuple[Any, ...], taken: list[float]) -> Any:
        """The program's results, waited for, nothing else under way; its seconds go to `taken`."""
        self.clock.drain()
        jax.block_until_ready(inputs)
        start = time.perf_counter()
        outs = jax.block_until_ready(self.call(*inputs))
        taken.append(time.perf_counter() - start)
        return outs

    @within(settings.own_work)
    def place(self, leaves: Sequence[Any], ours: Ours) -> list[Any]:
        """The flat inputs where the program wants them. On one host numpy arrays go there with the call, shard by
        shard; on several the compiled program would take each host's own."""
        placed = list(leaves)
        kinds = jax.Array if self.hosts == 1 else (jax.Array, np.ndarray)
        moved = [
            i for i in self.kept if isinstance(leaves[i], kinds) and not lies(leaves[i], self.shardings[i])
        ]
        if moved:
            targets = [self.shardings[i] for i in moved]
            for i, x in zip(moved, put([leaves[i] for i in moved], targets), strict=True):
                placed[i] = x
        read = {id(leaves[i]) for i in self.kept}
        for i in self.donated:
            if leaves[i] not in ours or id(leaves[i]) in read or not lies(leaves[i], self.shardings[i]):
                placed[i] = own_copy(leaves[i], self.shardings[i])
            read.add(id(leaves[i]))
        return placed

    @within(settings.own_work)
    def brought(self, inputs: tuple[Any, ...], leaves: Sequence[Any], ours: Ours) -> tuple[Any, ...]:
        """The arranged inputs of a call on several hosts, flat as `leaves`, where the program wants them."""
        if all(map(lies, leaves, self.shardings)):
            return inputs
        return self.arrange(self.place(self.joined(leaves), ours))

    def joined(self, leaves: Sequence[Any]) -> list[Any]:
        """The flat inputs, those that hosts have in parts as the arrays that they make together."""
        joined = list(leaves)
        for i, dim in self.rows.items():
            if is_part(leaves[i]):
                joined[i] = from_rows(leaves[i], self.shardings[i], dim)
        return joined

    @property
    def added(self) -> Mapping[int, tuple[int, int]]:
        """Of the flat inputs that get more rows: the dimension, and how many."""
        return {} if self.rewritten is None else self.rewritten.added

    @property
    def examples(self) -> int | None:
        """The size of the batch, without rows that are added to it; None where there is none."""
        return self.plan.examples if self.real is None else int(self.real.sum())

    @property
    def real(self) -> np.ndarray | None:
        """Of each microbatch which rows are examples, bool of each; None where none were added."""
        return None if self.rewritten is None else self.rewritten.real

    @within(settings.own_work)
    def with_rows(self, leaves: Sequence[Any]) -> list[Any]:
        """The flat inputs with the rows that the program adds to the batch."""
        wider = list(leaves)
        for i, (dim, more) in self.added.items():
            wider[i] = padded(wider[i], [(0, more * (d == dim)) for d in range(wider[i].ndim)])
        return wider

    @within(settings.own_work)
    def real_rows(self, outs: Sequence[Any]) -> list[Any]:
        """The flat outputs without the rows that were added to the batch."""
        shapes = () if self.rewritten is None else self.rewritten.out_shapes
        return [
            x[tuple(map(slice, shape))] if x.shape != shape else x
            for x, shape in zip(outs, shapes, strict=False)
        ]

    def arrange(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The flat inputs as `call` takes them."""
        if self.whole:
            return self.consts, *self.tree.unflatten(leaves)
        return self.consts, self._pick_kept(leaves), self._pick_given(leaves)

    def leaves(self, inputs: tuple[Any, ...]) -> list[Any]:
        """The flat inputs of an arranged call."""
        if self.whole:
            return jax.tree.leaves(inputs[1:])
        flat: list[Any] = [None] * len(self.shardings)
        for i, x in zip((*self.kept, *self.donated), (*inputs[1], *inputs[2]), strict=True):
            flat[i] = x
        return flat

    @within(settings.own_work)
    def copies(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs that may be used up: copies of what the call takes over."""
        if not self.donated:
            return inputs
        given = (own_copy(x, self.shardings[i]) for i, x in zip(self.donated, inputs[2], strict=True))
        return (*inputs[:2], tuple(given))


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """`xs -> tuple(xs[i] for i in places)`, in C."""
    if len(places) < 2:
        return lambda xs: tuple(xs[i] for i in places)
    return itemgetter(*places)


def lies(x: Any, sharding: NamedSharding) -> bool:
    """Whether an array lies where a sharding has it."""
    return isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim)


def _fits(x: Any, aval: Any, sharding: NamedSharding) -> bool:
    """Does a program take `x` for an input compiled as `aval`? It moves what is not committed to its devices."""
    if isinstance(x, jax.Array) and x.committed and not lies(x, sharding):
        return False
    try:
        return kind(x) == kind(aval)
    except TypeError:  # no array
        return False


def kind(x: Any) -> tuple[Any, ...]:
    """What a program tells inputs apart by: shape, dtype and whether that is weak. Raises TypeError for no array."""
    if not isinstance(x, jax.Array) and not hasattr(x, "weak_type"):
        x = jax.typeof(x)
    return x.shape, x.dtype, getattr(x, "weak_type", False)
