"""Trace one call of a step: unchanged, with captured gradient calls, or as written for one device of the mesh."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from jax.sharding import Mesh

from ..code_locations import location_text
from ..config.options import GradientOptions
from ..config.request import Request
from ..errors import ShardError
from ..gradients.captures import Captures, CaptureShapes, NeededCaptures
from ..gradients.rewrite import require_gradients, with_plain_gradients
from ..plan import Finding
from ..program.blocked_scan import scan_in_blocks
from ..program.escapes import return_escaped_values
from ..program.explicit_axes import (
    NO_EXPLICIT_AXES,
    AnyMesh,
    ExplicitAxes,
    KeptPlacements,
)
from ..program.flatten_call import FlatCall, ResultStructure, shape_structs
from ..program.gathered_weights import may_gather_weights, sort_gathered_products
from ..program.gradient_calls import capture_vjp
from ..program.hooks import Scan, hook_associative_scan, user_code
from ..program.ir import Program
from ..program.jax_settings import check_jit_enabled
from ..program.per_device import DeviceMapping, device_trace_context
from ..program.python_state import trace_without_side_effects
from ..program.trace import Traced, Vjp, trace
from ..program.trace_errors import explain_trace_errors
from ..program.unrolled_experts.batch_unrolled_experts import NO_EXPERT_LOOPS, ExpertLoopLines, batch_unrolled_experts
from ..program.unrolled_experts.detection import may_have_unrolled_experts
from ..program.user_placements import drop_foreign_placements
from ..strategies import find_facts, find_pmap_axes
from ..strategies.positions import sequence_axes

BATCHED_EXPERTS_CODE = "experts-together"  # code of the finding on batched loops over experts
SORTED_LOOKUPS_CODE = "experts-looked-up"  # code of the finding on matrices that tokens look up
RUNS_ONCE_CODE = "runs-once"  # code of the finding on side effects at tracing


@dataclass(frozen=True)
class TracedCall:
    """Trace of one call of a step.

    Attributes:
        traced: The step; for a step written for one device, the program of each device.
        result: Recipe for the step's result from flat outputs.
        captured: The step with each gradient call as one equation; None if nothing rewrites gradient calls.
        mapped: Mapping over devices; None for a step on whole arrays.
        home: Removes the step's own placements on other devices from a trace; None if they stay.
        left_out: Lines of the removed placements.
        loops: Loops over experts.
        looked_up: Lines that look up a matrix for each token, rewritten to sorted tokens.
        effects: Side effects of a step without jit, executed at tracing only, in words with their line.
        axes: Mesh with explicit axes under which the step was traced, if any, and which sharding types are kept.
        scans: Number of associative scans.
        blocks: Number of blocks of each associative scan; 1 for JAX's own form.
    """

    traced: Traced
    result: ResultStructure
    captured: Traced | None = None
    mapped: DeviceMapping | None = None
    home: Callable[[Traced], tuple[Traced, tuple[str, ...]]] | None = None
    left_out: tuple[str, ...] = ()
    loops: ExpertLoopLines = NO_EXPERT_LOOPS
    looked_up: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    axes: ExplicitAxes = NO_EXPLICIT_AXES
    scans: int = 0
    blocks: int = 1

    def on_mesh(self, mesh: Mesh, *, whole: bool) -> "TracedCall":
        """Return the call with its placements restricted to the devices of `mesh`.

        Args:
            mesh: Mesh of the step, or of one rank.
            whole: Whether `mesh` is the mesh of the whole step.

        Raises:
            ShardError: The step has a `jax.shard_map` over other devices.
        """
        home = partial(drop_foreign_placements, mesh=mesh, covers_all_devices=whole)
        (traced, left_out), captured = home(self.traced), self.captured
        if captured is not None:
            captured, left_out = home(captured)
        return replace(self, traced=traced, captured=captured, home=home, left_out=left_out)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings on removed placements, loops over experts, looked-up matrices and side effects."""
        collected = tuple(
            Finding("experts-apart", "warning", f"{describe_sequential_loop(why)}.") for why in self.loops.obstacles
        )
        if self.loops.batched_lines:
            message = (
                f"Experts that the step goes through one by one ({_some_lines(self.loops.batched_lines)}) "
                "are worked on side by "
                "side, on each device its own: the numbers are the loop's, but for the order in which a sum is rounded."
            )
            collected = (Finding(BATCHED_EXPERTS_CODE, "info", message), *collected)
        if self.looked_up:
            message = (
                f"No token gets a copy of the matrix that it looks up ({_some_lines(self.looked_up)}): "
                "tokens are sorted by "
                "their matrices, multiplied in groups (jax.lax.ragged_dot) and put back. The numbers are the step's, "
                "but for how products are rounded."
            )
            collected = (Finding(SORTED_LOOKUPS_CODE, "info", message), *collected)
        if self.effects:
            message = (
                f"The step {'; '.join(self.effects)}: that is done when it is traced, and not in every call. "
                "jax.debug.print prints in every call; time and write around the call."
            )
            collected = (Finding(RUNS_ONCE_CODE, "info", message), *collected)
        if not self.left_out:
            return collected
        lines = ", ".join(self.left_out)
        message = (
            f"The step says where arrays lie, on other devices than this strategy's ({lines}): that is left out, and "
            "the strategy places them."
        )
        return (Finding("placements", "info", message), *collected)


