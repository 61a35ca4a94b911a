"""Making an `Entry`: one kind of call traced, planned, lowered and compiled."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from ..compiler_log import captured
from ..config.options import GradientOptions
from ..config.request import Request
from ..errors import ShardError, one_of
from ..meanwhile import while_compiling
from ..placing import put
from ..plan import Plan
from ..program import settings
from ..program.batching.follow import told
from ..program.callbacks import Callbacks, may_raise, with_errors_of_equinox
from ..program.compiling import compile_apart, jit
from ..program.garbage import uncollected
from ..program.hooks import retracing
from ..program.ir import Program
from ..program.lines import lines_kept
from ..program.memory_kinds import lowered_as
from ..program.peel import Peeled, specs
from ..program.primitives import runs_on_one_device
from ..program.strict import strict_call
from ..program.trace import Traced, path_name
from ..strategies.footprint import footprint
from ..strategies.hold import Hold
from ..targets import LIMIT_S, Built, CompilerFailed, Target, target_of
from ..temporary import within
from ..units import byte_text, limit_text
from .attention import hint
from .elsewhere import canonical, elsewhere, reads
from .entry import Entry
from .planned import Planned, own_mesh, planned
from .tracing import Traces

EARLY_S = 1.0  # seconds of compiling that are worth a look at the plan


@within(settings.own_moves)
@within(retracing)
def build_entry(
    peeled: Peeled,
    request: Request,
    *,
    say: Callable[[str], None],
    compile_limit: float = LIMIT_S,
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    traces: Traces | None = None,
    plan_stands: bool = False,
    early: Callable[[Entry], None] | None = None,
) -> Entry:
    """Trace, plan and compile one kind of call; for devices that aren't attached, by their own compiler within
    `compile_limit` seconds. `beside()` is a context for while a compiler works, which needs nothing of Python's.
    `plan_stands`: where that compiler fails, the entry has the plan alone. `early` is given what is planned, as
    `plan_entry` has it, once the compiler has taken `EARLY_S` seconds.

    Raises `ShardError` for a step that jax can't trace and for what can't be planned; an exception of the user's own
    code passes through.
    """
    mesh, step = request.mesh, planned(peeled, request, say=say, traces=traces)
    traced, result, rewritten, plan = step.traced, step.result, step.rewritten, _with_hint(step.plan, request)
    avals, donated = step.avals, step.donated
    if rewritten is not None and rewritten.needs_host_memory:
        _has_host_memory(request)
    target = target_of(mesh)
    devices = target.name if target else f"{mesh.size} device{'s' * (mesh.size > 1)}"
    say(f"compiling for {devices}")
    _has_sums(request.gradients, plan)
    _has_order(traced, mesh)
    start = time.perf_counter()
    n = len(traced.consts)
    shardings, outs = plan.in_shardings, plan.out_shardings
    avals = lowered_as(avals, shardings[n:])
    constants = lowered_as(specs(traced.consts), shardings[:n])
    carried = rewritten.carried if rewritten is not None else 0
    same_inputs = rewritten is None or not (carried or rewritten.added)  # as the user's trees have them
    whole = (
        peeled.all_traced
        and result.plain
        and same_inputs
        and not donated
        and _hold_anything(peeled.tree, result.tree)
    )
    lowered = _lower_whole if whole else _lower_flat
    calls_host = target is None and may_raise(traced.closed)
    callbacks = Callbacks(_taken_over(traced, donated)) if calls_host and mesh.size > 1 else None
    failed, alone = None, list[Entry]()

    def tell() -> None:
        if early is not None:
            alone.append(plan_entry(peeled, request, step))
            early(alone[0])

    with (
        while_compiling(tell, EARLY_S),
        own_mesh(mesh),
        lines_kept(),
        nullcontext() if target is None else canonical(),
    ):
        with uncollected():
            lowering = lowered(peeled, result, plan, donated, constants, avals, shardings, outs, callbacks)
        if target is None:
            with beside(), captured() as log:
                compiled = compile_apart(lowering)
            complaints, read = log.messages, _kept(compiled)
            kept = [a for i, a in enumerate(avals) if i not in donated]
            weak = (bool(a.weak_type) for a in (*constants, *kept, *(avals[i] for i in donated)))
            call = strict_call(compiled, tuple(weak))
            call = call if callbacks is None else callbacks.raising(call)
            call = as_equinox_raises(peeled, call) if calls_host else call
        else:
            try:
                with beside():
                    compiled = elsewhere(lowering, target, mesh, compile_limit)
            except CompilerFailed as error:
                if not plan_stands:
                    raise CompilerFailed(f"{error}{_by_its_plan(plan, n, donated, target)}") from error
                compiled = Built(failed=(failed := str(error)))
            complaints, read, call = compiled.log, reads(lowering), None
    consts = put(traced.consts, shardings[:n]) if target is None else []
    if carried and call is not None:
        call = _carrying(call, consts, carried)
    return Entry(
        traced,
        plan,
        compiled,
        result,
        peeled.tree,
        call,
        whole,
        consts,
        shardings[n:],
        donated,
        step.trace_s,
        time.perf_counter() - start if failed is None else None,
        read,
        file_of(peeled),
        complaints,
        peeled.as_shapes(),
        rewritten,
        planned=alone[0] if alone else None,
    )


def plan_entry(peeled: Peeled, request: Request, step: Planned) -> Entry:
    """Return the entry of a call that is planned and not compiled: for a report. It is never called."""
    plan, n = _with_hint(step.plan, request), len(step.traced.consts)
    return Entry(
        traced=step.traced,
        plan=plan,
        compiled=None,
        result=step.result,
        tree=peeled.tree,
        call=None,
        whole=True,
        consts=list(step.traced.consts),
        shardings=plan.in_shardings[n:],
        donated=step.donated,
        trace_s=step.trace_s,
        compile_s=None,
        reads=tuple(v in step.facts.flow.used for v in step.facts.program.inputs),
        home=file_of(peeled),
        call_of=peeled.as_shapes(),
        rewritten=step.rewritten,
    )


def _with_hint(plan: Plan, request: Request) -> Plan:
    """The plan with what another form of attention would save, where the line asks for none."""
    if request.attention is not None or (saving := hint(plan)) is None:
        return plan
    return replace(plan, findings=(*plan.findings, saving))


def _has_order(traced: Traced, mesh: Mesh) -> None:
    """Refuse calls to Python whose order JAX keeps on one device alone, where there are more."""
    if mesh.size == 1 or not runs_on_one_device(traced.closed):
        return
    program = Program(traced.closed)
    e = next(e for e in program.equations if runs_on_one_device(e.eqn) and not e.doors)
    raise ShardError(
        f"{told(program, e.index)} calls Python with ordered=True, which JAX does on one device alone, and the mesh "
        f"has {mesh.size}: leave ordered out (io_callback keeps its order on all of them)"
    )


def _by_its_plan(plan: Plan, constants: int, donated: Sequence[int], target: Target) -> str:
    """`. By its plan the step takes 11.2 GiB of a device's 15.75 GiB`; empty where the compiler decides the layout."""
    if not isinstance(plan.run, Hold):
        return ""
    peak, has = (
        footprint(plan.run, [constants + i for i in donated]).peak,
        target.chip.usable or target.chip.hbm,
    )
    return f". By its plan the step takes {byte_text(peak)} of a device's {limit_text(has)}"


def _taken_over(traced: Traced, donated: Sequence[int]) -> str | None:
    """A line for a call that ends in an error, of a step that takes over the memory of some flat inputs."""
    names = one_of(path_name(traced.in_paths[len(traced.consts) + i]) for i in donated)
    line = f"The step had taken over the memory of {names}: these arrays are gone. --no-donate keeps them."
    return line if donated else None


def as_equinox_raises(peeled: Peeled, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` of a step's program, some of whose callbacks may raise, with the errors that the step itself has.

    Under jax.jit and nnx.jit those of `equinox.error_if` stay as XLA has them; `equinox.filter_jit` rewords them, and
    so does `error_if` in Python.
    """
    return call if peeled.step.numbers else with_errors_of_equinox(call)


