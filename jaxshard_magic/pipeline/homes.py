"""Where every array of a split step lies: on the sub-mesh of a rank, as the plan of the whole step has it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..plan import LeafPlan, Plan, Share
from ..program.flops import Work, counted
from ..program.flow import Flow
from ..program.ir import Program, Value
from ..program.memory_kinds import memory_kind
from ..program.roles import BATCH, OPTIMIZER
from ..strategies.layout import Layout, partition_spec
from ..strategies.layout import spec_of as axes_of
from ..strategies.shares import shares
from ..strategies.within import Inputs, layout_within
from .kinds import Kinds
from .loss_stages import LossStages, Part
from .programs import StageProgram
from .split import Split


@dataclass(frozen=True)
class Ranks:
    """The devices of a pipeline: `mesh` without `axis` is what each rank has, along which it is as long as there are
    ranks."""

    mesh: Mesh
    axis: str

    def __len__(self) -> int:
        return self.mesh.shape[self.axis]

    def between(self, first: int, end: int) -> Mesh:
        """The mesh of the ranks from `first` on, before `end`."""
        at = self.mesh.axis_names.index(self.axis)
        devices = np.take(self.mesh.devices, range(first, end), axis=at)
        return Mesh(devices, self.mesh.axis_names, axis_types=self.mesh.axis_types)

    @cached_property
    def each(self) -> tuple[Mesh, ...]:
        """The sub-mesh of each rank; it has the axis of the pipeline as well, of size 1."""
        return tuple(self.between(r, r + 1) for r in range(len(self)))


class Homes:
    """The shardings of a split step. `plan` is of the whole step on the sub-mesh of one rank."""

    def __init__(self, split: Split, plan: Plan, ranks: Ranks):
        self.split, self.plan, self.ranks = split, plan, ranks
        program = split.around.program
        self._kinds = Kinds(program)
        for o, i in plan.state_pairs.items():
            self._join(split.leaves[i], split.outputs[o])
        self._of_kind: dict[Value, PartitionSpec] = {}
        self._alone: dict[Value, PartitionSpec] = {}
        self._memory: dict[Value, str] = {}  # the memory kinds of values on the host
        self._own: dict[Value, PartitionSpec] = {}
        for part, spec in zip(split.outputs, plan.out_specs, strict=True):
            self._own.update(dict.fromkeys(part.values, spec))
        for leaf, part in sorted(
            zip(plan.leaves, split.leaves, strict=True), key=lambda pair: _follows(pair[0])
        ):
            for v in part.values:
                if program.shapes[v]:
                    kind = self._kinds.of(v)
                    if not _follows(leaf) or kind not in self._of_kind:
                        self._of_kind[kind] = leaf.spec
        self._alone = dict(self._placed_alone())
        kinds = ((v, memory_kind(aval)) for v, aval in enumerate(program.avals))
        self._memory = {v: kind for v, kind in kinds if kind is not None}
        for part, kind in zip(split.leaves, plan.in_memory or (None,) * len(split.leaves), strict=True):
            self._memory.update(dict.fromkeys(part.values, kind) if kind is not None else {})
        for loss in split.losses:
            for i, v in loss.gradient_of.items():
                self._own[v] = self.spec(loss.input_of[i])

    def _join(self, leaf: Part, out: Part) -> None:
        if len(leaf.values) == len(out.values):
            for v, w in zip(leaf.values, out.values, strict=True):
                if self.split.around.program.shapes[v]:
                    self._kinds.join(v, w)

    def _placed_alone(self) -> Iterator[tuple[Value, PartitionSpec]]:
        """Optimizer state that lies otherwise than the parameter of its kind, before the step and after it."""
        becomes = {i: o for o, i in self.plan.state_pairs.items()}
        for i, (leaf, part) in enumerate(zip(self.plan.leaves, self.split.leaves, strict=True)):
            if _follows(leaf) and any(self.spec(v) != leaf.spec for v in part.values):
                after = self.split.outputs[becomes[i]].values if i in becomes else ()
                yield from ((v, leaf.spec) for v in (*part.values, *after))

    def spec(self, v: Value) -> PartitionSpec:
        """Of a value around the gradient calls."""
        if v in self._alone:
            return self._alone[v]
        return self._of_kind.get(self._kinds.of(v), self._own.get(v, PartitionSpec()))

    def axes(self, v: Value) -> list[tuple[str, ...]]:
        """The mesh axes that divide each dimension of a value around the gradient calls."""
        axes = axes_of(self.spec(v))
        return axes + [()] * (len(self.split.around.program.shapes[v]) - len(axes))

    @cached_property
    def around(self) -> Layout | None:
        """The layout that what stands around the gradient calls is held to; None where a rank is one device."""
        if self.ranks.each[0].size == 1:
            return None
        split, plan, program = self.split, self.plan, self.split.around.program
        stored = {v for loss in split.losses for v in loss.gradient_of.values()}
        for leaf, part in zip(plan.leaves, split.leaves, strict=True):
            stored.update(part.values if leaf.role != BATCH else ())
        place = {v: i for i, v in enumerate(program.inputs)}
        made = {v: o for o, v in enumerate(program.outputs)}
        becomes = {made[after]: place[before] for before, after in split.same}

        def along(axes: Collection[str]) -> dict[int, tuple[int, ...]]:
            """Of each input that is not stored the dimensions that these axes divide, where there are any."""
            found = {
                place[v]: tuple(d for d, on in enumerate(self.axes(v)) if not {*axes}.isdisjoint(on))
                for v in place
                if v not in stored
            }
            return {i: dims for i, dims in found.items() if dims}

        positions = along(plan.jobs.get("sp", ()))
        jobs = {name: axes for name, axes in plan.jobs.items() if name != "sp" or positions}
        parameters = {place[v]: self.axes(v) for v in stored}
        inputs = Inputs(parameters, along(plan.batch_axes), positions, becomes)
        return self.layout(program, jobs, inputs, [v for group in split.placed.groups for v in group.wanted])

    def layout(
        self,
        program: Program,
        jobs: Mapping[str, tuple[str, ...]],
        inputs: Inputs,
        read_elsewhere: Collection[Value] = (),
    ) -> Layout:
        """The layout of a part of the step on the devices of one rank, where these `jobs` of its axes are done."""
        mesh, plan = self.ranks.each[0], self.plan
        platform = mesh.devices.flat[0].platform
        return layout_within(
            program,
            mesh.abstract_mesh,
            platform,
            jobs,
            plan.batch_axes,
            inputs,
            plan.attention,
            read_elsewhere,
        )

    def sharding(self, v: Value, rank: int) -> NamedSharding:
        """Of a value around the gradient call, on a rank."""
        return self.at(rank, self.spec(v), self._memory.get(v))

    def at(self, rank: int, spec: PartitionSpec | None = None, memory: str | None = None) -> NamedSharding:
        """`spec` on a rank's sub-mesh, a copy on each of its devices without one; `memory`: of this kind."""
        on = PartitionSpec() if spec is None else spec
        return NamedSharding(self.ranks.each[rank], on, memory_kind=memory)

    def leaf(self, i: int, readers: Sequence[int]) -> NamedSharding:
        """Of an input of the step that the ranks `readers` have: on one of them, or on as many as it takes."""
        part, spec = self.split.leaves[i], self.plan.in_specs[i]
        memory = self._memory.get(part.values[0])
        if len(part.values) == 1:
            first, last = (min(readers), max(readers)) if readers else (self.split.hub, self.split.hub)
            return NamedSharding(self.ranks.between(first, last + 1), spec, memory_kind=memory)
        return self._of_pieces(part, spec, memory)

    def output(self, o: int) -> NamedSharding:
        """Of an output of the step."""
        part, spec = self.split.outputs[o], self.plan.out_specs[o]
        memory = self._memory.get(part.values[0])
        if len(part.values) > 1:
            return self._of_pieces(part, spec, memory)
        return self.at(self.rank_of(next(iter(part.values))), spec, memory)

    def rank_of(self, v: Value) -> int:
        """Where a value around the gradient call lives; what is at no place of its own is with the loss."""
        return self.split.placed.at.get(v, self.split.hub)

    def even(self, part: Part) -> bool:
        """Are pieces the shards of one array, as they lie?"""
        ranks = [self.rank_of(v) for v in part.values]
        sizes = {self.split.around.program.shapes[v][0] for v in part.values}
        return len(sizes) == 1 and ranks == list(range(ranks[0], ranks[0] + len(ranks)))

    def _of_pieces(self, part: Part, spec: PartitionSpec, memory: str | None) -> NamedSharding:
        first = self.rank_of(part.values[0])
        if not self.even(part):
            return self.at(first, spec, memory)
        mesh = self.ranks.between(first, first + len(part.values))
        return NamedSharding(mesh, PartitionSpec(self.ranks.axis, *spec[1:]), memory_kind=memory)


