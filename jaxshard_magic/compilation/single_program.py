"""Compile a step for one kind of call: trace, plan, lower and compile."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from ..compile_wait import while_compiling
from ..compiler_log import capture_messages
from ..config.options import GradientOptions
from ..config.request import Request
from ..device_arrays import put
from ..errors import ShardError, list_names
from ..plan import Plan
from ..program import jax_settings
from ..program.batching.followed_program import describe_equation
from ..program.callbacks import Callbacks, has_raising_callbacks, reraise_equinox_errors
from ..program.compiling import compile_in_thread, jit, strict_call
from ..program.flatten_call import FlatCall, shape_structs
from ..program.gc_pause import gc_paused
from ..program.hooks import retrace_context
from ..program.ir import Program
from ..program.memory_kinds import shapes_for_lowering
from ..program.primitives import has_single_device_effects
from ..program.source_lines import full_source_locations
from ..program.trace import Traced, path_name
from ..strategies.footprint import footprint
from ..strategies.sharded_lowering import ShardedLowering
from ..targets import LIMIT_S, CompileResult, CompilerFailed, Target, target_of
from ..temporary import run_in_context
from ..units import byte_text, limit_text
from .attention_choice import suggest_sharded_heads
from .compiled_step import CompiledStep
from .planned_call import PlannedCall, mesh_context, plan_call
from .target_compile import canonical_source_files, compile_lowered_for_target, read_argument_mask
from .tracing import TraceCache

EARLY_S = 1.0  # seconds of compiling after which the plan is announced


@run_in_context(jax_settings.allow_transfers)
@run_in_context(retrace_context)
def compile_step(
    flat_call: FlatCall,
    request: Request,
    *,
    say: Callable[[str], None],
    compile_limit: float = LIMIT_S,
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    traces: TraceCache | None = None,
    allow_plan_only: bool = False,
    on_planned: Callable[[CompiledStep], None] | None = None,
) -> CompiledStep:
    """Trace, plan and compile one kind of call.

    For devices that aren't attached, the target's own compiler runs, within `compile_limit` seconds.

    Args:
        flat_call: The call, with flat inputs.
        request: Strategy, mesh and options.
        say: Progress callback; takes a short description of the current work.
        compile_limit: Time limit in seconds for a target's compiler.
        beside: Makes a context to enter while a compiler works; the compiler needs nothing of Python.
        traces: Shared traces of the same step; new traces are added.
        allow_plan_only: If a target's compiler fails, return a step with the plan alone.
        on_planned: Receives the planned, uncompiled step once the compiler has taken `EARLY_S` seconds.

    Raises:
        ShardError: JAX can't trace the step, or it can't be planned. Exceptions of the user's own code pass through.
        CompilerFailed: A target's compiler failed, unless `allow_plan_only`.
    """
    mesh, step = request.mesh, plan_call(flat_call, request, say=say, traces=traces)
    traced, result, rewritten, plan = (
        step.traced,
        step.result,
        step.rewritten,
        _with_attention_hint(step.plan, request),
    )
    avals, donated = step.avals, step.donated
    if rewritten is not None and rewritten.needs_host_memory:
        _check_host_memory(request)
    target = target_of(mesh)
    devices = target.name if target else f"{mesh.size} device{'s' * (mesh.size > 1)}"
    say(f"compiling for {devices}")
    _check_reduce_dtype(request.gradients, plan)
    _check_ordered_callbacks(traced, mesh)
    start = time.perf_counter()
    n = len(traced.consts)
    shardings, outs = plan.in_shardings, plan.out_shardings
    avals = shapes_for_lowering(avals, shardings[n:])
    constants = shapes_for_lowering(shape_structs(traced.consts), shardings[:n])
    carried = rewritten.carried if rewritten is not None else 0
    same_inputs = rewritten is None or not (carried or rewritten.added)  # no constants and no rows are added
    # Given the user's own pytrees, the compiled program flattens them in C++. Donated and carried inputs need flat
    # arguments.
    whole = (
        flat_call.is_all_arrays
        and result.is_all_arrays
        and same_inputs
        and not donated
        and _accept_any_leaves(flat_call.treedef, result.treedef)
    )
    calls_host = target is None and has_raising_callbacks(traced.closed)
    callbacks = Callbacks(_donation_note(traced, donated)) if calls_host and mesh.size > 1 else None
    failed, planned_only = None, list[CompiledStep]()

    def announce_plan() -> None:
        if on_planned is not None:
            planned_only.append(uncompiled_step(flat_call, request, step))
            on_planned(planned_only[0])

    with (
        while_compiling(announce_plan, EARLY_S),
        mesh_context(mesh),
        full_source_locations(),
        nullcontext() if target is None else canonical_source_files(),
    ):
        # Lowering creates many objects at once, and Python's garbage collector would walk all of them again and again.
        with gc_paused():
            if whole:
                lowering = _lower_pytrees(flat_call, result, plan, constants, avals, shardings, outs, callbacks)
            else:
                lowering = _lower_flat(flat_call, plan, donated, constants, avals, shardings, outs, callbacks)
        if target is None:
            with beside(), capture_messages() as log:
                compiled = compile_in_thread(lowering)
            complaints, read_mask = log.messages, _read_argument_mask(compiled)
            # A compiled program accepts a weak float for a strong one, for which `jax.jit` would compile another.
            kept_avals = [a for i, a in enumerate(avals) if i not in donated]
            weak = (bool(a.weak_type) for a in (*constants, *kept_avals, *(avals[i] for i in donated)))
            call = strict_call(compiled, tuple(weak))
            call = call if callbacks is None else callbacks.reraise_errors(call)
            call = with_equinox_errors(flat_call, call) if calls_host else call
        else:
            try:
                with beside():
                    compiled = compile_lowered_for_target(lowering, target, mesh, compile_limit)
            except CompilerFailed as error:
                if not allow_plan_only:
                    raise CompilerFailed(f"{error}{_describe_planned_memory(plan, n, donated, target)}") from error
                compiled = CompileResult(failed=(failed := str(error)))
            complaints, read_mask, call = compiled.log, read_argument_mask(lowering), None
    consts = put(traced.consts, shardings[:n]) if target is None else list(constants)
    if carried and call is not None:
        call = _with_carried_constants(call, consts, carried)
    return CompiledStep(
        traced,
        plan,
        compiled,
        result,
        flat_call.treedef,
        call,
        whole,
        consts,
        plan.placed_shardings[n:],
        donated,
        step.trace_s,
        time.perf_counter() - start if failed is None else None,
        read_mask,
        source_file(flat_call),
        complaints,
        flat_call.as_shapes(),
        rewritten,
        early_plan=planned_only[0] if planned_only else None,
    )


def uncompiled_step(flat_call: FlatCall, request: Request, planned_call: PlannedCall) -> CompiledStep:
    """Return the step of a planned, uncompiled call, for a report. Calling it is not possible.

    Args:
        flat_call: The call, with flat inputs.
        request: Strategy, mesh and options.
        planned_call: The call as planned.
    """
    plan, n = _with_attention_hint(planned_call.plan, request), len(planned_call.traced.consts)
    return CompiledStep(
        traced=planned_call.traced,
        plan=plan,
        compiled=None,
        result=planned_call.result,
        tree=flat_call.treedef,
        call=None,
        takes_pytrees=True,
        consts=list(planned_call.traced.consts),
        shardings=plan.placed_shardings[n:],
        donated=planned_call.donated,
        trace_s=planned_call.trace_s,
        compile_s=None,
        used_arguments=tuple(v in planned_call.facts.flow.live_values for v in planned_call.facts.program.inputs),
        source_file=source_file(flat_call),
        call_shapes=flat_call.as_shapes(),
        rewritten=planned_call.rewritten,
    )


def _with_attention_hint(plan: Plan, request: Request) -> Plan:
    """Return the plan with a finding on cheaper attention, unless the request names a form of attention."""
    if request.attention is not None or (saving := suggest_sharded_heads(plan)) is None:
        return plan
    return replace(plan, findings=(*plan.findings, saving))


def _check_ordered_callbacks(traced: Traced, mesh: Mesh) -> None:
    """Raise ShardError for ordered callbacks on a mesh of several devices: JAX keeps their order on one device only."""
    if mesh.size == 1 or not has_single_device_effects(traced.closed):
        return
    program = Program(traced.closed)
    e = next(e for e in program.equations if has_single_device_effects(e.jaxpr_eqn) and not e.bodies)
    raise ShardError(
        f"{describe_equation(program, e.index)} calls Python with ordered=True, which JAX does on one "
        "device alone, and the mesh "
        f"has {mesh.size}: leave ordered out (io_callback keeps its order on all of them)"
    )


def _describe_planned_memory(plan: Plan, constants: int, donated: Sequence[int], target: Target) -> str:
    """Return `. By its plan the step takes 11.2 GiB of a device's 15.75 GiB`; empty if the compiler decides layouts."""
    if not isinstance(plan.run, ShardedLowering):
        return ""
    peak, has = (footprint(plan.run, [constants + i for i in donated]).peak, target.chip.usable or target.chip.hbm)
    return f". By its plan the step takes {byte_text(peak)} of a device's {limit_text(has)}"


def _donation_note(traced: Traced, donated: Sequence[int]) -> str | None:
    """Return an error note for a failed call naming the donated inputs; None if nothing is donated."""
    names = list_names(path_name(traced.in_paths[len(traced.consts) + i]) for i in donated)
    line = f"The step had taken over the memory of {names}: these arrays are gone. --no-donate keeps them."
    return line if donated else None


def with_equinox_errors(flat_call: FlatCall, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the program `call` with the errors of the plain step, for a program with callbacks that may raise."""
    # Under jax.jit and nnx.jit errors of `equinox.error_if` stay as XLA words them. `equinox.filter_jit` rewords them,
    # and so does `error_if` in plain Python.
    return call if flat_call.step.numbers else reraise_equinox_errors(call)