def _has_sums(options: GradientOptions, plan: Plan) -> None:
    """Refuse a type to add gradients up in where the plan has devices add up none."""
    if options.reduce_dtype is not None and plan.shards < 2:
        raise ShardError(
            f"--reduce-dtype {options.reduce_dtype}: {plan.strategy} on this mesh divides no batch, so that no "
            "gradients are added up over devices; leave it out"
        )


def _has_host_memory(request: Request) -> None:
    """Refuse to offload where the devices have no host memory of their own."""
    device = request.mesh.devices.flat[0]
    kinds = (
        [memory.kind for memory in device.addressable_memories()] if target_of(request.mesh) is None else []
    )
    if kinds and "pinned_host" not in kinds:
        raise ShardError(
            f"--remat {request.gradients.remat} keeps arrays in memory of the kind pinned_host; {device.device_kind} "
            f"has {one_of(kinds)}; --remat dots keeps them on the device"
        )


def _carrying(call: Callable[..., Any], consts: list, carried: int) -> Callable[..., list]:
    """A program whose first constants come back as its last results, and are those of the next call."""

    def carrying(given: Any, *rest: Any) -> list:
        outs = call(given, *rest)
        consts[:carried] = outs[-carried:]
        return outs[:-carried]

    return carrying


def file_of(peeled: Peeled) -> str | None:
    """The file that defines the step, as Python knows it; None where it has none."""
    return getattr(getattr(peeled.step.inner, "__code__", None), "co_filename", None)