def _follows(leaf: LeafPlan) -> bool:
    """Return whether a leaf lies as a parameter does, unless it is placed by itself."""
    return leaf.role == OPTIMIZER


class Insides:
    """The layouts of the stages of one loss on their sub-meshes."""

    def __init__(self, stages: LossStages, homes: Homes):
        self._stages, self._homes, self._plan = stages, homes, homes.plan
        call, pieces = stages.call, stages.cut.pieces
        examples = {
            i: (dim,)
            for i, piece in enumerate(pieces)
            if (dim := 0 if piece.operand == 0 else call.batch.get(piece.operand - stages.first)) is not None
        }
        self._layouts: dict[StageProgram, Layout] = {}
        self._shares: dict[StageProgram, list[tuple[Work, Share]]] = {}
        parameters = {i: self._parameter(i) for i in range(len(pieces)) if self._is_state(i)}
        self._loss = homes.layout(stages.cut.program, self._plan.jobs, Inputs(parameters, examples))

    def _parameter(self, i: int) -> list[tuple[str, ...]]:
        return self._homes.axes(self._stages.input_of[i])

    def of(self, program: StageProgram) -> Layout | None:
        """The layout that a stage's program is held to; None where a rank is one device."""
        return None if self._homes.ranks.each[0].size == 1 else self.layout(program)

    def layout(self, program: StageProgram) -> Layout:
        """The layout of a stage's program."""
        stage, whole = program.stage, program.whole
        if program in self._layouts:
            return self._layouts[program]
        n = program.slots.parameters
        loss = self._stages.cut.program
        moving = [stage.outs[k] for k in program.moving_outs]
        read = [*(loss.inputs[i] for i in stage.others), *stage.ins, *moving]
        examples = {n + k: ds for k, v in enumerate(read) if (ds := self._dims(v, self._loss.batch.classes))}
        positions = {n + k: ds for k, v in enumerate(read) if (ds := self._dims(v, self._loss.sequence))}
        first = len(whole.outputs) - n
        frozen = {n + k: i for k, i in enumerate(stage.others) if self._is_state(i)}
        self._layouts[program] = self._homes.layout(
            whole,
            self._plan.jobs,
            Inputs(
                {k: self._parameter(i) for k, i in (*enumerate(stage.parameters), *frozen.items())},
                examples,
                positions,
                {first + k: k for k in range(n)},
            ),
            [*program.kept, *program.kept_for_weights, *(v for v in whole.outputs if v is not None)],
        )
        return self._layouts[program]

    def shares(self, program: StageProgram) -> list[tuple[Work, Share]]:
        """The products of a stage's program, each with what one device does of it."""
        if program not in self._shares:
            works = counted(program.whole, Flow(program.whole))
            self._shares[program] = list(zip(works, shares(self.layout(program), works), strict=True))
        return self._shares[program]

    def _is_state(self, i: int) -> bool:
        """Is an input of the loss neither examples nor made of the whole batch?"""
        stages = self._stages
        operand = stages.cut.pieces[i].operand - stages.first
        return operand >= 0 and operand not in stages.call.batch

    def _dims(self, v: Value, classes: frozenset[int]) -> tuple[int, ...]:
        return tuple(d for d, c in enumerate(self._loss.dims.big(v)) if c in classes)


def spec_of(layout: Layout | None, v: Value) -> PartitionSpec:
    """Of a value of a stage's program."""
    if layout is None:
        return PartitionSpec()
    active = layout.batchy(v) and v not in layout.state
    return partition_spec(layout.active(v) if active else layout.at_rest(v))
