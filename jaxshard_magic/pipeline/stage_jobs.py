"""Programs of a stage as jobs: each slices its microbatch out of the full batch and adds to sums of gradients."""

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..gradients.accumulate import accumulation_dtype
from ..program.ir import Value
from ..strategies.layout import Layout, partition_spec
from ..strategies.sharded_lowering import ShardedLowering
from .jobs import CompileJob, shape_dtype_of
from .programs import ProgramOutput, StageProgram, Subprogram, SubprogramRunner
from .shardings import StepShardings, stage_spec

_HASHED = 2**20  # bytes; constants below this size are compared by value, others by identity
_NUMBER = jax.ShapeDtypeStruct((), jnp.int32)
_NAMES = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}


class StageFunctions:
    """Functions to jit for equal stages, by action kind.

    The signature is `(microbatch number, parameters, other inputs, other values)`, after the sums of gradients where
    the function adds to them.

    Args:
        program: The stage.
        layout: Layout of its joint program, if any.
        first: The first of the equal stages. Profilers show the number in the program names.
    """

    def __init__(self, program: StageProgram, layout: Layout | None, first: int):
        self.runner = runner = SubprogramRunner(program, layout)
        run = {kind: _microbatch_function(program, runner, program.subprogram(kind)) for kind in _NAMES}
        given_back = len(program.differentiable_incoming)
        self.by_kind = {
            **run,
            "B": _accumulating_function(run["B"], given_back),
            "W": _accumulating_function(run["W"], 0),
        }
        for kind, run in self.by_kind.items():
            # A profiler's trace identifies programs by name. Equal stages share a name, and are distinguished by device
            # and order.
            run.__name__ = run.__qualname__ = f"stage{first}_{_NAMES[kind]}"


def _microbatch_function(program: StageProgram, runner: SubprogramRunner, share: Subprogram) -> Callable[..., list]:
    """Return the function that slices microbatch `m` out of the example inputs and runs a subprogram."""
    examples = set(program.example_positions)

    def run(m: Any, parameters: list, others: list, rest: list) -> list:
        mine = [lax.dynamic_index_in_dim(x, m, 0, keepdims=False) if k in examples else x for k, x in enumerate(others)]
        return runner(share, [*parameters, *mine, *rest])

    return run


def _accumulating_function(own: Callable[..., list], first: int) -> Callable[..., tuple[list, list]]:
    """Return `own` with its results from `first` on added to sums."""

    def run(sums: list, m: Any, parameters: list, others: list, rest: list) -> tuple[list, list]:
        made = own(m, parameters, others, rest)
        return made[:first], [a + x.astype(a.dtype) for a, x in zip(sums, made[first:], strict=True)]

    return run


