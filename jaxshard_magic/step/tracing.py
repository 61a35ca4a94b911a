"""One call of a step traced: as it is, with its gradient calls captured, or as one of the mesh's devices has it."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from jax.sharding import Mesh

from ..config.options import GradientOptions
from ..config.request import Request
from ..errors import ShardError
from ..gradients.captures import Captures, Needs, Shapes
from ..gradients.rewrite import has_gradients, with_plain_gradients
from ..places import place
from ..plan import Finding
from ..program.capture import capturing
from ..program.escapes import with_escapes
from ..program.hooks import Scan, scans_by, users_own
from ..program.in_turn.found import may_be_in_turn
from ..program.in_turn.side_by_side import NONE, Loops, experts_together
from ..program.ir import Program
from ..program.looked_up import lookups_sorted, may_look_up
from ..program.mapped import Mapped, on_a_device
from ..program.peel import Peeled, Result, specs
from ..program.placements import kept_to
from ..program.python_state import traced_as_each_call
from ..program.scans import scan_in_blocks
from ..program.settings import refuse_disabled
from ..program.trace import Traced, Vjp, trace
from ..program.untraceable import explained
from ..strategies import spread, understand
from ..strategies.positions import sequence_axes

SIDE_BY_SIDE = "experts-together"  # the code of what is said of loops over experts that run so
BY_SORTING = "experts-looked-up"  # and of matrices that tokens look up
ONCE = "runs-once"  # and of what Python does in a step beside computing


@dataclass(frozen=True)
class TracedCall:
    """One call of a step as it was traced.

    Args:
        traced: the step; of one written for one device, what each does.
        result: how its result is put together.
        captured: the step with each gradient call as one equation; None where nothing rewrites them.
        mapped: how it is spread over devices; None where it is written for whole arrays.
        home: what takes the step's own placements on other devices out of a trace; None where they stay.
        left_out: the lines of these.
        loops: those over experts.
        looked_up: the lines that look up a matrix for each token, which is sorted by them.
        effects: what a step that is not jitted does when it is traced alone, in words with its line.
        scans: how many associative scans it makes.
        blocks: in how many blocks each of them runs; 1 for as JAX makes it.
    """

    traced: Traced
    result: Result
    captured: Traced | None = None
    mapped: Mapped | None = None
    home: Callable[[Traced], tuple[Traced, tuple[str, ...]]] | None = None
    left_out: tuple[str, ...] = ()
    loops: Loops = NONE
    looked_up: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    scans: int = 0
    blocks: int = 1

    def at_home(self, mesh: Mesh, *, whole: bool) -> "TracedCall":
        """The call on the devices of `mesh`; `whole` and errors as `kept_to` has them."""
        home = partial(kept_to, mesh=mesh, whole=whole)
        (traced, left_out), captured = home(self.traced), self.captured
        if captured is not None:
            captured, left_out = home(captured)
        return replace(self, traced=traced, captured=captured, home=home, left_out=left_out)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is to be said of placements that are left out, and of loops over experts."""
        found = tuple(Finding("experts-apart", "warning", f"{apart(why)}.") for why in self.loops.apart)
        if self.loops.together:
            message = (
                f"Experts that the step goes through one by one ({_some(self.loops.together)}) are worked on side by "
                "side, on each device its own: the numbers are the loop's, but for the order in which a sum is rounded."
            )
            found = (Finding(SIDE_BY_SIDE, "info", message), *found)
        if self.looked_up:
            message = (
                f"No token gets a copy of the matrix that it looks up ({_some(self.looked_up)}): tokens are sorted by "
                "their matrices, multiplied in groups (jax.lax.ragged_dot) and put back. The numbers are the step's, "
                "but for how products are rounded."
            )
            found = (Finding(BY_SORTING, "info", message), *found)
        if self.effects:
            message = (
                f"The step {'; '.join(self.effects)}: that is done when it is traced, and not in every call. "
                "jax.debug.print prints in every call; time and write around the call."
            )
            found = (Finding(ONCE, "info", message), *found)
        if not self.left_out:
            return found
        lines = ", ".join(self.left_out)
        message = (
            f"The step says where arrays lie, on other devices than this strategy's ({lines}): that is left out, and "
            "the strategy places them."
        )
        return (Finding("placements", "info", message), *found)