def _check_reduce_dtype(options: GradientOptions, plan: Plan) -> None:
    """Raise ShardError for `--reduce-dtype` if the plan sums no gradients over devices."""
    if options.reduce_dtype is not None and plan.batch_shards < 2:
        raise ShardError(
            f"--reduce-dtype {options.reduce_dtype}: {plan.strategy} on this mesh divides no batch, so that no "
            "gradients are added up over devices; leave it out"
        )


def _check_host_memory(request: Request) -> None:
    """Raise ShardError for offloading to devices without pinned host memory."""
    device = request.mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()] if target_of(request.mesh) is None else []
    if kinds and "pinned_host" not in kinds:
        raise ShardError(
            f"--remat {request.gradients.remat} keeps arrays in memory of the kind pinned_host; {device.device_kind} "
            f"has {list_names(kinds)}; --remat dots keeps them on the device"
        )


def _with_carried_constants(call: Callable[..., Any], consts: list, carried: int) -> Callable[..., list]:
    """Return a program that feeds its last `carried` results back as its first constants on the next call."""

    def carrying(given: Any, *rest: Any) -> list:
        outs = call(given, *rest)
        consts[:carried] = outs[-carried:]
        return outs[:-carried]

    return carrying


def source_file(flat_call: FlatCall) -> str | None:
    """Return the file that defines the step, as Python knows it; None if there is none."""
    return getattr(getattr(flat_call.step.inner, "__code__", None), "co_filename", None)