def _hold_anything(*trees: Any) -> bool:
    """May the user's own pytrees hold shardings in the place of arrays? Some look at what they are given."""
    try:
        for tree in trees:
            tree.unflatten([object()] * tree.num_leaves)
    except (TypeError, ValueError, AttributeError, AssertionError):
        return False
    return True


def _lower_whole(peeled, result, plan, donated, constants, avals, shardings, outs, callbacks) -> Any:
    """Lowered for the user's own trees, which the compiled program then opens in C++."""

    def program(consts, args, kwargs):
        return result.tree.unflatten(plan.run(*consts, *jax.tree.leaves((args, kwargs))))

    program.__name__ = program.__qualname__ = peeled.step.name
    n = len(constants)
    jitted = jit(
        program if callbacks is None else callbacks.caught(program),
        in_shardings=(shardings[:n], *peeled.tree.unflatten(shardings[n:])),
        out_shardings=result.tree.unflatten(outs),
    )
    return jitted.lower(constants, *peeled.tree.unflatten(avals))


def _lower_flat(peeled, result, plan, donated, constants, avals, shardings, outs, callbacks) -> Any:
    n = len(constants)
    kept = [i for i in range(len(avals)) if i not in donated]
    back = [(*kept, *donated).index(i) for i in range(len(avals))]

    def program(consts, kept, given):
        flat = (*kept, *given)
        return list(plan.run(*consts, *(flat[i] for i in back)))

    program.__name__ = program.__qualname__ = peeled.step.name
    places = tuple(shardings[n + i] for i in kept), tuple(shardings[n + i] for i in donated)
    program = program if callbacks is None else callbacks.caught(program)
    jitted = jit(program, in_shardings=(shardings[:n], *places), out_shardings=outs, donate_argnums=2)
    return jitted.lower(constants, tuple(avals[i] for i in kept), tuple(avals[i] for i in donated))


def _kept(compiled: Compiled) -> tuple[bool, ...]:
    """Whether the program reads each of its arguments: jax gives those it dropped no sharding."""
    return tuple(s is not None for s in compiled.in_tree.flatten_up_to(compiled.input_shardings))