class Traces(dict[Hashable, TracedCall]):
    """Calls of one step as they are traced, by their keys, for all who ask for it: several requests share a trace, and
    `captures` says that some of them will want the gradient calls captured."""

    def __init__(self, captures: bool = False):
        super().__init__()
        self.captures = captures

    def of(self, peeled: Peeled, request: Request) -> TracedCall:
        """The call traced, or as it was before under another request. Raises as `trace_call`."""
        wanted, call = _captures(request), self.get(peeled.key)
        if call is None or (wanted and call.captured is None):
            call = self[peeled.key] = self._traced(peeled, request, wanted)
        if not wanted:
            return replace(call, captured=None)
        assert call.captured is not None
        has_gradients(call.captured, request.gradients)
        return call

    def _traced(self, peeled: Peeled, request: Request, wanted: bool) -> TracedCall:
        if self.captures and not wanted:
            try:
                return trace_call(peeled, request, captures=True)
            except ShardError:  # of a call that may be traced as it is
                pass
        return trace_call(peeled, request)


def _captures(request: Request) -> bool:
    return request.gradients.rewrites or request.pipeline is not None or request.rings


def trace_call(peeled: Peeled, request: Request, *, captures: bool = False, blocks: int = 1) -> TracedCall:
    """Trace one call of a step, its gradient calls captured where the request rewrites them or has a pipeline, or
    `captures` says so, its associative scans in `blocks`.

    Raises `ShardError` for a step that jax can't trace, and for options that it has no place for.
    """
    name, mapped, avals = peeled.step.name, None, specs(peeled.leaves)
    refuse_disabled(name)
    if request.per_device:
        _has_place(name, request.gradients)
        mapped = spread(peeled, request)
        avals = mapped.parts(avals)
    elif peeled.step.pmap is not None:
        raise ShardError(
            f"{name} is decorated with jax.pmap, so that it is written for one device: use %%shard pmap, or take "
            "jax.pmap and its collectives out",
            fix="%%shard pmap",
        )
    captured, scans = None, _Scans(blocks)
    if captures or _captures(request):
        captured, result = _traced(peeled, avals, mapped, capturing, scans)
        has_gradients(captured, request.gradients)
        traced = with_plain_gradients(captured, mapped)
    else:
        traced, result = _traced(peeled, avals, mapped, scans=scans)
    traced = traced if mapped is None else mapped.traced(traced, result)
    state = peeled.state
    effects = () if state is None else (f"{what} ({place(*where)})" for what, where in state.effects.items())
    return TracedCall(
        traced, result, captured, mapped, effects=tuple(effects), scans=scans.met, blocks=blocks
    )


class _Scans:
    """Associative scans made in `blocks`; `met`: how many have been."""

    def __init__(self, blocks: int):
        self.blocks, self.met = blocks, 0

    def __call__(self, scan: Scan) -> Scan:
        def counted(*args: Any) -> Any:
            self.met += 1
            return scan(*args) if self.blocks == 1 else scan_in_blocks(scan, self.blocks, *args)

        return counted


def scans_in_blocks(
    peeled: Peeled, request: Request, call: TracedCall, metadata: Sequence[Any], *, whole: bool
) -> TracedCall:
    """A `call` with as many blocks in each associative scan as positions are divided into, traced anew for that; itself
    where no positions are divided or nothing is scanned. `whole`: as of `TracedCall.at_home`. Raises as `trace_call`
    and `understand`."""
    if "sp" not in request.axes or not call.scans:
        return call
    facts = understand(call.traced, request, metadata)
    blocks = prod(request.mesh.shape[axis] for axis in sequence_axes(facts, request))
    captures = call.captured is not None
    known, key = call.traced.known, ("scans in blocks", blocks, captures, request.mesh)
    if key not in known and blocks > 1:
        again = trace_call(peeled, request, captures=captures, blocks=blocks)
        known[key] = again.at_home(request.mesh, whole=whole)
    return known.get(key, call)


def experts_side_by_side(peeled: Peeled, request: Request, call: TracedCall) -> TracedCall:
    """A `call` with the experts side by side that it goes through one by one, and with its tokens sorted by those that
    they look up, traced anew where its gradients are taken already; itself where it does neither."""
    program = Program(call.traced.closed)
    if not (may_be_in_turn(program) or may_look_up(program, range(len(program.avals)))):
        return call
    known, key = call.traced.known, ("experts side by side", request.mesh)
    if key not in known:
        known[key] = _side_by_side(peeled, request, call)
    found: TracedCall = known[key]
    return found if _captures(request) else replace(found, captured=None)