def _accept_any_leaves(*trees: Any) -> bool:
    """Return whether the user's own pytrees accept shardings as leaves."""
    try:
        for tree in trees:
            # Some pytree classes inspect their leaves when they are unflattened, and refuse all but arrays.
            tree.unflatten([object()] * tree.num_leaves)
    except (TypeError, ValueError, AttributeError, AssertionError):
        return False
    return True


def _lower_pytrees(flat_call, result, plan, constants, avals, shardings, outs, callbacks) -> Any:
    """Lower a program that takes and returns the user's own pytrees, flattened in C++ by the compiled program."""

    def program(consts, args, kwargs):
        return result.treedef.unflatten(plan.run(*consts, *jax.tree.leaves((args, kwargs))))

    # XLA names the module after the function, and profiles show that name.
    program.__name__ = program.__qualname__ = flat_call.step.name
    n = len(constants)
    jitted = jit(
        program if callbacks is None else callbacks.suppress_errors(program),
        in_shardings=(shardings[:n], *flat_call.treedef.unflatten(shardings[n:])),
        out_shardings=result.treedef.unflatten(outs),
    )
    return jitted.lower(constants, *flat_call.treedef.unflatten(avals))


def _lower_flat(flat_call, plan, donated, constants, avals, shardings, outs, callbacks) -> Any:
    """Lower a program that takes flat inputs, with the donated inputs in an argument of their own."""
    n = len(constants)
    kept_positions = [i for i in range(len(avals)) if i not in donated]
    back = [(*kept_positions, *donated).index(i) for i in range(len(avals))]

    # `donate_argnums` donates whole arguments alone.
    def program(consts, kept_inputs, donated_inputs):
        flat = (*kept_inputs, *donated_inputs)
        return list(plan.run(*consts, *(flat[i] for i in back)))

    program.__name__ = program.__qualname__ = flat_call.step.name
    input_shardings = (tuple(shardings[n + i] for i in kept_positions), tuple(shardings[n + i] for i in donated))
    program = program if callbacks is None else callbacks.suppress_errors(program)
    jitted = jit(program, in_shardings=(shardings[:n], *input_shardings), out_shardings=outs, donate_argnums=2)
    return jitted.lower(constants, tuple(avals[i] for i in kept_positions), tuple(avals[i] for i in donated))


def _read_argument_mask(compiled: Compiled) -> tuple[bool, ...]:
    """Return for each argument whether the program reads it."""
    # JAX drops arguments that the program does not read, and gives them no sharding.
    return tuple(s is not None for s in compiled.in_tree.flatten_up_to(compiled.input_shardings))
