"""Compile a step as the stages of a pipeline, for one set of shapes and static values."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from ..compile_wait import while_compiling
from ..compiler_log import capture_messages
from ..config.options import PipelineOptions
from ..config.pipeline_microbatches import default_microbatches, possible_microbatches
from ..config.request import Request
from ..device_arrays import put
from ..errors import ShardError
from ..gradients.captures import has_one_example, indivisible_reason, needed_captures
from ..gradients.microbatch_calls import find_coupling
from ..gradients.rewrite import Rewritten, as_one_microbatch, in_microbatches
from ..pipeline.executor import PipelineExecutor, measure_unit_seconds
from ..pipeline.jobs import CompileJob, TargetCompiler
from ..pipeline.outer_program import flatten_step, gradient_calls
from ..pipeline.outline import Outline
from ..pipeline.shardings import RankMeshes
from ..pipeline.split_loss import SplitOptions
from ..pipeline.split_step import SplitStep
from ..plan import Finding, Plan
from ..program.batching.followed_program import describe_equation
from ..program.callbacks import has_raising_callbacks
from ..program.explicit_axes import ExplicitAxes
from ..program.facts import Facts
from ..program.flatten_call import FlatCall, ResultStructure, shape_structs
from ..program.gc_pause import gc_paused
from ..program.hooks import retrace_context
from ..program.ir import Program
from ..program.jax_settings import allow_transfers
from ..program.trace import Traced
from ..strategies import find_facts, plan
from ..targets import LIMIT_S, CompileResult, Target, target_of
from ..temporary import run_in_context
from . import single_program
from .attention_choice import TracedPlan, choose_attention
from .compiled_step import CompiledStep, type_key
from .donation import choose_donated
from .planned_call import mesh_context, trace_or_reuse, with_memory_kinds
from .single_program import source_file, with_equinox_errors
from .target_compile import canonical_source_files, compile_lowered_for_target, read_argument_mask
from .tracing import TraceCache, TracedCall, capture_at_sizes, capture_gradients, with_blocked_scans


@dataclass(eq=False)
class PipelinedStep(CompiledStep):
    """Step compiled as a pipeline. `compiled` is the pipeline, and `plan` the plan of one rank's sub-mesh.

    Of the timed calls the first, and every third after, records the time of each action. The seconds of such
    a call are not counted.
    """

    _timed: int = 0

    @cached_property
    def out_shardings(self) -> list[NamedSharding]:
        """Shardings of the flat outputs."""
        return [output.sharding for output in self.compiled.outputs]

    def run_timed(self, inputs: tuple[Any, ...], taken: list[float]) -> Any:
        """Return the pipeline's results after waiting for the call; every third call records its actions."""
        watched, self._timed = self._timed % 3 == 0, self._timed + 1
        # To record actions, ranks wait for each action, so the seconds of a recorded call are no step time.
        if not watched:
            return super().run_timed(inputs, taken)
        self.clock.drain()
        jax.block_until_ready(inputs)
        return jax.block_until_ready(self.call(*inputs, timed=True))


@dataclass(frozen=True)
class SplitCall:
    """One kind of call, planned on the sub-mesh of one rank and split into the stages of a pipeline.

    Attributes:
        traced: Traced step.
        result: Recipe for the step's result from flat outputs.
        rewritten: Gradient calls over microbatches.
        plan: Plan for the sub-mesh of one rank.
        ranks: Sub-meshes of the ranks.
        split: The step in stages.
        split_again: Splits the step once more, with options for each loss.
        trace_s: Seconds spent on tracing.
    """

    traced: Traced
    result: ResultStructure
    rewritten: Rewritten
    plan: Plan
    ranks: RankMeshes
    split: SplitStep
    split_again: Callable[[Sequence[SplitOptions]], SplitStep]
    trace_s: float

    def pipeline(self, donated: Sequence[int] = (), wishes: Sequence[SplitOptions] | None = None) -> PipelineExecutor:
        """Return the stages on their ranks, uncompiled.

        Args:
            donated: Positions of donated inputs, without constants.
            wishes: Options for the split of each loss; None for the present split.
        """
        positions = [len(self.traced.consts) + i for i in donated]
        return PipelineExecutor(
            self.split if wishes is None else self.split_again(wishes), self.plan, self.ranks, positions
        )