class TraceCache(dict[Hashable, TracedCall]):
    """Traces of one step, by the key of the call, shared by several requests.

    Args:
        captures: Whether some requests will need captured gradient calls.
    """

    def __init__(self, captures: bool = False):
        super().__init__()
        self.captures = captures

    def get_trace(self, flat_call: FlatCall, request: Request) -> TracedCall:
        """Return the traced call, from an earlier request if possible. Raises the errors of `trace_call`."""
        # Under `spmd` the layouts of a step with sharding types are those of its types.
        typed = request.compiler_decides and flat_call.explicit_mesh is not None
        key = ("typed", flat_call.key) if typed else flat_call.key
        needs_captures, call = _needs_captures(request), self.get(key)
        if call is None or (needs_captures and call.captured is None):
            call = self._trace(flat_call, request, needs_captures or typed)
            self[key] = call
        if not needs_captures:
            return replace(call, captured=None)
        assert call.captured is not None
        require_gradients(call.captured, request.gradients)
        return call

    def _trace(self, flat_call: FlatCall, request: Request, for_this: bool) -> TracedCall:
        """Trace a call: for this request alone, or with captured gradient calls if any request needs them and the step
        allows it."""
        if self.captures and not for_this:
            try:
                return trace_call(flat_call, request, captures=True)
            except ShardError:  # the call may be traceable without captures
                pass
        return trace_call(flat_call, request)


def _needs_captures(request: Request) -> bool:
    """Return whether a request needs captured gradient calls."""
    return request.gradients.rewrites or request.pipeline is not None or request.rings


def trace_call(flat_call: FlatCall, request: Request, *, captures: bool = False, blocks: int = 1) -> TracedCall:
    """Trace one call of a step.

    Args:
        flat_call: The call, with flat inputs.
        request: Strategy, mesh and options.
        captures: Capture gradient calls even if the request doesn't need them.
        blocks: Number of blocks for associative scans.

    Raises:
        ShardError: JAX can't trace the step, or an option doesn't apply to the step.
    """
    name, mapped, avals = flat_call.step.name, None, shape_structs(flat_call.leaves)
    check_jit_enabled(name)
    if request.per_device:
        _check_per_device_options(name, request.gradients)
        mapped = find_pmap_axes(flat_call, request)
        avals = mapped.local_avals(avals)
    elif flat_call.step.pmap is not None:
        raise ShardError(
            f"{name} is decorated with jax.pmap, so that it is written for one device: use %%shard pmap, or take "
            "jax.pmap and its collectives out",
            fix="%%shard pmap",
        )
    captured, scans = None, _ScanHook(blocks)
    kept = KeptPlacements.ALL if request.compiler_decides else KeptPlacements.WRITTEN
    # The work of one device has no sharding.
    axes = NO_EXPLICIT_AXES if mapped else ExplicitAxes(flat_call.explicit_mesh, request.mesh, kept)
    if captures or _needs_captures(request):
        captured, result, mesh = _trace_flat_call(flat_call, avals, mapped, axes, capture_vjp, scans)
        require_gradients(captured, request.gradients)
        traced = with_plain_gradients(captured, mapped)
    else:
        traced, result, mesh = _trace_flat_call(flat_call, avals, mapped, axes, scans=scans)
    traced = traced if mapped is None else mapped.per_device_trace(traced, result)
    state = flat_call.state
    effects = () if state is None else (f"{what} ({location_text(*where)})" for what, where in state.effects.items())
    effects, count = tuple(effects), scans.count
    return TracedCall(
        traced,
        result,
        captured,
        mapped,
        effects=effects,
        axes=replace(axes, mesh=mesh, fallback=None),
        scans=count,
        blocks=blocks,
    )