class StageJobs:
    """Shardings and jobs of one stage on its rank.

    Args:
        number: The stage.
        program: Its programs.
        rank: Its rank.
        homes: Shardings of the step.
        microbatches: Number of microbatches.
        known_functions: Functions of earlier stages, shared with equal ones.
        layout: Layout of its joint program; None for a rank of one device.

    Attributes:
        partial_sum_specs: For each parameter, the spec of its gradient as partial sums; None for a complete gradient.
        sum_avals: Shape and dtype of each gradient sum. Partial sums, one per shard of the examples, are used for
            parameters replicated over devices; they are reduced over devices once a step.
        sum_shardings: Shardings of the sums.
        stacked_inputs: Shape and sharding of the example inputs, all microbatches stacked.
    """

    def __init__(
        self,
        number: int,
        program: StageProgram,
        rank: int,
        homes: StepShardings,
        microbatches: int,
        known_functions: dict[Hashable, StageFunctions],
        layout: Layout | None,
    ):
        self.program, self._rank, self._homes, self._layout = program, rank, homes, layout
        self._functions = _shared_functions(known_functions, program, layout, number)
        joint_program, s = program.joint_program, program.input_counts
        inputs = joint_program.inputs
        self.parameter_shardings = [self.sharding(v) for v in inputs[: s.parameters]]
        example_positions = set(program.example_positions)
        self.other_shardings = [
            self._on_rank(PartitionSpec(None, *stage_spec(layout, v))) if k in example_positions else self.sharding(v)
            for k, v in enumerate(inputs[s.parameters : s.parameters + s.other_inputs])
        ]
        self.incoming_shardings = [self.sharding(v) for v in inputs[s.parameters + s.other_inputs : s.forward]]
        self.cotangent_shardings = [self.sharding(v) for v in inputs[s.forward :]]
        self.input_cotangent_shardings = list(map(self._output_sharding, program.input_cotangents))
        self.forward_output_shardings = list(map(self._output_sharding, program.forward_outputs))
        avals = list(map(shape_dtype_of, program.avals))
        self.partial_sum_specs = [self._functions.runner.partial_sum_spec(k) for k in range(s.parameters)]
        self.sum_avals = [self._sum_aval(k, a) for k, a in enumerate(avals[: s.parameters])]
        self.sum_shardings = [
            at if spec is None else self._on_rank(partition_spec(spec))
            for at, spec in zip(self.parameter_shardings, self.partial_sum_specs, strict=True)
        ]
        other_avals = [
            jax.ShapeDtypeStruct((microbatches, *a.shape), a.dtype) if k in example_positions else a
            for k, a in enumerate(avals[s.parameters : s.parameters + s.other_inputs])
        ]
        self.stacked_inputs = [
            (a, self.other_shardings[k]) for k, a in enumerate(other_avals) if k in example_positions
        ]
        self._arg_avals = _NUMBER, avals[: s.parameters], other_avals
        self._arg_shardings = self._on_rank(), self.parameter_shardings, self.other_shardings

    @property
    def lowering(self) -> ShardedLowering | None:
        """The emitter with the layout of the stage, or of the first equal stage; None for a rank of one device."""
        return self._functions.runner.lowering

    def _sum_aval(self, k: int, aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the gradient sum of parameter k."""
        parts = self.partial_sum_specs[k]
        first = () if parts is None or self._layout is None else (self._layout.device_count(parts[0]),)
        return jax.ShapeDtypeStruct((*first, *aval.shape), accumulation_dtype(aval.dtype))

    def reduce_partial_sums(self, k: int, x: Any) -> Any:
        """Return the gradient of parameter k from its sum."""
        return x if self.partial_sum_specs[k] is None else self._functions.runner.reduce_partial_sums(k, x)

    def _on_rank(self, spec: PartitionSpec | None = None) -> NamedSharding:
        return self._homes.on_rank(self._rank, spec)

    def sharding(self, v: Value) -> NamedSharding:
        """Return the sharding of a value of the stage's joint program."""
        return self._on_rank(stage_spec(self._layout, v))

    def _output_sharding(self, end: ProgramOutput) -> NamedSharding:
        return self.sharding(end) if isinstance(end, Value) else self._on_rank()

    def job(self, kind: str) -> CompileJob:
        """Return the job of an action kind: F, B, I or W."""
        program, s = self.program, self.program.input_counts
        inputs = program.joint_program.inputs
        backward_values = [*inputs[s.forward :], *program.residuals]
        other_values = {
            "F": inputs[s.parameters + s.other_inputs : s.forward],
            "B": backward_values,
            "I": backward_values,
            "W": [*backward_values, *program.weight_residuals],
        }[kind]
        outs = {
            "F": [*self.forward_output_shardings, *map(self.sharding, program.residuals)],
            "B": (self.input_cotangent_shardings, self.sum_shardings),
            "I": [*self.input_cotangent_shardings, *map(self.sharding, program.weight_residuals)],
            "W": ([], self.sum_shardings),
        }[kind]
        avals = *self._arg_avals, [shape_dtype_of(program.joint_program.avals[v]) for v in other_values]
        ins = *self._arg_shardings, list(map(self.sharding, other_values))
        # The old sums are donated, so that a rank has them in memory once.
        if kind in "BW":
            return CompileJob(
                self._functions.by_kind[kind], (self.sum_avals, *avals), (self.sum_shardings, *ins), outs, (0,)
            )
        return CompileJob(self._functions.by_kind[kind], avals, ins, outs)


def _shared_functions(
    known: dict[Hashable, StageFunctions], program: StageProgram, layout: Layout | None, number: int
) -> StageFunctions:
    """Return the functions of the first stage with the same program and layout, so that equal stages are traced
    once."""
    key = _program_identity(program, layout)
    if key not in known:
        known[key] = StageFunctions(program, layout, number)
    return known[key]


def _program_identity(program: StageProgram, layout: Layout | None) -> Hashable:
    """Return a key that is equal for stages with the same program and layout."""
    whole = program.joint_program
    specs = tuple(stage_spec(layout, v) for v in whole.inputs)
    ends = (
        program.input_counts,
        len(program.forward_outputs),
        tuple(program.differentiable_incoming),
        tuple(program.example_positions),
    )
    constants = tuple(map(_constant_identity, whole.closed.consts))
    return str(whole.closed.jaxpr), constants, specs, ends, program.halved_backward


def _constant_identity(x: Any) -> Hashable:
    """Return a key for a constant: its bytes if small, else the identity of the array."""
    if getattr(x, "nbytes", _HASHED) >= _HASHED or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return id(x)
    return x.shape, x.dtype, hashlib.sha256(np.asarray(x).tobytes()).hexdigest()