@run_in_context(gc_paused)
@run_in_context(retrace_context)
def split_call(
    flat_call: FlatCall, request: Request, say: Callable[[str], None], traces: TraceCache | None = None
) -> SplitCall:
    """Trace one kind of call and split the step into stages along the request's stage axis; compile nothing.

    Args:
        flat_call: The call, with flat inputs.
        request: Strategy, mesh and options.
        say: Progress callback.
        traces: Shared traces of the same step; new traces are added.

    Raises:
        ShardError: The step can't be planned or split. Exceptions of the user's own code pass through.
    """
    pipeline, options = request.pipeline, request.gradients
    assert pipeline is not None
    if options.precision == "fp16":
        raise ShardError("--precision fp16: its loss scale is none of a pipeline's yet; use --precision bf16")
    ranks = RankMeshes(request.mesh, request.stage_axis)
    # The sub-meshes of all ranks have one shape, so the step is planned for the first alone.
    on_rank = request.on_rank(ranks.sub_meshes[0])
    start = time.perf_counter()
    call, own_placements = trace_or_reuse(flat_call, request, say, traces), flat_call.own_placements
    call = call.on_mesh(ranks.sub_meshes[0], whole=False)
    call = with_blocked_scans(flat_call, on_rank, call, own_placements, whole=False)
    assert call.captured is not None
    step = flatten_step(call.captured.closed)
    # Raises for a step that can't be split, before anything is planned.
    gradient_calls(step)
    trace_s = time.perf_counter() - start
    say(f"planning {request.strategy}")
    facts = find_facts(call.traced, on_rank, own_placements)
    rewritten = rewrite_in_microbatches(flat_call, call, facts, request, on_rank)
    calls = [rewritten.calls[index] for index in sorted(rewritten.calls)]
    schedule = pipeline.scheduled(len(ranks), calls[0].cut.microbatches).for_losses(len(calls))

    def way_of(asked: Request) -> TracedPlan:
        return TracedPlan(call, facts, None, plan(facts, asked), trace_s)

    chosen_plan = choose_attention(on_rank, way_of, ("gather", "heads")).plan
    if any(e.name == "attention" for each in calls for e in each.loss.equations):
        # The losses of microbatches contain ring attention; the step that was planned does not.
        chosen_plan = replace(chosen_plan, attention="ring")
    say(f"splitting into {len(ranks)} stages")
    state, batch = [(i, o) for o, i in facts.roles.state.items()], list(facts.batch.input_dims)

    def split_at(wishes: Sequence[SplitOptions]) -> SplitStep:
        return SplitStep(step, calls, schedule, state, batch, wishes)

    split = split_at([SplitOptions(pipeline.cut)] * len(calls))
    left_out = (
        finding for program in (step, *(each.large for each in calls)) for finding in _dropped_effect_findings(program)
    )
    findings = (*call.findings, *rewritten.findings, *left_out, *_uncut_loss_findings(split))
    findings = (*chosen_plan.findings, *findings)
    chosen_plan = replace(chosen_plan, findings=findings, explicit_axes=call.axes.mesh is not None)
    chosen_plan = with_memory_kinds(chosen_plan, facts.traced, flat_call.leaves)
    return SplitCall(facts.traced, call.result, rewritten, chosen_plan, ranks, split, split_at, trace_s)


@run_in_context(retrace_context)
def outline_call(flat_call: FlatCall, request: Request, facts: Facts) -> Outline:
    """Return the possible pieces for stages of a call, computed once for `facts`.

    Args:
        flat_call: The call, with flat inputs.
        request: Strategy, mesh and options.
        facts: Analysis of the call as traced without changes.

    Raises:
        ShardError: The step has no gradient call, or one in a loop. Exceptions of the user's own code pass through.
    """
    known, axes = facts.traced.cache, ExplicitAxes(flat_call.explicit_mesh, request.mesh)
    if "outline" not in known:
        with mesh_context(RankMeshes(request.mesh, request.stage_axis).sub_meshes[0]):
            known["outline"] = Outline(capture_gradients(flat_call, shape_structs(flat_call.leaves), axes), facts)
    return known["outline"]