class _ScanHook:
    """Hook that counts associative scans and makes each in blocks.

    Args:
        blocks: Number of blocks; 1 for JAX's own form.
    """

    def __init__(self, blocks: int):
        self.blocks, self.count = blocks, 0

    def __call__(self, scan: Scan) -> Scan:
        def counted(*args: Any) -> Any:
            self.count += 1
            return scan(*args) if self.blocks == 1 else scan_in_blocks(scan, self.blocks, *args)

        return counted


def with_blocked_scans(
    flat_call: FlatCall, request: Request, call: TracedCall, own_placements: Sequence[Any], *, whole: bool
) -> TracedCall:
    """Return the call with associative scans in as many blocks as the sequence has shards, traced again.

    The call itself is returned if no sequence is sharded or nothing is scanned.

    Args:
        flat_call: The call, with flat inputs.
        request: Strategy, mesh and options.
        call: Traced call.
        own_placements: Flax partitioning, or own sharding, of the flat inputs.
        whole: Whether the request's mesh is the mesh of the whole step.

    Raises:
        ShardError: The call can't be traced or analyzed.
    """
    if "sp" not in request.axes or not call.scans:
        return call
    facts = find_facts(call.traced, request, own_placements)
    blocks = prod(request.mesh.shape[axis] for axis in sequence_axes(facts, request))
    captures = call.captured is not None
    # The cache belongs to the trace, which several requests share.
    known, key = call.traced.cache, ("scans in blocks", blocks, captures, request.mesh)
    if key not in known and blocks > 1:
        again = trace_call(flat_call, request, captures=captures, blocks=blocks)
        known[key] = again.on_mesh(request.mesh, whole=whole)
    return known.get(key, call)


def with_batched_experts(flat_call: FlatCall, request: Request, call: TracedCall) -> TracedCall:
    """Return the call with expert loops batched, and with tokens sorted by the matrices that they look up.

    Traced again if gradients are taken already; the call itself is returned if neither rewrite applies.

    Args:
        flat_call: The call, with flat inputs.
        request: Strategy, mesh and options.
        call: Traced call.
    """
    program = Program(call.traced.closed)
    if not (may_have_unrolled_experts(program) or may_gather_weights(program, range(len(program.avals)))):
        return call
    known, key = call.traced.cache, ("experts side by side", request.mesh)
    if key not in known:
        known[key] = _batch_experts(flat_call, call)
    batched: TracedCall = known[key]
    return batched if _needs_captures(request) else replace(batched, captured=None)


def _batch_experts(flat_call: FlatCall, call: TracedCall) -> TracedCall:
    """Rewrite expert loops and lookups in the step with captured gradient calls, and take gradients of the result."""
    captured, result, home = call.captured, call.result, call.home
    assert home is not None
    if captured is None:
        try:
            captured, result, _ = _trace_flat_call(
                flat_call,
                shape_structs(flat_call.leaves),
                None,
                call.axes,
                capture_vjp,
                _ScanHook(call.blocks),
            )
        except ShardError:  # the step takes gradients where they can't be captured
            return call
        captured, _ = home(captured)
    batched, loops = batch_unrolled_experts(captured)
    by_sorting, looked_up = sort_gathered_products(batched or captured)
    if (rewritten := by_sorting or batched) is None:
        return replace(call, loops=loops)

    def with_experts(traced: Traced) -> tuple[Traced, tuple[str, ...]]:
        traced, left_out = home(traced)
        traced = batch_unrolled_experts(traced)[0] or traced
        return sort_gathered_products(traced)[0] or traced, left_out

    plain = with_plain_gradients(rewritten)
    return replace(
        call, traced=plain, result=result, captured=rewritten, home=with_experts, loops=loops, looked_up=looked_up
    )


def _some_lines(lines: Sequence[str]) -> str:
    """Return up to three lines, and the number of further lines."""
    more = len(lines) - 3
    return ", ".join(lines[:3]) + (f" and {more} more" if more > 0 else "")


def describe_sequential_loop(reason: str) -> str:
    """Return a message on an expert loop that stays sequential."""
    return (
        f"ep: {reason}; have all of them do the same with matrices of their own and what all of them "
        "read, or stay with "
        "dp or fsdp"
    )