def _side_by_side(peeled: Peeled, request: Request, call: TracedCall) -> TracedCall:
    captured, result, home = call.captured, call.result, call.home
    assert home is not None
    if captured is None:
        try:
            captured, result = _traced(peeled, specs(peeled.leaves), None, capturing, _Scans(call.blocks))
        except ShardError:  # it takes them where they can't be captured
            return call
        captured, _ = home(captured)
    together, loops = experts_together(captured)
    by_sorting, looked_up = lookups_sorted(together or captured)
    if (rewritten := by_sorting or together) is None:
        return replace(call, loops=loops)

    def with_experts(traced: Traced) -> tuple[Traced, tuple[str, ...]]:
        traced, left_out = home(traced)
        traced = experts_together(traced)[0] or traced
        return lookups_sorted(traced)[0] or traced, left_out

    plain = with_plain_gradients(rewritten)
    return replace(
        call,
        traced=plain,
        result=result,
        captured=rewritten,
        home=with_experts,
        loops=loops,
        looked_up=looked_up,
    )


def _some(lines: Sequence[str]) -> str:
    more = len(lines) - 3
    return ", ".join(lines[:3]) + (f" and {more} more" if more > 0 else "")


def apart(why: str) -> str:
    """What is told of a loop whose experts stay one after the other."""
    return (
        f"ep: {why}; have all of them do the same with matrices of their own and what all of them read, or stay with "
        "dp or fsdp"
    )


def capture(peeled: Peeled, call: TracedCall, needs: Needs) -> Captures:
    """The step of `call` captured at the shapes of `needs` as well.

    Raises `ShardError` for a step that can't be traced for other numbers of examples.
    """
    assert call.captured is not None
    padded, part = (
        None if shapes is None else _captured_at(peeled, shapes, call)
        for shapes in (needs.padded, needs.part)
    )

    def twice() -> tuple[Traced, Traced]:
        small, large = (_captured_at(peeled, shapes, call) for shapes in needs.twice)
        return small, large

    return Captures(call.captured, needs, padded, part, call.mapped, twice if needs.twice else None)


def _captured_at(peeled: Peeled, shapes: Shapes, call: TracedCall) -> Traced:
    try:
        captured = captured_at(peeled, shapes.avals, call.mapped, call.blocks)
        return captured if call.home is None else call.home(captured)[0]
    except ShardError:
        raise
    except Exception as error:  # whatever the user's code does where it slices or divides by other sizes
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise ShardError(
            f"the step can't be traced for {shapes.examples} examples in the place of {shapes.of}: {why}; take its "
            "sizes from the arrays' shapes",
            option=shapes.option,
        ) from error


def captured_at(
    peeled: Peeled, avals: Sequence[Any], mapped: Mapped | None = None, blocks: int = 1
) -> Traced:
    """The step with each gradient call as one equation, for flat arguments of these shapes, its associative scans in
    `blocks`. Raises as the step does."""
    return _traced(peeled, avals, mapped, capturing, _Scans(blocks))[0]


def _traced(
    peeled: Peeled,
    avals: Sequence[Any],
    mapped: Mapped | None,
    seen: Callable[[Vjp], Vjp] | None = None,
    scans: Callable[[Scan], Scan] = lambda scan: scan,
) -> tuple[Traced, Result]:
    name, paths = peeled.step.name, [path for path, _, _ in peeled.inputs]
    calls, results = [peeled], list[Result]()

    def fun(*leaves: Any) -> tuple[list[Any], list[Any]]:
        outs, out_paths, result = calls[0].fun(*leaves)
        results.append(result)
        return outs, out_paths

    def once() -> Traced:
        with explained(name), on_a_device(mapped), users_own(), scans_by(scans):
            return with_escapes(trace(fun, avals, paths, seen))

    try:
        return traced_as_each_call(once, peeled.state, name), results[-1]
    finally:
        # an error that is kept keeps the functions of its traceback, and what they close over: no arrays of the call
        calls.clear()


def _has_place(name: str, options: GradientOptions) -> None:
    """Refuse the options that a step written for one device leaves no choice in."""
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