@run_in_context(allow_transfers)
@run_in_context(retrace_context)
def compile_pipelined(
    flat_call: FlatCall,
    request: Request,
    *,
    say: Callable[[str], None],
    compile_limit: float = LIMIT_S,
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    traces: TraceCache | None = None,
    on_planned: Callable[[CompiledStep], None] | None = None,
) -> PipelinedStep:
    """Split one kind of call into stages and compile the programs.

    Args:
        flat_call: The call, with flat inputs.
        request: Strategy, mesh and options.
        say: Progress callback.
        compile_limit: Time limit in seconds for a target's compiler.
        beside: Makes a context to enter while programs compile.
        traces: Shared traces of the same step; new traces are added.
        on_planned: Receives the planned, uncompiled step once the compiler has taken `EARLY_S` seconds.

    Raises:
        ShardError: The step can't be planned or split. Exceptions of the user's own code pass through.
    """
    assert request.pipeline is not None
    with mesh_context(RankMeshes(request.mesh, request.stage_axis).sub_meshes[0]):
        call = split_call(flat_call, request, say, traces)
    with mesh_context(None):  # each rank's programs run on its own sub-mesh
        return _compile_stages(flat_call, request, call, say, compile_limit, beside, on_planned)


@run_in_context(allow_transfers)
@run_in_context(retrace_context)
def uncompiled_pipelined(
    flat_call: FlatCall, request: Request, *, say: Callable[[str], None], traces: TraceCache | None = None
) -> PipelinedStep:
    """Return the step of a call split into uncompiled stages, for a report. Calling it is not possible.

    Args:
        flat_call: The call, with flat inputs.
        request: Strategy, mesh and options.
        say: Progress callback.
        traces: Shared traces of the same step; new traces are added.

    Raises:
        ShardError: The step can't be planned or split. Exceptions of the user's own code pass through.
    """
    assert request.pipeline is not None
    with mesh_context(RankMeshes(request.mesh, request.stage_axis).sub_meshes[0]):
        call = split_call(flat_call, request, say, traces)
    if request.pipeline.balance == "measured":
        message = "Stages are balanced by their FLOPs here: --balance measured needs a run of them."
        findings = (*call.plan.findings, Finding("balanced-by-flops", "info", message))
        call = replace(call, plan=replace(call.plan, findings=findings))
    with mesh_context(None):
        donated = choose_donated(flat_call, call.traced, call.plan, request.donate)
        return _pipelined_step(flat_call, request, call, call.pipeline(donated), donated)


def _pipelined_step(
    flat_call: FlatCall,
    request: Request,
    call: SplitCall,
    pipeline: PipelineExecutor,
    donated: tuple[int, ...],
    compiled: "_CompileResult | None" = None,
    early_plan: PipelinedStep | None = None,
) -> PipelinedStep:
    """Return the step of a pipeline.

    Args:
        flat_call: The call, with flat inputs.
        request: Strategy, mesh and options.
        call: The call, split.
        pipeline: The stages on their ranks.
        donated: Positions of donated inputs.
        compiled: Outcome of compiling; None for a plan alone.
        early_plan: The step planned only, if it was announced.
    """
    constants = list(call.traced.consts)
    shardings = [leaf.sharding for leaf in pipeline.leaves]
    n = len(constants)
    run = None if compiled is None else compiled.call
    return PipelinedStep(
        traced=call.traced,
        plan=replace(call.plan, mesh=request.mesh, shares=None),  # the shares are of a whole model on one rank
        compiled=pipeline,
        result=call.result,
        tree=flat_call.treedef,
        call=run,
        takes_pytrees=False,
        consts=shape_structs(constants) if run is None else put(constants, shardings[:n]),
        shardings=shardings[n:],
        donated=donated,
        trace_s=call.trace_s,
        compile_s=None if compiled is None else compiled.seconds,
        used_arguments=(True,) * len(shardings),
        source_file=source_file(flat_call),
        compiler_messages=() if compiled is None else compiled.messages,
        call_shapes=flat_call.as_shapes(),
        rewritten=call.rewritten,
        early_plan=early_plan,
    )


class _CompileResult(NamedTuple):
    """Outcome of compiling a pipeline.

    Attributes:
        call: The function; None if the devices are not attached.
        seconds: Seconds spent on compiling.
        messages: Messages in the compiler's log.
    """

    call: Callable[..., Any] | None
    seconds: float
    messages: tuple[str, ...]