def capture_at_sizes(flat_call: FlatCall, call: TracedCall, needs: NeededCaptures) -> Captures:
    """Return the captures of a step, also at the batch sizes of `needs`.

    Args:
        flat_call: The call, with flat inputs.
        call: Traced call, with captured gradient calls.
        needs: Shapes to trace the step for.

    Raises:
        ShardError: The step can't be traced for another number of examples.
    """
    assert call.captured is not None
    padded, part = (
        None if shapes is None else _capture_at_size(flat_call, shapes, call) for shapes in (needs.padded, needs.part)
    )

    def twice() -> tuple[Traced, Traced]:
        small, large = (_capture_at_size(flat_call, shapes, call) for shapes in needs.at_two)
        return small, large

    return Captures(call.captured, needs, padded, part, call.mapped, twice if needs.at_two else None)


def _capture_at_size(flat_call: FlatCall, shapes: CaptureShapes, call: TracedCall) -> Traced:
    """Return the step with captured gradient calls, traced for other shapes."""
    try:
        captured = capture_gradients(flat_call, shapes.avals, call.axes, call.mapped, call.blocks)
        return captured if call.home is None else call.home(captured)[0]
    except ShardError:
        raise
    except Exception as error:  # user code may fail in any way at other sizes
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise ShardError(
            f"the step can't be traced for {shapes.examples} examples in the place of "
            f"{shapes.batch_size}: {why}; take its "
            "sizes from the arrays' shapes",
            option=shapes.option,
        ) from error


def capture_gradients(
    flat_call: FlatCall,
    avals: Sequence[Any],
    axes: ExplicitAxes,
    mapped: DeviceMapping | None = None,
    blocks: int = 1,
) -> Traced:
    """Return the step with each gradient call as one equation, traced for flat arguments of the given avals.

    Args:
        flat_call: The call, with flat inputs.
        avals: Avals of the flat arguments.
        axes: How a step written for explicit axes is traced.
        mapped: Mapping over devices; None for a step on whole arrays.
        blocks: Number of blocks for associative scans.
    """
    return _trace_flat_call(flat_call, avals, mapped, axes, capture_vjp, _ScanHook(blocks))[0]


def _trace_flat_call(
    flat_call: FlatCall,
    avals: Sequence[Any],
    mapped: DeviceMapping | None,
    axes: ExplicitAxes,
    wrap_vjp: Callable[[Vjp], Vjp] | None = None,
    scans: Callable[[Scan], Scan] = lambda scan: scan,
) -> tuple[Traced, ResultStructure, AnyMesh | None]:
    """Trace a flat call.

    Args:
        flat_call: The call, with flat inputs.
        avals: Avals of the flat arguments.
        mapped: Mapping over devices; None for a step on whole arrays.
        axes: Meshes to trace a step under that is written for explicit axes.
        wrap_vjp: Replaces the step's calls of vjp; None to leave them.
        scans: Replaces associative scans.

    Returns:
        The trace, without sharding types; the structure of the result; and the mesh with explicit axes, if any.
    """
    name, paths = flat_call.step.name, [path for path, _, _ in flat_call.inputs]
    calls, results, shardings = [flat_call], list[ResultStructure](), flat_call.own_shardings

    def fun(*leaves: Any) -> tuple[list[Any], list[Any]]:
        outs, out_paths, result = calls[0].flat_function(*leaves)
        results.append(result)
        return outs, out_paths

    def trace_under(avals: Sequence[Any]) -> Traced:
        with explain_trace_errors(name), device_trace_context(mapped), user_code(), hook_associative_scan(scans):
            return return_escaped_values(trace(fun, avals, paths, wrap_vjp))

    def trace_once() -> tuple[Traced, AnyMesh | None]:
        return axes.trace(trace_under, avals, shardings)

    try:
        traced, mesh = trace_without_side_effects(trace_once, flat_call.state, name)
        closed, mesh = axes.untyped(traced.closed, traced.consts, mesh)
        return traced if closed is traced.closed else replace(traced, closed=closed), results[-1], mesh
    finally:
        # A kept exception keeps the frames of its traceback and their closures: these must not hold the call's arrays.
        calls.clear()


def _check_per_device_options(name: str, options: GradientOptions) -> None:
    """Raise ShardError for gradient options without effect on a step written for one device."""
    reduces = [f"--{k.replace('_', '-')} {v}" for k, v in options.given.items() if k.startswith("reduce")]
    if reduces:
        raise ShardError(
            f"{' '.join(reduces)}: under pmap gradients are reduced where {name} has its pmean, once a step, and in "
            "their own type; leave it out"
        )
    if options.pad:
        raise ShardError(
            f"--pad: under pmap {name} is run on each device's part as it is written, and would count rows that are "
            "added; use a batch that divides, or dp"
        )
