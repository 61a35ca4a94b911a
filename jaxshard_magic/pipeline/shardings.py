"""Shardings of all arrays of a split step, on sub-meshes of ranks and by the plan of the whole step."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..plan import DeviceWork, LeafPlan, Plan
from ..program.flops import Work, count_work
from ..program.flow import Flow
from ..program.ir import Program, Value
from ..program.memory_kinds import memory_kind
from ..program.roles import BATCH, OPTIMIZER
from ..strategies.device_shares import device_shares
from ..strategies.layout import Layout, partition_spec
from ..strategies.layout import from_partition_spec as axes_of
from ..strategies.stage_layout import StageInputs, stage_layout
from .equation_groups import ValueClasses
from .programs import StageProgram
from .split_step import LossStages, SplitStep, ValuePieces


@dataclass(frozen=True)
class RankMeshes:
    """The devices of a pipeline.

    Attributes:
        mesh: The complete mesh.
        axis: Mesh axis of the pipeline, with one entry per rank.
    """

    mesh: Mesh
    axis: str

    def __len__(self) -> int:
        return self.mesh.shape[self.axis]

    def sub_mesh(self, first: int, end: int) -> Mesh:
        """Return the mesh of the ranks from `first` up to, but not including, `end`."""
        at = self.mesh.axis_names.index(self.axis)
        devices = np.take(self.mesh.devices, range(first, end), axis=at)
        return Mesh(devices, self.mesh.axis_names, axis_types=self.mesh.axis_types)

    @cached_property
    def sub_meshes(self) -> tuple[Mesh, ...]:
        """Sub-mesh of each rank. It keeps the axis of the pipeline, with size 1."""
        return tuple(self.sub_mesh(r, r + 1) for r in range(len(self)))


class StepShardings:
    """The shardings of a split step.

    Args:
        split: The split step.
        plan: Plan of the whole step on the sub-mesh of one rank.
        ranks: The sub-meshes.
    """

    def __init__(self, split: SplitStep, plan: Plan, ranks: RankMeshes):
        self.split, self.plan, self.ranks = split, plan, ranks
        program = split.outer.program
        self._classes = ValueClasses(program)
        for o, i in plan.state_pairs.items():
            self._join(split.leaves[i], split.outputs[o])
        self._class_specs: dict[Value, PartitionSpec] = {}
        self._separate_specs: dict[Value, PartitionSpec] = {}
        self._value_specs: dict[Value, PartitionSpec] = {}
        for part, spec in zip(split.outputs, plan.out_specs, strict=True):
            self._value_specs.update(dict.fromkeys(part.values, spec))
        # Parameters first: their optimizer state takes the same spec.
        for leaf, part in sorted(
            zip(plan.leaves, split.leaves, strict=True), key=lambda pair: _is_optimizer_state(pair[0])
        ):
            for v in part.values:
                if program.shapes[v]:
                    kind = self._classes.class_of(v)
                    if not _is_optimizer_state(leaf) or kind not in self._class_specs:
                        self._class_specs[kind] = leaf.spec
        self._separate_specs = dict(self._find_separate())
        kinds = ((v, memory_kind(aval)) for v, aval in enumerate(program.avals))
        # Only of values outside of the default memory.
        self._memory: dict[Value, str] = {v: kind for v, kind in kinds if kind is not None}
        for part, kind in zip(split.leaves, plan.in_memory or (None,) * len(split.leaves), strict=True):
            self._memory.update(dict.fromkeys(part.values, kind) if kind is not None else {})
        for loss in split.losses:
            for i, v in loss.gradient_values.items():
                self._value_specs[v] = self.spec(loss.input_values[i])

    def _join(self, leaf: ValuePieces, out: ValuePieces) -> None:
        if len(leaf.values) == len(out.values):
            for v, w in zip(leaf.values, out.values, strict=True):
                if self.split.outer.program.shapes[v]:
                    self._classes.merge(v, w)

    def _find_separate(self) -> Iterator[tuple[Value, PartitionSpec]]:
        """Yield optimizer state with another spec than the parameter of its class, before and after the step."""
        becomes = {i: o for o, i in self.plan.state_pairs.items()}
        for i, (leaf, part) in enumerate(zip(self.plan.leaves, self.split.leaves, strict=True)):
            if _is_optimizer_state(leaf) and any(self.spec(v) != leaf.spec for v in part.values):
                after = self.split.outputs[becomes[i]].values if i in becomes else ()
                yield from ((v, leaf.spec) for v in (*part.values, *after))

    def spec(self, v: Value) -> PartitionSpec:
        """Return the spec of an outer value."""
        if v in self._separate_specs:
            return self._separate_specs[v]
        return self._class_specs.get(self._classes.class_of(v), self._value_specs.get(v, PartitionSpec()))

    def axes(self, v: Value) -> list[tuple[str, ...]]:
        """Return the mesh axes that divide each dimension of an outer value."""
        axes = axes_of(self.spec(v))
        return axes + [()] * (len(self.split.outer.program.shapes[v]) - len(axes))

    @cached_property
    def outer_layout(self) -> Layout | None:
        """Layout of the outer program: a teacher network, the update, metrics. None for ranks of one device."""
        if self.ranks.sub_meshes[0].size == 1:
            return None
        split, plan, program = self.split, self.plan, self.split.outer.program
        stored = {v for loss in split.losses for v in loss.gradient_values.values()}
        for leaf, part in zip(plan.leaves, split.leaves, strict=True):
            stored.update(part.values if leaf.role != BATCH else ())
        input_position = {v: i for i, v in enumerate(program.inputs)}
        output_position = {v: o for o, v in enumerate(program.outputs)}
        state_pairs = {output_position[after]: input_position[before] for before, after in split.state_values}

        def divided_dims(axes: Collection[str]) -> dict[int, tuple[int, ...]]:
            """Return the dimensions divided by some of these axes, for each input that is not stored state."""
            found = {
                input_position[v]: tuple(d for d, on in enumerate(self.axes(v)) if not {*axes}.isdisjoint(on))
                for v in input_position
                if v not in stored
            }
            return {i: dims for i, dims in found.items() if dims}

        positions = divided_dims(plan.axes_by_strategy.get("sp", ()))
        jobs = {name: axes for name, axes in plan.axes_by_strategy.items() if name != "sp" or positions}
        parameters = {input_position[v]: self.axes(v) for v in stored}
        inputs = StageInputs(parameters, divided_dims(plan.batch_axes), positions, state_pairs)
        return self.rank_layout(program, jobs, inputs, [v for group in split.assignment.groups for v in group.outputs])

    def rank_layout(
        self,
        program: Program,
        jobs: Mapping[str, tuple[str, ...]],
        inputs: StageInputs,
        read_elsewhere: Collection[Value] = (),
    ) -> Layout:
        """Return the layout of a part of the step on the devices of one rank.

        Args:
            program: The part.
            jobs: Mesh axes of each part of the strategy.
            inputs: Roles of the inputs.
            read_elsewhere: Values read outside of the part.
        """
        mesh, plan = self.ranks.sub_meshes[0], self.plan
        platform = mesh.devices.flat[0].platform
        # With an abstract mesh, one layout serves equal parts on all ranks.
        return stage_layout(
            program, mesh.abstract_mesh, platform, jobs, plan.batch_axes, inputs, plan.attention, read_elsewhere
        )

    def sharding(self, v: Value, rank: int) -> NamedSharding:
        """Return the sharding of an outer value on a rank."""
        return self.on_rank(rank, self.spec(v), self._memory.get(v))

    def on_rank(self, rank: int, spec: PartitionSpec | None = None, memory: str | None = None) -> NamedSharding:
        """Return the sharding for a spec on a rank's sub-mesh.

        Args:
            rank: The rank.
            spec: The spec; None for a copy on each device.
            memory: Memory kind; None for the default.
        """
        on = PartitionSpec() if spec is None else spec
        return NamedSharding(self.ranks.sub_meshes[rank], on, memory_kind=memory)

    def input_sharding(self, i: int, readers: Sequence[int]) -> NamedSharding:
        """Return the sharding of step input i.

        An array in one piece is on all ranks from the first reader to the last, without readers on the rank of the
        losses. An array in pieces is as `has_even_pieces` allows: one shard per rank, or all of it on the first rank.
        """
        part, spec = self.split.leaves[i], self.plan.in_specs[i]
        memory = self._memory.get(part.values[0])
        if len(part.values) == 1:
            first, last = (min(readers), max(readers)) if readers else (self.split.loss_rank, self.split.loss_rank)
            return NamedSharding(self.ranks.sub_mesh(first, last + 1), spec, memory_kind=memory)
        return self._pieces_sharding(part, spec, memory)

    def output_sharding(self, o: int) -> NamedSharding:
        """Return the sharding of step output o."""
        part, spec = self.split.outputs[o], self.plan.out_specs[o]
        memory = self._memory.get(part.values[0])
        if len(part.values) > 1:
            return self._pieces_sharding(part, spec, memory)
        return self.on_rank(self.rank_of(next(iter(part.values))), spec, memory)

    def rank_of(self, v: Value) -> int:
        """Return the rank of an outer value; values without a rank are with the loss."""
        return self.split.assignment.rank_of_value.get(v, self.split.loss_rank)

    def has_even_pieces(self, part: ValuePieces) -> bool:
        """Return whether the pieces are the shards of one array, without a copy: equal sizes on consecutive ranks."""
        ranks = [self.rank_of(v) for v in part.values]
        sizes = {self.split.outer.program.shapes[v][0] for v in part.values}
        return len(sizes) == 1 and ranks == list(range(ranks[0], ranks[0] + len(ranks)))

    def _pieces_sharding(self, part: ValuePieces, spec: PartitionSpec, memory: str | None) -> NamedSharding:
        first = self.rank_of(part.values[0])
        if not self.has_even_pieces(part):
            return self.on_rank(first, spec, memory)
        mesh = self.ranks.sub_mesh(first, first + len(part.values))
        return NamedSharding(mesh, PartitionSpec(self.ranks.axis, *spec[1:]), memory_kind=memory)


def _is_optimizer_state(leaf: LeafPlan) -> bool:
    """Return whether a leaf takes the spec of its parameter, unless it is sharded separately."""
    return leaf.role == OPTIMIZER


class StageLayouts:
    """Layouts of the stages of one loss on their sub-meshes.

    Args:
        stages: The loss.
        homes: Shardings of the step.
    """

    def __init__(self, stages: LossStages, homes: StepShardings):
        self._stages, self._homes, self._plan = stages, homes, homes.plan
        call, pieces = stages.call, stages.split_loss.pieces
        examples = {
            i: (dim,)
            for i, piece in enumerate(pieces)
            if (dim := 0 if piece.operand == 0 else call.batch.get(piece.operand - stages.first_operand)) is not None
        }
        self._layouts: dict[StageProgram, Layout] = {}
        self._shares: dict[StageProgram, list[tuple[Work, DeviceWork]]] = {}
        parameters = {i: self._stored_axes(i) for i in range(len(pieces)) if self._is_weight(i)}
        # Used to find the dimensions of examples and positions in the values of all stages.
        self._loss_layout = homes.rank_layout(
            stages.split_loss.program, self._plan.axes_by_strategy, StageInputs(parameters, examples)
        )

    def _stored_axes(self, i: int) -> list[tuple[str, ...]]:
        return self._homes.axes(self._stages.input_values[i])

    def layout_if_sharded(self, program: StageProgram) -> Layout | None:
        """Return the layout for a stage's joint program; None for a rank of one device."""
        return None if self._homes.ranks.sub_meshes[0].size == 1 else self.layout(program)

    def layout(self, program: StageProgram) -> Layout:
        """Return the layout of a stage's joint program."""
        stage, whole = program.stage, program.joint_program
        if program in self._layouts:
            return self._layouts[program]
        n = program.input_counts.parameters
        loss = self._stages.split_loss.program
        differentiable = [stage.outgoing[k] for k in program.differentiable_outgoing]
        other_values = [*(loss.inputs[i] for i in stage.other_inputs), *stage.incoming, *differentiable]
        examples = {
            n + k: ds
            for k, v in enumerate(other_values)
            if (ds := self._dims_of_classes(v, self._loss_layout.batch.classes))
        }
        positions = {
            n + k: ds
            for k, v in enumerate(other_values)
            if (ds := self._dims_of_classes(v, self._loss_layout.position_classes))
        }
        first_gradient = len(whole.outputs) - n
        frozen = {n + k: i for k, i in enumerate(stage.other_inputs) if self._is_weight(i)}
        self._layouts[program] = self._homes.rank_layout(
            whole,
            self._plan.axes_by_strategy,
            StageInputs(
                {k: self._stored_axes(i) for k, i in (*enumerate(stage.parameters), *frozen.items())},
                examples,
                positions,
                {first_gradient + k: k for k in range(n)},
            ),
            [*program.residuals, *program.weight_residuals, *(v for v in whole.outputs if v is not None)],
        )
        return self._layouts[program]

    def device_shares(self, program: StageProgram) -> list[tuple[Work, DeviceWork]]:
        """Return the products of a stage's joint program, each with the work of one device."""
        if program not in self._shares:
            works = count_work(program.joint_program, Flow(program.joint_program))
            self._shares[program] = list(zip(works, device_shares(self.layout(program), works), strict=True))
        return self._shares[program]

    def _is_weight(self, i: int) -> bool:
        """Return whether an input of the loss is neither examples nor a sum of the batch."""
        stages = self._stages
        operand = stages.split_loss.pieces[i].operand - stages.first_operand
        return operand >= 0 and operand not in stages.call.batch

    def _dims_of_classes(self, v: Value, classes: frozenset[int]) -> tuple[int, ...]:
        return tuple(d for d, c in enumerate(self._loss_layout.dims.nontrivial_classes(v)) if c in classes)


def stage_spec(layout: Layout | None, v: Value) -> PartitionSpec:
    """Return the spec of a value of a stage's joint program."""
    if layout is None:
        return PartitionSpec()
    active = layout.is_activation(v) and v not in layout.state
    return partition_spec(layout.activation_spec(v) if active else layout.stored_spec(v))