def _compile_stages(
    flat_call: FlatCall,
    request: Request,
    call: SplitCall,
    say: Callable[[str], None],
    compile_limit: float,
    beside: Callable[[], AbstractContextManager[None]],
    on_planned: Callable[[CompiledStep], None] | None,
) -> PipelinedStep:
    """Compile the stages of a split call, balanced as requested."""
    options, target = request.pipeline, target_of(request.mesh)
    assert options is not None
    donated = choose_donated(flat_call, call.traced, call.plan, request.donate)
    pipeline = call.pipeline(donated)
    calls_host = target is None and has_raising_callbacks(call.traced.closed)
    if options.balance == "measured":
        if target is not None:
            raise ShardError(f"--balance measured: {target.name} is not attached; leave it out to balance FLOPs")
        say("measuring the stages")
        pipeline.compile(calls_host=calls_host)
        pipeline = call.pipeline(donated, [SplitOptions(options.cut, each) for each in measure_unit_seconds(pipeline)])
    say(f"compiling {len(pipeline.jobs())} programs for {len(call.ranks)} stages")
    start = time.perf_counter()
    complaints: list[str] = []
    planned_only: list[PipelinedStep] = []

    def announce_plan() -> None:
        if on_planned is not None:
            planned_only.append(_pipelined_step(flat_call, request, call, pipeline, donated))
            on_planned(planned_only[0])

    with while_compiling(announce_plan, single_program.EARLY_S):
        if target is None:
            with beside(), capture_messages() as log:
                pipeline.compile(calls_host=calls_host)
            complaints += log.messages
        else:
            with beside(), canonical_source_files():
                pipeline.compile_for_target(
                    _target_compiler(target, compile_limit, complaints),
                    lambda done: say(f"compiling for {target.name}: {done}"),
                )
    arrays = call.traced.closed.in_avals[len(call.traced.consts) :]
    run = _as_program(pipeline, donated, arrays) if target is None else None
    if run is not None and calls_host:
        run = with_equinox_errors(flat_call, run)
    seconds = time.perf_counter() - start
    # The programs of several stages cause the same messages.
    compiled = _CompileResult(run, seconds, tuple(dict.fromkeys(complaints)))
    return _pipelined_step(
        flat_call, request, call, pipeline, donated, compiled, planned_only[0] if planned_only else None
    )


def _uncut_loss_findings(split: SplitStep) -> Iterator[Finding]:
    """Yield a finding for each loss that runs whole on the last stage, besides losses cut into stages."""
    for loss in split.losses:
        if loss.split_error is not None:
            which = f"Loss {loss.number + 1} of the {len(split.losses)} that the step differentiates"
            message = f"{which} runs whole on the last stage while the others wait: {loss.split_error.why}."
            yield Finding("whole-loss", "info", message)


def _dropped_effect_findings(program: Program) -> Iterator[Finding]:
    """Yield a finding for each effect (such as jax.debug.print) without influence on the results: pipelines don't run
    it."""
    read = {v for e in program.equations for v in e.operands} | {v for s in program.sub_jaxprs() for v in s.outputs}
    for e in program.equations:
        if e.jaxpr_eqn.effects and not e.bodies and read.isdisjoint(e.results):
            message = (
                "A pipeline runs what the step's results depend on, which leaves out "
                f"{describe_equation(program, e.index)}."
            )
            yield Finding("left-out", "warning", message)


def _target_compiler(target: Target, limit_s: float, log: list[str]) -> TargetCompiler:
    """Return the compiler for devices that aren't attached, for one program after another within a common time limit.

    Args:
        target: Target hardware.
        limit_s: Time limit in seconds for all programs.
        log: Receives the messages of the compiler's log.
    """
    end = time.monotonic() + limit_s

    def compiled(job: CompileJob) -> tuple[CompileResult, tuple[bool, ...]]:
        lowered = job.lower()
        built = compile_lowered_for_target(lowered, target, job.mesh, max(1.0, end - time.monotonic()))
        log.extend(built.log)
        return built, read_argument_mask(lowered)

    return compiled


