"""The stages that a step could be cut into, from the step as it is traced: nothing of a stage is traced or planned."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from ..errors import ShardError
from ..plan import Share
from ..program.capture import Gradient
from ..program.facts import Facts
from ..program.flops import counted
from ..program.flow import Flow
from ..program.ir import Equation, Program, Value
from ..program.primitives import scan_counts
from ..program.replay import Replay, replayed
from ..program.sizes import nbytes
from ..program.trace import Traced
from ..schedule import Schedule
from .around import flat, gradient_calls
from .balance import stage_starts
from .loss import made_of_it_alone
from .starts import allowed_starts
from .units import Units, layers_of


@dataclass(frozen=True)
class StageOutline:
    """`products`: those of its forward pass, of the whole batch on one device. `weights`: bytes of the parameters that
    it is the first to read. `crossing`: bytes of the whole batch's activations that go to the next stage, 0 where a
    loss ends."""

    products: tuple[Share, ...]
    weights: float
    crossing: int


class Outline:
    """The losses of a step, as units that stages can be made of.

    `captured`: the step with each gradient call as one equation. `facts`: of the same step, whose constants may be
    others. Raises ShardError where it has no gradient call, or one in a loop.
    """

    def __init__(self, captured: Traced, facts: Facts):
        step = flat(captured.closed)
        calls, flow, roles = gradient_calls(step), Flow(step), facts.roles
        more = len(captured.consts) - len(facts.traced.consts)
        state = {i + more for i in {*roles.stored, *roles.state.values()} if i >= len(facts.traced.consts)}
        self._losses = [_Loss(call, flow, state) for call in calls]

    def __len__(self) -> int:
        return len(self._losses)

    def stages(self, schedule: Schedule, names: str | None = None) -> list[StageOutline]:
        """Those of `schedule`, numbered as there; `names` as `--cut` has them. Raises ShardError where none of the
        losses can be cut so."""
        rows, refused = [], []
        for loss in self._losses:
            try:
                rows.append(loss.stages(schedule.stages_of_loss, schedule.chunks, names))
            except ShardError as error:
                refused.append(error)
                rows.append(loss.whole(schedule.stages_of_loss))
        if len(refused) == len(rows):
            raise refused[0]
        return [stage for row in rows for stage in row]


class _Loss:
    """One loss, whole."""

    def __init__(self, call: Equation, flow: Flow, state: Collection[int]):
        gradient: Gradient = call.params["gradient"]
        state = frozenset(state)
        self._program = program = Program(replayed(gradient.loss, Replay))
        data = {
            k
            for k, v in enumerate(call.ins[: gradient.closed_over])
            if v is not None and not state.issuperset(flow.inputs_behind([v]))
        }
        self._weights = [v for k, v in enumerate(program.inputs) if k not in data]
        examples = [program.inputs[k] for k in data]
        self.units = Units(program, self._weights, examples)
        self._products = _products(program, examples)
        self._stacked = {e.index: self._stepped_over(e) for e in self.units.main if layers_of(e)}

    def stages(self, stages: int, chunks: int, names: str | None) -> list[StageOutline]:
        among = allowed_starts(self.units, stages, chunks, names)
        bounds = stage_starts(self.units, stages, chunks, among)
        seen: set[tuple[Value, int | None]] = set()
        parts = [range(a, b) for a, b in pairwise([0, *bounds, len(self.units.units)])]
        crossing = [self.units.crossing[b] for b in bounds] + [0]
        return [
            StageOutline(tuple(self._run_by(part)), self._first_read(part, seen), size)
            for part, size in zip(parts, crossing, strict=True)
        ]

    def whole(self, stages: int) -> list[StageOutline]:
        """All of it in the last stage."""
        weights = float(sum(nbytes(self._program.avals[v]) for v in self._weights))
        products = (each for of_one in self._products.values() for each in of_one)
        return [StageOutline((), 0.0, 0)] * (stages - 1) + [StageOutline(tuple(products), weights, 0)]

    def _run_by(self, part: Sequence[int]) -> Iterator[Share]:
        """The products of units of `part`, of a scan those of as many layers as are among them."""
        for e, units in groupby((self.units.units[u] for u in part), key=lambda unit: unit.equation):
            mine, layers = len([*units]), layers_of(e) or 1
            for each in self._products.get(e.index, ()):
                flops, moved, weights = (n * mine // layers for n in (each.flops, each.bytes, each.weights))
                yield replace(each, flops=flops, bytes=moved, weights=weights)

    def _first_read(self, part: Sequence[int], seen: set[tuple[Value, int | None]]) -> float:
        """Bytes of the weights that units of `part` read and none did before, of stacked ones their own layers."""
        size = 0.0
        for u in part:
            unit = self.units.units[u]
            stacked = self._stacked[unit.equation.index] if unit.layer is not None else frozenset()
            for v in self.units.read[u]:
                layer = unit.layer if v in stacked else None
                if (v, layer) not in seen and (v, None) not in seen:
                    seen.add((v, layer))
                    layers = unit.equation.params["length"] if layer is not None else 1
                    size += nbytes(self._program.avals[v]) / layers
        return size

    def _stepped_over(self, scan: Equation) -> frozenset[Value]:
        """The weights whose layers the scan steps over."""
        rows = {v for v in scan.ins[sum(scan_counts(scan.params)) :] if v is not None}
        layers = (scan.params["length"],)
        like = (v for v in self._weights if self._program.shapes[v][:1] == layers)
        return frozenset(v for v in like if made_of_it_alone(self._program, v) & rows)


def _products(loss: Program, examples: Sequence[Value]) -> dict[int, list[Share]]:
    """The products that each equation of the top level has, itself or in its bodies."""
    flow, found = Flow(loss), defaultdict[int, list[Share]](list)
    varying = flow.forward(examples)
    for work in counted(loss, flow):
        e = top = loss.equations[work.equation]
        while top.outer is not None:
            top = top.outer
        same = [v for v in (*e.ins[:2], e.outs[0]) if v is not None and v not in varying]
        weights = e.trips * sum(nbytes(loss.avals[v]) for v in same)
        found[top.index].append(
            Share(work.flops, work.bytes, work.dtype, work.recomputed, work.exact, weights)
        )
    return found
