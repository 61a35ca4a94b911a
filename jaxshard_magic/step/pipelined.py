"""`PipedEntry`: a step split into the stages of a pipeline, for one set of shapes and held values."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from ..compiler_log import captured
from ..config.request import Request
from ..errors import ShardError
from ..gradients.rewrite import Rewritten
from ..meanwhile import while_compiling
from ..pipeline.around import flat, gradient_calls
from ..pipeline.executed import Pipeline
from ..pipeline.homes import Ranks
from ..pipeline.jobs import Elsewhere, Job
from ..pipeline.loss import Wish
from ..pipeline.measured import unit_seconds
from ..pipeline.outline import Outline
from ..pipeline.split import Split
from ..placing import put
from ..plan import Finding, Plan
from ..program.batching.follow import told
from ..program.callbacks import may_raise
from ..program.facts import Facts
from ..program.garbage import uncollected
from ..program.hooks import retracing
from ..program.ir import Program
from ..program.peel import Peeled, Result, specs
from ..program.settings import own_moves
from ..program.trace import Traced
from ..strategies import plan, understand
from ..targets import LIMIT_S, Built, Target, target_of
from ..temporary import within
from . import building
from .attention import Way, with_attention
from .building import as_equinox_raises, file_of
from .donation import to_donate
from .elsewhere import canonical, elsewhere, reads
from .entry import Entry, kind
from .microbatches import microbatched
from .planned import own_mesh, traced, with_memory_kinds
from .tracing import Traces, captured_at, scans_in_blocks


@dataclass(eq=False)
class PipedEntry(Entry):
    """One pipeline of a step. Its `compiled` is the `Pipeline`, `plan` that of one rank's sub-mesh.

    Of calls that are timed the first is watched action by action (`Pipeline.last`), and every third from then on. That
    makes ranks wait for each action, so that the seconds of such a call are not taken.
    """

    _timed: int = 0

    @cached_property
    def out_shardings(self) -> list[NamedSharding]:
        return [output.sharding for output in self.compiled.outputs]

    def timed(self, inputs: tuple[Any, ...], taken: list[float]) -> Any:
        watched, self._timed = self._timed % 3 == 0, self._timed + 1
        if not watched:
            return super().timed(inputs, taken)
        self.clock.drain()
        jax.block_until_ready(inputs)
        return jax.block_until_ready(self.call(*inputs, timed=True))


@dataclass(frozen=True)
class SplitCall:
    """One kind of call, planned on one rank's sub-mesh and split into the stages of a pipeline. `again(wish)` splits it
    otherwise, as it wishes for each loss."""

    traced: Traced
    result: Result
    rewritten: Rewritten
    plan: Plan
    ranks: Ranks
    split: Split
    again: Callable[[Sequence[Wish]], Split]
    trace_s: float

    def pipeline(self, donated: Sequence[int] = (), wishes: Sequence[Wish] | None = None) -> Pipeline:
        """The stages on their ranks, none of them compiled; `donated`: inputs whose memory it may take over, by their
        positions behind the constants."""
        taken = [len(self.traced.consts) + i for i in donated]
        return Pipeline(self.split if wishes is None else self.again(wishes), self.plan, self.ranks, taken)


@within(uncollected)
@within(retracing)
def split_call(
    peeled: Peeled, request: Request, say: Callable[[str], None], traces: Traces | None = None
) -> SplitCall:
    """Trace and split one kind of call, for a pipeline along the request's axis of stages; nothing is compiled.
    `traces`: of the same step before; what is traced is put there.

    Raises `ShardError` for a step that can't be planned or split so; an exception of the user's own passes through.
    """
    pipeline, options = request.pipeline, request.gradients
    assert pipeline is not None
    if options.precision == "fp16":
        raise ShardError("--precision fp16: its loss scale is none of a pipeline's yet; use --precision bf16")
    ranks = Ranks(request.mesh, request.stage_axis)
    on_rank = request.on_rank(ranks.each[0])
    start = time.perf_counter()
    call, metadata = traced(peeled, request, say, traces), [noted for _, noted, _ in peeled.inputs]
    call = call.at_home(ranks.each[0], whole=False)
    call = scans_in_blocks(peeled, on_rank, call, metadata, whole=False)
    assert call.captured is not None
    step = flat(call.captured.closed)
    gradient_calls(step)
    trace_s = time.perf_counter() - start
    say(f"planning {request.strategy}")
    facts = understand(call.traced, on_rank, metadata)
    rewritten = microbatched(peeled, call, facts, request, on_rank)
    calls = [rewritten.calls[index] for index in sorted(rewritten.calls)]
    schedule = pipeline.scheduled(len(ranks), calls[0].cut.microbatches).for_losses(len(calls))

    def way_of(asked: Request) -> Way:
        return Way(call, facts, None, plan(facts, asked), trace_s)

    decided = with_attention(on_rank, way_of, ("gather", "heads")).plan
    if any(e.name == "attention" for each in calls for e in each.loss.equations):
        decided = replace(
            decided, attention="ring"
        )  # which the losses of microbatches have, and not the step's
    say(f"splitting into {len(ranks)} stages")
    state, batch = [(i, o) for o, i in facts.roles.state.items()], list(facts.batch.dims)

    def split_at(wishes: Sequence[Wish]) -> Split:
        return Split(step, calls, schedule, state, batch, wishes)

    split = split_at([Wish(pipeline.cut)] * len(calls))
    left_out = (
        finding for program in (step, *(each.large for each in calls)) for finding in _left_out(program)
    )
    findings = (*call.findings, *rewritten.findings, *left_out, *_whole(split))
    decided = replace(decided, findings=(*decided.findings, *findings))
    decided = with_memory_kinds(decided, facts.traced, peeled.leaves)
    return SplitCall(facts.traced, call.result, rewritten, decided, ranks, split, split_at, trace_s)


@within(retracing)
def outline(peeled: Peeled, request: Request, facts: Facts) -> Outline:
    """What stages of a call can be made of. `facts`: of the call traced as it is, which keep what was found.

    Raises `ShardError` for a step without a gradient call, or with one in a loop, and what the user's own code raises.
    """
    known = facts.traced.known
    if "outline" not in known:
        with own_mesh(Ranks(request.mesh, request.stage_axis).each[0]):
            known["outline"] = Outline(captured_at(peeled, specs(peeled.leaves)), facts)
    return known["outline"]


@within(own_moves)
@within(retracing)
def build_pipelined(
    peeled: Peeled,
    request: Request,
    *,
    say: Callable[[str], None],
    compile_limit: float = LIMIT_S,
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    traces: Traces | None = None,
    early: Callable[[Entry], None] | None = None,
) -> PipedEntry:
    """Split and compile one kind of call. `beside()` is a context for while its programs compile; `early` is given what
    is planned once the compiler has taken `EARLY_S` seconds; `traces`, and what is raised, as `split_call` has them.
    """
    assert request.pipeline is not None
    with own_mesh(Ranks(request.mesh, request.stage_axis).each[0]):
        call = split_call(peeled, request, say, traces)
    with own_mesh(None):  # each rank's programs are for its own devices
        return _compiled(peeled, request, call, say, compile_limit, beside, early)


@within(own_moves)
@within(retracing)
def plan_pipelined(
    peeled: Peeled, request: Request, *, say: Callable[[str], None], traces: Traces | None = None
) -> PipedEntry:
    """Return the entry of a call that is split into stages, none of which is compiled: for a report. It is never
    called. Raises as `split_call`."""
    assert request.pipeline is not None
    with own_mesh(Ranks(request.mesh, request.stage_axis).each[0]):
        call = split_call(peeled, request, say, traces)
    if request.pipeline.balance == "measured":
        message = "Stages are balanced by their FLOPs here: --balance measured needs a run of them."
        findings = (*call.plan.findings, Finding("balanced-by-flops", "info", message))
        call = replace(call, plan=replace(call.plan, findings=findings))
    with own_mesh(None):
        donated = to_donate(peeled, call.traced, call.plan, request.donate)
        return _entry(peeled, request, call, call.pipeline(donated), donated)


def _entry(
    peeled: Peeled,
    request: Request,
    call: SplitCall,
    pipeline: Pipeline,
    donated: tuple[int, ...],
    compiled: "_Compiled | None" = None,
    planned: PipedEntry | None = None,
) -> PipedEntry:
    """The entry of a pipeline. `compiled`: None for its plan alone; `planned`: the entry of that, where it was told."""
    constants = list(call.traced.consts)
    shardings = [leaf.sharding for leaf in pipeline.leaves]
    n = len(constants)
    run = None if compiled is None else compiled.call
    return PipedEntry(
        traced=call.traced,
        plan=replace(call.plan, mesh=request.mesh, shares=None),  # those of a whole model on one rank
        compiled=pipeline,
        result=call.result,
        tree=peeled.tree,
        call=run,
        whole=False,
        consts=[] if run is None else put(constants, shardings[:n]),
        shardings=shardings[n:],
        donated=donated,
        trace_s=call.trace_s,
        compile_s=None if compiled is None else compiled.seconds,
        reads=(True,) * len(shardings),
        home=file_of(peeled),
        complaints=() if compiled is None else compiled.complaints,
        call_of=peeled.as_shapes(),
        rewritten=call.rewritten,
        planned=planned,
    )


class _Compiled(NamedTuple):
    """What compiling a pipeline gave: the function, None where its devices are not attached; seconds that it took; and
    what the compiler wrote in its log."""

    call: Callable[..., Any] | None
    seconds: float
    complaints: tuple[str, ...]


def _compiled(
    peeled: Peeled,
    request: Request,
    call: SplitCall,
    say: Callable[[str], None],
    compile_limit: float,
    beside: Callable[[], AbstractContextManager[None]],
    early: Callable[[Entry], None] | None,
) -> PipedEntry:
    options, target = request.pipeline, target_of(request.mesh)
    assert options is not None
    donated = to_donate(peeled, call.traced, call.plan, request.donate)
    pipeline = call.pipeline(donated)
    calls_host = target is None and may_raise(call.traced.closed)
    if options.balance == "measured":
        if target is not None:
            raise ShardError(
                f"--balance measured: {target.name} is not attached; leave it out to balance FLOPs"
            )
        say("measuring the stages")
        pipeline.compile(calls_host=calls_host)
        pipeline = call.pipeline(donated, [Wish(options.cut, each) for each in unit_seconds(pipeline)])
    say(f"compiling {len(pipeline.jobs())} programs for {len(call.ranks)} stages")
    start = time.perf_counter()
    complaints: list[str] = []
    planned: list[PipedEntry] = []

    def tell() -> None:
        if early is not None:
            planned.append(_entry(peeled, request, call, pipeline, donated))
            early(planned[0])

    with while_compiling(tell, building.EARLY_S):
        if target is None:
            with beside(), captured() as log:
                pipeline.compile(calls_host=calls_host)
            complaints += log.messages
        else:
            with beside(), canonical():
                pipeline.compile_elsewhere(
                    _compiler(target, compile_limit, complaints),
                    lambda done: say(f"compiling for {target.name}: {done}"),
                )
    arrays = call.traced.closed.in_avals[len(call.traced.consts) :]
    run = _call(pipeline, donated, arrays) if target is None else None
    if run is not None and calls_host:
        run = as_equinox_raises(peeled, run)
    seconds = time.perf_counter() - start
    compiled = _Compiled(run, seconds, tuple(dict.fromkeys(complaints)))
    return _entry(peeled, request, call, pipeline, donated, compiled, planned[0] if planned else None)


def _whole(split: Split) -> Iterator[Finding]:
    """The losses that are not cut into stages, beside others that are."""
    for loss in split.losses:
        if loss.uncut is not None:
            which = f"Loss {loss.number + 1} of the {len(split.losses)} that the step differentiates"
            message = f"{which} runs whole on the last stage while the others wait: {loss.uncut.why}."
            yield Finding("whole-loss", "info", message)


def _left_out(program: Program) -> Iterator[Finding]:
    """What a pipeline does not run: calls that nothing depends on, such as jax.debug.print."""
    read = {v for e in program.equations for v in e.ins} | {v for s in program.scopes() for v in s.outs}
    for e in program.equations:
        if e.eqn.effects and not e.doors and read.isdisjoint(e.outs):
            message = f"A pipeline runs what the step's results depend on, which leaves out {told(program, e.index)}."
            yield Finding("left-out", "warning", message)


def _compiler(target: Target, limit_s: float, log: list[str]) -> Elsewhere:
    """The compiler of devices that are not attached, for one program after the other; what it writes to its log goes
    to `log`."""
    end = time.monotonic() + limit_s

    def compiled(job: Job) -> tuple[Built, tuple[bool, ...]]:
        lowered = job.lowered()
        built = elsewhere(lowered, target, job.mesh, max(1.0, end - time.monotonic()))
        log.extend(built.log)
        return built, reads(lowered)

    return compiled


def _call(pipeline: Pipeline, donated: Sequence[int], avals: Sequence[Any]) -> Callable[..., list]:
    """A pipeline as an entry calls its program: constants, the inputs that are kept, and those that are given.

    Raises TypeError for inputs of another kind, before any rank has begun.
    """
    order = [*(i for i in range(len(avals)) if i not in donated), *donated]
    back = [order.index(i) for i in range(len(avals))]
    kinds = [kind(avals[i]) for i in order]

    def call(consts: Sequence[Any], kept: Sequence[Any], given: Sequence[Any], **how: Any) -> list:
        flat_inputs = (*kept, *given)
        if list(map(kind, flat_inputs)) != kinds:
            raise TypeError("shapes or types differ from those this pipeline was compiled for")
        with own_mesh(None):
            return pipeline([*consts, *(flat_inputs[i] for i in back)], **how)

    return call