def _as_program(pipeline: PipelineExecutor, donated: Sequence[int], avals: Sequence[Any]) -> Callable[..., list]:
    """Return a pipeline as a function of constants, kept inputs and donated inputs.

    The function raises TypeError for inputs of another shape or dtype before any rank has begun.
    """
    order = [*(i for i in range(len(avals)) if i not in donated), *donated]
    back = [order.index(i) for i in range(len(avals))]
    kinds = [type_key(avals[i]) for i in order]

    def call(consts: Sequence[Any], kept_inputs: Sequence[Any], donated_inputs: Sequence[Any], **how: Any) -> list:
        flat_inputs = (*kept_inputs, *donated_inputs)
        if list(map(type_key, flat_inputs)) != kinds:
            raise TypeError("shapes or types differ from those this pipeline was compiled for")
        with mesh_context(None):
            return pipeline([*consts, *(flat_inputs[i] for i in back)], **how)

    return call


def rewrite_in_microbatches(
    flat_call: FlatCall, call: TracedCall, facts: Facts, request: Request, on_rank: Request
) -> Rewritten:
    """Rewrite the gradient calls of a pipeline to run over microbatches.

    Without a requested number, up to four microbatches for each stage are taken if the numbers of the plain step stay
    the same; otherwise the whole batch is one microbatch, with a finding.

    Args:
        flat_call: The call, with flat inputs.
        call: Traced call.
        facts: Analysis of the step.
        request: Request for the whole pipeline.
        on_rank: Request for one rank of the pipeline.

    Raises:
        ShardError: The requested number is impossible, or the schedule has no form for a single microbatch.
    """
    options, pipeline, stages = request.gradients, request.pipeline, request.mesh.shape[request.stage_axis]
    captured, shards = call.captured, on_rank.shards
    assert pipeline is not None
    assert captured is not None

    def rewrite_for(parts: int) -> Rewritten:
        gradient_options = replace(options, microbatches=parts)
        needed = needed_captures(captured, facts, gradient_options, shards, pipeline=True)
        return in_microbatches(facts, capture_at_sizes(flat_call, call, needed), gradient_options, ring=request.rings)

    if options.microbatches > 1:
        pipeline.scheduled(stages, options.microbatches)  # raises for a number without a schedule
        return rewrite_for(options.microbatches)
    why, consequence, fix = indivisible_reason(captured, facts.batch), "", None
    for parts in _candidate_counts(facts.batch.size, shards, stages, pipeline):
        try:
            rewritten = rewrite_for(parts)
        except ShardError as error:
            why = error.why
            continue
        coupling = next(filter(None, map(find_coupling, rewritten.calls.values())), None)
        if coupling is None:
            return rewritten
        why = coupling.reason
        if coupling.same_loss:
            consequence, fix = (f" In {parts} parts it has the numbers of a loop over them.", f"--microbatches {parts}")
        else:
            consequence = f" In {parts} microbatches it would train on another loss: the mean of those of the parts."
        break
    if has_one_example(captured, facts):
        why, consequence, fix = "the batch has one example", "", None
    usual = "--schedule 1f1b" + " --chunks 1" * (pipeline.chunks is not None)
    if (refused := pipeline.refused(stages, 1)) is not None:
        raise ShardError(
            f"--schedule {pipeline.schedule}: the batch is taken whole ({why}), and {refused.partition(';')[0]}; use "
            f"{usual}",
            fix=usual,
        )
    rewritten = as_one_microbatch(facts, captured, options, on_rank.mesh, shards, ring=request.rings)
    # A single stage waits for no other, so there is nothing to warn of.
    if stages == 1:
        return rewritten
    message = f"The whole batch is one microbatch, so that one stage works at a time: {why}.{consequence}"
    finding = Finding("whole-batch", "warning", message, fix)
    return replace(rewritten, undivided_reason=why, findings=(finding, *rewritten.findings))


def _candidate_counts(size: int | None, shards: int, stages: int, pipeline: PipelineOptions) -> list[int]:
    """Return the numbers of microbatches to try: the largest, then the largest with several examples on each shard."""
    if size is None or size == 1:
        return []
    first = default_microbatches(size, shards, stages, pipeline)
    # User code may take a batch of one example for a single example.
    several = possible_microbatches(size, 2 * shards, stages, pipeline)
    return [m for m in dict.fromkeys([first, *several[:1]]) if m > 1]
