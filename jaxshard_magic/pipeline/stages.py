"""Inputs, incoming and outgoing activations, and outputs of each stage of a split loss."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ..program.flow import dependents, operand_roots, required_equations, root_dependencies
from ..program.ir import Equation, Program, Value
from ..program.sizes import nbytes
from .split_loss import stage_of

# How many times smaller than its parameters a value computed from them alone must be to be sent, not recomputed.
_MIN_SIZE_RATIO = 16


@dataclass(frozen=True)
class Stage:
    """One stage of a loss.

    Attributes:
        number: Position among the stages of the schedule.
        incoming: Values received from the stage before.
        outgoing: Values sent to the next stage. A value that skips stages passes through each of them.
        parameters: Positions of the differentiated loss inputs read by this stage.
        other_inputs: Positions of the other loss inputs read by this stage.
        loss_outputs: Positions of the loss outputs computed by this stage.
    """

    number: int
    incoming: tuple[Value, ...]
    outgoing: tuple[Value, ...]
    parameters: tuple[int, ...]
    other_inputs: tuple[int, ...]
    loss_outputs: tuple[int, ...]


def make_stages(loss: Program, trained: Collection[int], stages: int) -> tuple[Stage, ...]:
    """Build the stages of a loss from the name scopes of its equations.

    Equations without a scope run in every stage that reads their results. An exception are small values computed from
    parameters alone, such as weight penalties: the stage with the parameters computes them, and the results travel.

    Args:
        loss: The loss, with the equations of each stage in the name scope of the stage.
        trained: Positions of the parameters among the inputs.
        stages: Number of stages.
    """
    stage_of_equation = {e.index: s for e in loss.top.equations if (s := stage_of(e)) is not None}
    stage_of_equation |= _assign_parameter_sums(loss, [loss.inputs[i] for i in trained], stage_of_equation, stages)
    stage_of_value = {
        v: stage_of_equation[e.index] for e in loss.top.equations if e.index in stage_of_equation for v in e.results
    }
    outputs_of_stage: dict[int, list[int]] = defaultdict(list)
    for j, v in enumerate(loss.outputs):
        outputs_of_stage[stage_of_value.get(v, stages - 1) if v is not None else stages - 1].append(j)
    last_read = _last_readers(loss, stage_of_equation, stage_of_value, stages)
    result = []
    ins: tuple[Value, ...] = ()
    for s in range(stages):
        outs = tuple(v for v, stage in stage_of_value.items() if stage <= s < last_read.get(v, -1))
        made_values = {v for v in outs if stage_of_value[v] == s} | {
            v for j in outputs_of_stage[s] if (v := loss.outputs[j]) is not None
        }
        positions = input_positions_read(loss, made_values, ins)
        result.append(
            Stage(
                s,
                ins,
                outs,
                tuple(i for i in positions if i in trained),
                tuple(i for i in positions if i not in trained),
                tuple(outputs_of_stage[s]),
            )
        )
        ins = outs
    return tuple(result)


def _last_readers(
    loss: Program, stage_of_equation: dict[int, int], stage_of_value: dict[Value, int], stages: int
) -> dict[Value, int]:
    """Return the last stage that reads each stage result, directly or through equations without a scope."""
    last: dict[Value, int] = {}
    behind = root_dependencies(loss.top, stage_of_value)
    for e in loss.top.equations:
        if e.index in stage_of_equation:
            for v in operand_roots(e, behind):
                last[v] = max(last.get(v, -1), stage_of_equation[e.index])
    # The last stage also computes the outputs of equations without a stage, so it reads their sources.
    for v in loss.outputs:
        if v is not None and v not in stage_of_value:
            last.update(dict.fromkeys(behind.get(v, frozenset()), stages - 1))
    return last


def input_positions_read(program: Program, wanted: Iterable[Value], known: Iterable[Value]) -> list[int]:
    """Return the positions of the inputs on which `wanted` depends, without looking past the values `known`."""
    wanted, known = set(wanted), set(known)
    indices = required_equations(program.top, wanted - known, known)
    read = {v for e in program.top.equations if e.index in indices for v in e.operands} | wanted
    return [i for i, v in enumerate(program.inputs) if v in read]


def _assign_parameter_sums(
    loss: Program, parameters: Collection[Value], stage_of_equation: dict[int, int], stages: int
) -> dict[int, int]:
    """Assign equations that compute small values from parameters alone to the one stage that reads these parameters.

    Returns:
        The stage by equation index.
    """
    unassigned = [e for e in loss.top.equations if e.index not in stage_of_equation and e.results]
    not_parameters_only = dependents(loss.top, [v for v in loss.inputs if v not in parameters])
    of = root_dependencies(loss.top, parameters)

    def is_small(e: Equation) -> bool:
        size = sum(nbytes(loss.avals[p]) for p in of.get(e.results[0], ()))
        made = sum(nbytes(loss.avals[v]) for v in e.results)
        return e.results[0] in of and e.results[0] not in not_parameters_only and _MIN_SIZE_RATIO * made <= size

    small_equations = {e.index for e in unassigned if is_small(e)}
    small_values = {v for e in unassigned if e.index in small_equations for v in e.results}
    users: dict[Value, set[int]] = defaultdict(set)
    for s in range(stages):
        mine = {
            v for e in loss.top.equations if stage_of_equation.get(e.index) == s for v in e.operands if v is not None
        }
        run = required_equations(
            loss.top,
            mine - small_values,
            small_values | {v for e in loss.top.equations if e.index in stage_of_equation for v in e.results},
        )
        read = mine | {v for e in unassigned if e.index in run for v in e.operands if v is not None}
        for p in read & set(parameters):
            users[p].add(s)
    pinned: dict[int, int] = {}
    stage_of_value: dict[Value, int] = {}
    for e in unassigned:
        if e.results[0] in not_parameters_only:
            continue
        source_stages = {stage_of_value[v] for v in e.operands if v is not None and v in stage_of_value}
        own_stages = {s for p in of[e.results[0]] for s in users[p]} if e.index in small_equations else set()
        if source_stages or len(own_stages) == 1:
            pinned[e.index] = max(source_stages | own_stages)
            stage_of_value.update(dict.fromkeys(e.results, pinned[e.index]))
    return _drop_early_readers(loss, stage_of_equation, pinned)


def _drop_early_readers(loss: Program, at: dict[int, int], pinned: dict[int, int]) -> dict[int, int]:
    """Remove assignments to a stage later than a reader of the value: the reading stage computes the value itself."""
    makers = {v: e.index for e in loss.top.equations if e.index in pinned for v in e.results}
    while True:
        early = {
            makers[v]
            for e in loss.top.equations
            if (s := at.get(e.index, pinned.get(e.index))) is not None
            for v in e.operands
            if v in makers and pinned.get(makers[v], s) > s
        }
        if not early & pinned.keys():
            return pinned
        pinned = {i: s for i, s in pinned.items() if i not in early}
