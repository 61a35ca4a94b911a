"""Estimated stages of a step for a strategy search, from the traced step alone: no stage is traced or planned."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from ..errors import ShardError
from ..plan import DeviceWork
from ..program.emit import Replay, run_replay
from ..program.facts import Facts
from ..program.flops import count_work
from ..program.flow import Flow
from ..program.gradient_calls import GradientCall
from ..program.ir import Equation, Program, Value
from ..program.primitives import scan_counts
from ..program.sizes import nbytes
from ..program.trace import Traced
from ..schedule import Schedule
from .allowed_starts import allowed_starts
from .balance import stage_starts
from .loss_units import LossUnits, splittable_layers
from .outer_program import flatten_step, gradient_calls
from .split_loss import values_made_only_of


@dataclass(frozen=True)
class StageOutline:
    """Work of one possible stage.

    Attributes:
        products: Matrix products of the forward pass, for the full batch on one device.
        weight_bytes: Bytes of the parameters that no earlier stage reads.
        crossing_bytes: Bytes of activations sent to the next stage, for the full batch; 0 at the end of a loss.
    """

    products: tuple[DeviceWork, ...]
    weight_bytes: float
    crossing_bytes: int


class Outline:
    """The losses of a step, ready to be divided into stages.

    Args:
        captured: The step, with each gradient call as one equation.
        facts: Facts of the same step, traced with possibly other constants.

    Raises:
        ShardError: No gradient call, or a gradient call in a loop.
    """

    def __init__(self, captured: Traced, facts: Facts):
        step = flatten_step(captured.closed)
        calls, flow, roles = gradient_calls(step), Flow(step), facts.roles
        # The captured step may have other constants, which shift the positions of all inputs.
        more = len(captured.consts) - len(facts.traced.consts)
        state = {i + more for i in {*roles.storage_order, *roles.state.values()} if i >= len(facts.traced.consts)}
        self._losses = [_Loss(call, flow, state) for call in calls]

    def __len__(self) -> int:
        return len(self._losses)

    def stages(self, schedule: Schedule, names: str | None = None) -> list[StageOutline]:
        """Return the stages for `schedule`, in the order of their numbers.

        A loss that can't be split counts as one stage, the last of its own.

        Args:
            schedule: The schedule to fill.
            names: Regular expression for names at which stages begin, as in `--cut`.

        Raises:
            ShardError: None of the losses can be split so.
        """
        rows, refused = [], []
        for loss in self._losses:
            try:
                rows.append(loss.stages(schedule.stages_per_loss, schedule.chunks, names))
            except ShardError as error:
                refused.append(error)
                rows.append(loss.all_in_last_stage(schedule.stages_per_loss))
        if len(refused) == len(rows):
            raise refused[0]
        return [stage for row in rows for stage in row]


class _Loss:
    """One loss before it is split."""

    def __init__(self, call: Equation, flow: Flow, state: Collection[int]):
        gradient: GradientCall = call.params["gradient"]
        state = frozenset(state)
        self._program = program = Program(run_replay(gradient.loss, Replay))
        # An operand made of state alone is a weight, any other depends on the examples.
        data = {
            k
            for k, v in enumerate(call.operands[: gradient.num_closed_over])
            if v is not None and not state.issuperset(flow.input_ancestors([v]))
        }
        self._weights = [v for k, v in enumerate(program.inputs) if k not in data]
        examples = [program.inputs[k] for k in data]
        self.units = LossUnits(program, self._weights, examples)
        self._products = _products(program, examples)
        self._stacked = {e.index: self._scanned_weights(e) for e in self.units.main_equations if splittable_layers(e)}

    def stages(self, stages: int, chunks: int, names: str | None) -> list[StageOutline]:
        among = allowed_starts(self.units, stages, chunks, names)
        bounds = stage_starts(self.units, stages, chunks, among)
        seen: set[tuple[Value, int | None]] = set()
        parts = [range(a, b) for a, b in pairwise([0, *bounds, len(self.units.units)])]
        crossing = [self.units.crossing_bytes[b] for b in bounds] + [0]
        return [
            StageOutline(tuple(self._stage_products(part)), self._new_weight_bytes(part, seen), size)
            for part, size in zip(parts, crossing, strict=True)
        ]

    def all_in_last_stage(self, stages: int) -> list[StageOutline]:
        """Return stages with all work in the last one."""
        weights = float(sum(nbytes(self._program.avals[v]) for v in self._weights))
        products = (each for of_one in self._products.values() for each in of_one)
        return [StageOutline((), 0.0, 0)] * (stages - 1) + [StageOutline(tuple(products), weights, 0)]

    def _stage_products(self, part: Sequence[int]) -> Iterator[DeviceWork]:
        """Yield the products of a range of units; a scan contributes in proportion to its layers in the range."""
        for e, units in groupby((self.units.units[u] for u in part), key=lambda unit: unit.equation):
            mine, layers = len([*units]), splittable_layers(e) or 1
            for each in self._products.get(e.index, ()):
                flops, moved, weights = (n * mine // layers for n in (each.flops, each.bytes, each.weights))
                yield replace(each, flops=flops, bytes=moved, weights=weights)

    def _new_weight_bytes(self, part: Sequence[int], seen: set[tuple[Value, int | None]]) -> float:
        """Return the bytes of the weights read by these units and by none before. Stacked weights count layer by
        layer."""
        size = 0.0
        for u in part:
            unit = self.units.units[u]
            stacked = self._stacked[unit.equation.index] if unit.layer is not None else frozenset()
            for v in self.units.parameters_read[u]:
                layer = unit.layer if v in stacked else None
                if (v, layer) not in seen and (v, None) not in seen:
                    seen.add((v, layer))
                    layers = unit.equation.params["length"] if layer is not None else 1
                    size += nbytes(self._program.avals[v]) / layers
        return size

    def _scanned_weights(self, scan: Equation) -> frozenset[Value]:
        """Return the weights with one slice per layer of the scan."""
        rows = {v for v in scan.operands[sum(scan_counts(scan.params)) :] if v is not None}
        layers = (scan.params["length"],)
        like = (v for v in self._weights if self._program.shapes[v][:1] == layers)
        return frozenset(v for v in like if values_made_only_of(self._program, v) & rows)


def _products(loss: Program, examples: Sequence[Value]) -> dict[int, list[DeviceWork]]:
    """Return the products of each top-level equation, including products in its bodies."""
    flow, found = Flow(loss), defaultdict[int, list[DeviceWork]](list)
    varying = flow.descendants(examples)
    for work in count_work(loss, flow):
        e = top = loss.equations[work.equation]
        while top.parent is not None:
            top = top.parent
        # Bytes of values that depend on no example are the same for any size of microbatch.
        same = [v for v in (*e.operands[:2], e.results[0]) if v is not None and v not in varying]
        weights = e.trip_count * sum(nbytes(loss.avals[v]) for v in same)
        found[top.index].append(DeviceWork(work.flops, work.bytes, work.dtype, work.recomputed, work.exact, weights))
    return found
