"""`PipedEntry`: a step split into the stages of a pipeline, for one set of shapes and held values."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from ..compiler_log import captured
from ..errors import ShardError
from ..gradients.accumulate import Accumulated
from ..gradients.options import Inside
from ..gradients.rewriting import Rewriting
from ..pipeline.around import flat, gradient_call
from ..pipeline.executed import Pipeline
from ..pipeline.homes import Ranks
from ..pipeline.jobs import Job
from ..pipeline.loss import Wish
from ..pipeline.measured import unit_seconds
from ..pipeline.options import Piped, default_microbatches
from ..pipeline.split import Split
from ..plan import Finding, Plan
from ..program.batch import Batch
from ..program.follow import told
from ..program.ir import Program
from ..program.peel import Peeled, Result, specs
from ..program.roles import Roles
from ..program.trace import Traced
from ..targets import LIMIT_S, Built, Target, target_of
from .donation import to_donate
from .elsewhere import canonical, elsewhere, reads
from .entry import Entry
from .planned import Planner
from .tracing import traced_call


@dataclass(eq=False)
class PipedEntry(Entry):
    """One pipeline of a step. Its `compiled` is the `Pipeline`, `plan` that of one rank's sub-mesh.

    Of calls that are timed the first is watched action by action (`Pipeline.last`), and every third from then on. That
    makes ranks wait for each action, so that such a call is none of `timings`.
    """

    _timed: int = 0

    def timed(self, inputs: tuple[Any, ...]) -> Any:
        watched, self._timed = self._timed % 3 == 0, self._timed + 1
        if not watched:
            return super().timed(inputs)
        jax.block_until_ready(inputs)
        return jax.block_until_ready(self.call(*inputs, timed=True))


class _Piping:
    """What a planner is given to rewrite the step with: it leaves the step as it is, and takes its gradient call over
    as many microbatches as are asked for, or as suit the batch. What it has seen then: the call, its schedule, the
    batch and the roles."""

    call: Accumulated
    batch: Batch
    roles: Roles

    def __init__(self, rewriting: Rewriting, piped: Piped, stages: int, microbatches: int):
        self._rewriting, self._piped = rewriting, piped
        self._stages, self._microbatches = stages, microbatches

    def __call__(self, batch: Batch, roles: Roles, shards: int) -> Traced:
        rewriting = self._rewriting
        if self._microbatches == 1 and batch.size is not None:
            self._microbatches = default_microbatches(batch.size, shards, self._stages, self._piped)
        self.schedule = self._piped.scheduled(self._stages, self._microbatches)
        rewriting.options = replace(rewriting.options, microbatches=self._microbatches)
        (self.call,) = rewriting.accumulated(batch, roles, shards).values()
        self.batch, self.roles = batch, roles
        return rewriting.plain


@dataclass(frozen=True)
class SplitCall:
    """One kind of call, planned on one rank's sub-mesh and split into the stages of a pipeline. `again(wish)` splits it
    otherwise."""

    traced: Traced
    result: Result
    rewriting: Rewriting
    plan: Plan
    ranks: Ranks
    split: Split
    again: Callable[[Wish], Split]
    trace_s: float

    def pipeline(self, wish: Wish | None = None, taken: Sequence[int] = ()) -> Pipeline:
        """The stages on their ranks, none of them compiled; `taken`: inputs whose memory it may take over."""
        return Pipeline(self.split if wish is None else self.again(wish), self.plan, self.ranks, taken)


def split_call(
    peeled: Peeled,
    strategy: str,
    mesh: Mesh,
    axis: str,
    *,
    planner: Planner,
    given: Mapping[str, PartitionSpec],
    rules: Sequence[tuple[str, PartitionSpec]],
    inside: Inside,
    piped: Piped,
    say: Callable[[str], None],
) -> SplitCall:
    """Trace and split one kind of call, for a pipeline along `axis` of the mesh; nothing is compiled.

    Raises `ShardError` for a step that can't be split so, and whatever the planner raises; an exception of the user's
    own code passes through.
    """
    if inside.precision == "fp16":
        raise ShardError("--precision fp16: its loss scale is none of a pipeline's yet; use --precision bf16")
    ranks = Ranks(mesh, axis)
    say("tracing")
    start = time.perf_counter()
    avals = specs(peeled.leaves)
    asked = replace(inside, microbatches=max(2, inside.microbatches))
    traced, result, rewriting = traced_call(peeled, avals, asked, None, mesh, given, rules)
    assert rewriting is not None
    step = flat(rewriting.captured.closed)
    gradient_call(step)
    trace_s = time.perf_counter() - start
    metadata = [None] * len(traced.consts) + [noted for _, noted, _ in peeled.inputs]
    piping = _Piping(rewriting, piped, len(ranks), inside.microbatches)
    say(f"planning {strategy}")
    plan: Plan = planner(
        traced, ranks.each[0], strategy, specs=given, rules=rules, metadata=tuple(metadata), rewrite=piping
    )
    say(f"splitting into {len(ranks)} stages")
    state, batch = [(i, o) for o, i in piping.roles.state.items()], list(piping.batch.dims)

    def split_at(wish: Wish) -> Split:
        return Split(step, piping.call, piping.schedule, state, batch, wish)

    split = split_at(Wish(piped.cut))
    rewriting.forget()
    findings = (*rewriting.findings, *_left_out(step), *_left_out(piping.call.large))
    plan = replace(plan, findings=(*plan.findings, *findings))
    return SplitCall(plan.traced or traced, result, rewriting, plan, ranks, split, split_at, trace_s)


def build_pipelined(
    peeled: Peeled,
    strategy: str,
    mesh: Mesh,
    axis: str,
    *,
    donate: bool | None,
    inside: Inside,
    piped: Piped,
    say: Callable[[str], None],
    compile_limit: float = LIMIT_S,
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    **asked: Any,
) -> PipedEntry:
    """Split and compile one kind of call, for a pipeline along `axis` of the mesh. `beside()` is a context for while
    its programs compile; `asked`: what else `split_call` takes, and raises for.
    """
    found = split_call(peeled, strategy, mesh, axis, inside=inside, piped=piped, say=say, **asked)
    traced, plan, rewriting = found.traced, found.plan, found.rewriting
    donated = to_donate(peeled, traced, plan, donate)
    n = len(traced.consts)
    taken = [n + i for i in donated]
    pipeline = found.pipeline(taken=taken)
    target = target_of(mesh)
    if piped.balance == "measured":
        if target is not None:
            raise ShardError(
                f"--balance measured: {target.name} is not attached; leave it out to balance FLOPs"
            )
        say("measuring the stages")
        pipeline.compile()
        pipeline = found.pipeline(Wish(piped.cut, unit_seconds(pipeline)), taken)
    say(f"compiling {len(pipeline.jobs())} programs for {len(found.ranks)} stages")
    start = time.perf_counter()
    complaints: list[str] = []
    if target is None:
        with beside(), captured() as log:
            pipeline.compile()
        complaints += log.messages
    else:
        with beside(), canonical():
            pipeline.compile_elsewhere(
                _Compiler(target, compile_limit, complaints),
                lambda done: say(f"compiling for {target.name}: {done}"),
            )
    shardings = [leaf.sharding for leaf in pipeline.leaves]
    return PipedEntry(
        traced,
        replace(plan, mesh=mesh, shares=None),  # those of a whole model on one rank
        pipeline,
        found.result,
        peeled.tree,
        _Call(pipeline, donated, len(peeled.leaves)) if target is None else None,
        False,
        list(jax.device_put(list(traced.consts), shardings[:n])) if target is None else [],
        shardings[n:],
        donated,
        found.trace_s,
        time.perf_counter() - start,
        (True,) * len(shardings),
        getattr(getattr(peeled.step.inner, "__code__", None), "co_filename", None),
        tuple(dict.fromkeys(complaints)),
        peeled.as_shapes(),
        rewriting,
    )


def _left_out(program: Program) -> Iterator[Finding]:
    """What a pipeline does not run: calls that nothing depends on, such as jax.debug.print."""
    read = {v for e in program.equations for v in e.ins} | {v for s in program.scopes() for v in s.outs}
    for e in program.equations:
        if e.eqn.effects and not e.doors and read.isdisjoint(e.outs):
            message = f"A pipeline runs what the step's results depend on, which leaves out {told(program, e.index)}."
            yield Finding("left-out", "warning", message)


class _Compiler:
    """The compiler of devices that are not attached, for one program after the other; what it writes to its log goes
    to `log`."""

    def __init__(self, target: Target, limit_s: float, log: list[str]):
        self._target, self._end, self._log = target, time.monotonic() + limit_s, log

    def __call__(self, job: Job) -> tuple[Built, tuple[bool, ...]]:
        lowered = job.lowered()
        left = max(1.0, self._end - time.monotonic())
        built = elsewhere(lowered, self._target, job.mesh, left)
        self._log += built.log
        return built, reads(lowered)


class _Call:
    """A pipeline as an entry calls its program: constants, the inputs that are kept, and those that are given."""

    def __init__(self, pipeline: Pipeline, donated: Sequence[int], inputs: int):
        self._pipeline = pipeline
        order = [*(i for i in range(inputs) if i not in donated), *donated]
        self._back = [order.index(i) for i in range(inputs)]

    def __call__(self, consts: Sequence[Any], kept: Sequence[Any], given: Sequence[Any], **how: Any) -> list:
        flat_inputs = (*kept, *given)
        return self._pipeline([*consts, *(flat_inputs[i] for i in self._back)], **how)
