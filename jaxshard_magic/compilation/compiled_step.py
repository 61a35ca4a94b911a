"""One compiled program of a step, for one set of shapes and static values."""

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

from ..device_arrays import count_hosts, from_host_rows, is_local, own_copy, put
from ..gradients.rewrite import Rewritten
from ..plan import Plan
from ..program import jax_settings
from ..program.batching.padding import pad_with_last_row
from ..program.flatten_call import FlatCall, ResultStructure
from ..program.routing import RoutedLayer
from ..program.trace import Traced, path_name
from ..temporary import run_in_context
from .completion_probe import completion_probe
from .donation import OwnOutputs
from .expert_rows import ExpertRowCounts
from .loop_clock import LoopClock


@dataclass(eq=False)
class CompiledStep:
    """Program of a step, traced, planned and compiled, with the measurements of its calls.

    Call it as `call(consts, args, kwargs)` with the user's own pytrees if `takes_pytrees`, else as `call(consts, kept,
    given)` with flat inputs, the donated inputs in `given`.

    Attributes:
        traced: Traced step.
        plan: Plan of the step.
        compiled: Compiled program; None for a step that is planned only.
        result: Recipe for the step's result from flat outputs.
        tree: PyTreeDef of `(args, kwargs)`.
        call: The compiled function; None if the devices aren't attached, or for a step that is planned only.
        takes_pytrees: Whether `call` takes the user's own pytrees.
        consts: Constants of the trace, placed for `call`; their shapes where the devices aren't attached.
        shardings: Shardings of the flat inputs, without constants.
        donated: Positions of donated flat inputs.
        trace_s: Seconds spent on tracing.
        compile_s: Seconds spent on compiling; None if the compiler failed, or for a step that is planned only.
        used_arguments: For each argument of the program, whether the program reads it. JAX drops the others.
        source_file: File that defines the step, as Python knows it; None if there is none.
        compiler_messages: Messages in the compiler's log.
        call_shapes: Call that the program was made for, with shapes in place of arrays.
        rewritten: Rewritten gradient calls; None if nothing is rewritten.
        early_plan: The step planned only, if it was announced during compilation.
        per_host_dims: Dimension split over hosts, by position of the flat input.
        initial_peak_bytes: Peak memory of each device in bytes before the first run; None for a device without figures.
        expert_rows: Rows counted for each expert, by route; None if not counted.
        calls: Number of calls.
        clock: Measures the calls of the current loop, except the very first call.
    """

    traced: Traced
    plan: Plan
    compiled: Any
    result: ResultStructure
    tree: Any
    call: Any
    takes_pytrees: bool
    consts: list[Any]
    shardings: list[NamedSharding]
    donated: tuple[int, ...]
    trace_s: float
    compile_s: float | None
    used_arguments: tuple[bool, ...]
    source_file: str | None = None
    compiler_messages: tuple[str, ...] = ()
    call_shapes: FlatCall | None = None
    rewritten: Rewritten | None = None
    early_plan: "CompiledStep | None" = None
    per_host_dims: Mapping[int, int] = field(default_factory=dict)
    initial_peak_bytes: tuple[int | None, ...] = ()
    expert_rows: Mapping[RoutedLayer, ExpertRowCounts] | None = None
    calls: int = 0
    clock: LoopClock = field(default_factory=lambda: LoopClock(first_waited=2))
    _probe: Callable[[Any], Any] | None = None
    _lock: Any = field(default_factory=threading.RLock)  # re-entrant: an interrupt may leave it locked by its thread

    def __post_init__(self) -> None:
        self.hosts = count_hosts(self.plan.mesh)
        donated = set(self.donated)
        self.not_donated = tuple(i for i in range(len(self.shardings)) if i not in donated)
        self._pick_kept, self._pick_given = tuple_getter(self.not_donated), tuple_getter(self.donated)

    @cached_property
    def out_shardings(self) -> list[NamedSharding]:
        """Shardings of the flat outputs."""
        return self.plan.out_shardings

    @property
    def order(self) -> list[int]:
        """Position among the trace's inputs for each argument of the program."""
        n = len(self.consts)
        flat = range(len(self.shardings)) if self.takes_pytrees else (*self.not_donated, *self.donated)
        return [*range(n), *(n + i for i in flat)]

    def run(self, inputs: tuple[Any, ...]) -> Any:
        """Return the program's results for arranged inputs, and measure the call.

        Raises:
            ShardError: JAX's settings forbid the inputs.
            FloatingPointError: JAX's settings forbid the results.
        """
        # The checks flatten all inputs, so they run only if a setting of JAX asks for them.
        if jax_settings.are_default():
            return self._run(inputs)
        jax_settings.check_jit_enabled("the step" if self.call_shapes is None else self.call_shapes.step.name)
        leaves = self.leaves(inputs)
        jax_settings.check_host_inputs(leaves, [path_name(p) for p in self.traced.in_paths[-len(leaves) :]])
        with jax_settings.suspend_checks():
            outs = self._run(inputs)
        if (kind := jax_settings.invalid_kind(outs)) is not None:
            raise jax_settings.locate_invalid(self.call_shapes, leaves, kind)
        return outs

    def _run(self, inputs: tuple[Any, ...]) -> Any:
        """Run the program, and wait for the end of the call if the clock asks for it."""
        clock = self.clock
        if clock.calls + 1 < clock.next_waited:
            if clock.opens_interval:
                clock.open_interval()
            outs = self.call(*inputs)
        else:
            outs = self.run_timed(inputs, clock.waited_s)
            clock.record_end()
        if self._probe is None:
            self._probe = completion_probe(self)
        clock.probe = self._probe(outs)
        # Several threads may call the step, and `+=` is not atomic.
        with self._lock:
            self.calls += 1
            clock.calls += 1
        return outs

    def accepts(self, inputs: tuple[Any, ...]) -> bool:
        """Return whether the program accepts a call's arranged inputs, by tree, shape, dtype and sharding."""
        if self.takes_pytrees and jax.tree.structure(inputs[1:]) != self.tree:
            return False
        avals = self.traced.closed.in_avals[len(self.consts) :]
        return all(map(_fits, self.leaves(inputs), avals, self.shardings))

    def run_timed(self, inputs: tuple[Any, ...], timings: list[float]) -> Any:
        """Return the program's results after waiting for the call, with nothing else running.

        Args:
            inputs: Arranged inputs.
            timings: Receives the seconds of the call.
        """
        # JAX dispatches asynchronously: the seconds would include earlier calls and the transfer of the inputs.
        self.clock.drain()
        jax.block_until_ready(inputs)
        start = time.perf_counter()
        outs = jax.block_until_ready(self.call(*inputs))
        timings.append(time.perf_counter() - start)
        return outs

    @run_in_context(jax_settings.suspend_checks)
    def place_inputs(self, leaves: Sequence[Any], own_outputs: OwnOutputs) -> list[Any]:
        """Return the flat inputs moved to the program's shardings.

        Donated inputs are copied unless they are outputs of the step and used once.

        Args:
            leaves: Flat inputs.
            own_outputs: Arrays returned by the step, open to donation.
        """
        placed = list(leaves)
        # On one host numpy arrays go to the devices with the call, shard by shard. On several hosts the compiled
        # program would take each host's own array.
        kinds = jax.Array if self.hosts == 1 else (jax.Array, np.ndarray)
        moved = [
            i
            for i in self.not_donated
            if isinstance(leaves[i], kinds) and not has_sharding(leaves[i], self.shardings[i])
        ]
        if moved:
            targets = [self.shardings[i] for i in moved]
            for i, x in zip(moved, put([leaves[i] for i in moved], targets), strict=True):
                placed[i] = x
        # A buffer can be donated once, and only if no other input of the call reads it.
        read = {id(leaves[i]) for i in self.not_donated}
        for i in self.donated:
            if leaves[i] not in own_outputs or id(leaves[i]) in read or not has_sharding(leaves[i], self.shardings[i]):
                placed[i] = own_copy(leaves[i], self.shardings[i])
            read.add(id(leaves[i]))
        return placed

    @run_in_context(jax_settings.suspend_checks)
    def place_on_hosts(
        self, inputs: tuple[Any, ...], leaves: Sequence[Any], own_outputs: OwnOutputs
    ) -> tuple[Any, ...]:
        """Return the arranged inputs of a call on several hosts, moved to the program's shardings.

        Args:
            inputs: Arranged inputs.
            leaves: The same inputs, flat.
            own_outputs: Arrays returned by the step, open to donation.
        """
        if all(map(has_sharding, leaves, self.shardings)):
            return inputs
        return self.arrange(self.place_inputs(self.join_parts(leaves), own_outputs))

    def join_parts(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the flat inputs, with hosts' parts of an array joined into one global array."""
        joined = list(leaves)
        for i, dim in self.per_host_dims.items():
            if is_local(leaves[i]):
                joined[i] = from_host_rows(leaves[i], self.shardings[i], dim)
        return joined

    @property
    def padding(self) -> Mapping[int, tuple[int, int]]:
        """Dimension and number of padding rows, by position of the padded flat input."""
        return {} if self.rewritten is None else self.rewritten.added

    @property
    def examples(self) -> int | None:
        """Batch size without padding rows; None without a batch."""
        return self.plan.examples if self.example_mask is None else int(self.example_mask.sum())

    @property
    def example_mask(self) -> np.ndarray | None:
        """Mask of real examples in each microbatch (bool); None without padding rows."""
        return None if self.rewritten is None else self.rewritten.real_rows

    @run_in_context(jax_settings.suspend_checks)
    def pad_batch(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the flat inputs with the batch padded for the program."""
        wider = list(leaves)
        for i, (dim, more) in self.padding.items():
            wider[i] = pad_with_last_row(wider[i], [(0, more * (d == dim)) for d in range(wider[i].ndim)])
        return wider

    @run_in_context(jax_settings.suspend_checks)
    def strip_padding(self, outs: Sequence[Any]) -> list[Any]:
        """Return the flat outputs without padding rows."""
        shapes = () if self.rewritten is None else self.rewritten.out_shapes
        return [x[tuple(map(slice, shape))] if x.shape != shape else x for x, shape in zip(outs, shapes, strict=False)]

    def arrange(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the flat inputs in the form of `call`'s arguments."""
        if self.takes_pytrees:
            return self.consts, *self.tree.unflatten(leaves)
        return self.consts, self._pick_kept(leaves), self._pick_given(leaves)

    def leaves(self, inputs: tuple[Any, ...]) -> list[Any]:
        """Return the flat inputs of an arranged call."""
        if self.takes_pytrees:
            return jax.tree.leaves(inputs[1:])
        flat: list[Any] = [None] * len(self.shardings)
        for i, x in zip((*self.not_donated, *self.donated), (*inputs[1], *inputs[2]), strict=True):
            flat[i] = x
        return flat

    @run_in_context(jax_settings.suspend_checks)
    def copy_donated(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return arranged inputs with copies in place of donated arrays."""
        if not self.donated:
            return inputs
        given = (own_copy(x, self.shardings[i]) for i, x in zip(self.donated, inputs[2], strict=True))
        return (*inputs[:2], tuple(given))


def tuple_getter(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return `xs -> tuple(xs[i] for i in positions)`, in C for two positions or more."""
    # For a single position `itemgetter` returns the bare item, no tuple.
    if len(positions) < 2:
        return lambda xs: tuple(xs[i] for i in positions)
    return itemgetter(*positions)


def has_sharding(x: Any, sharding: NamedSharding) -> bool:
    """Return whether `x` is a JAX array with an equivalent sharding."""
    return isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim)


def _fits(x: Any, aval: Any, sharding: NamedSharding) -> bool:
    """Return whether a program accepts `x` for an input compiled as `aval`."""
    # JAX moves uncommitted arrays to the program's devices.
    if isinstance(x, jax.Array) and x.committed and not has_sharding(x, sharding):
        return False
    try:
        return type_key(x) == type_key(aval)
    except TypeError:  # not an array
        return False


def type_key(x: Any) -> tuple[Any, ...]:
    """Return the shape, dtype and weak type of an input, by which a program tells inputs apart. Raises TypeError for
    anything but an array."""
    if not isinstance(x, jax.Array) and not hasattr(x, "weak_type"):
        x = jax.typeof(x)
    return x.shape, x.dtype, getattr(x, "weak_type", False)
