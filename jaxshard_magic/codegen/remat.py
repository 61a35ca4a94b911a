"""Write `--remat` into the user's text.

The choices of a `RematLoss` become `jax.checkpoint` around bodies of scans, calls or the loss, or loops in segments.
`_CallSites` finds the calls in the user's text from the frames of the traced step, and the kinds of their arguments.
Blocks of equations become functions of consecutive statements.
"""

import ast
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..compilation.planned_call import mesh_context
from ..config.options import is_number, remat_expression
from ..gradients.blocks import SaveAllBut
from ..gradients.call_names import Frame, ProgramNames, call_stack
from ..gradients.remat import POLICIES, RematLoss
from ..introspect import static_attribute
from ..program.flatten_call import nnx_objects, shape_structs
from ..program.flops import WorkTotals, count_work, total_work
from ..program.flow import Flow
from ..program.hooks import trace_afresh
from ..program.ir import Equation, Program
from ..program.per_device import PerDeviceTrace, device_trace_context
from . import step_functions
from .cells import Cells, SourceSpan, full_name, span_of
from .edits import Edit, OptionEdits, checkpoint_edits, edited_trees, indented
from .expression_marks import MARK_FUNCTION
from .latest_call import last_call, swap_code

if TYPE_CHECKING:
    from ..step import ShardedStep


_ARRAYS, _OTHERS, _METHOD, _OBJECTS = "arrays", "others", "method", "objects"
# Recomputation at a call: none, the call itself, the whole loss, each iteration of a loop. A number above 1 is the
# number of segments of a loop.
_NOTHING, _CALL, _LOSS, _TRIPS = -2, -1, 0, 1
_LOOPS = {"jax.lax.scan": 0, "jax.lax.map": 0, "jax.lax.fori_loop": 2}  # position of the body among the arguments
_FUNCTIONS = (
    step_functions.recomputed,
    step_functions.recomputed_method,
    step_functions.recomputing,
    step_functions.scan_in_segments,
)


@dataclass(frozen=True, eq=False)
class _CallSite:
    """A call in the user's text."""

    file: str
    node: ast.Call


class _CallSites:
    """The calls in the user's statements.

    Args:
        cells: The user's text.
    """

    def __init__(self, cells: Cells):
        self._cells = cells
        self._standing = {
            (file, *place): site
            for file, tree in cells.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and node.lineno in cells.statement_lines[file]
            for site in [_CallSite(file, node)]
            for place in _places(node)
        }
        # By id of the code object. The reference to it keeps Python from using the id again.
        self._known: dict[tuple[int, int], tuple[Any, _CallSite | None]] = {}

    def all_in_frames(self, frames: Sequence[Frame]) -> set[_CallSite]:
        """Return all calls in progress in a stack of frames."""
        return {site for frame in frames if (site := self._at(frame)) is not None}

    def innermost(self, frames: Sequence[Frame]) -> _CallSite | None:
        """Return the call in progress in the innermost frame of the cells.

        None where no frame is in the cells, or where the frame is at another expression.
        """
        inside = (frame for frame in reversed(frames) if frame[0].co_filename in self._cells.trees)
        frame = next(inside, None)
        return None if frame is None else self._at(frame)

    @contextmanager
    def record_kinds(self, sites: Sequence[_CallSite]) -> Iterator[dict[_CallSite, set[str]]]:
        """Record the kind of each call while the step is traced inside of the context.

        Args:
            sites: Calls to record.

        Yields:
            For each call the set of its kinds. `_ARRAYS`: a function of arrays alone. `_OTHERS`: other arguments as
                well, or another callable. `_METHOD`: an NNX object or a method of one. `_OBJECTS`: a function of arrays
                and NNX objects. Empty text: none.
        """
        kinds: dict[_CallSite, set[str]] = {site: set() for site in sites}

        def seen(k: int, f: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                kinds[sites[k]].add(_kind(f, args, kwargs))
                return f(*args, **kwargs)

            return run

        files = {site.file for site in sites}
        both = {file: (self._cells.trees[file], self._marked(file, sites)) for file in files}
        with swap_code(both, {MARK_FUNCTION: seen}):
            yield kinds

    def _marked(self, file: str, sites: Sequence[_CallSite]) -> ast.Module:
        """Return the tree of a file with the callee of each site replaced by a recorder."""
        tree = ast.parse("".join(self._cells.source_lines[file]))
        ending = {_end(site.node): k for k, site in enumerate(sites) if site.file == file}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _end(node) in ending:
                call = ast.Call(ast.Name(MARK_FUNCTION, ast.Load()), [ast.Constant(ending[_end(node)]), node.func], [])
                node.func = ast.copy_location(call, node.func)
        return tree

    def _at(self, frame: Frame) -> _CallSite | None:
        code, at = frame
        key = id(code), at
        if key not in self._known:
            # `at` counts bytes; CPython has one position per code unit of two bytes.
            place = next(islice(code.co_positions(), at // 2, None))
            self._known[key] = code, self._standing.get((code.co_filename, *place))
        return self._known[key][1]


def _places(node: ast.Call) -> Iterator[tuple[int | None, ...]]:
    """Yield the positions that Python may report for a call: line, last line, column and last column."""
    f, (end, column) = node.func, _end(node)
    yield node.lineno, end, node.col_offset, column
    # Python reports a method call from the method's name on if that is on another line than the object.
    if isinstance(f, ast.Attribute):
        yield f.end_lineno, end, (f.end_col_offset or 0) - len(f.attr.encode()), column


def _end(node: ast.Call) -> tuple[int | None, int | None]:
    return node.end_lineno, node.end_col_offset


def _kind(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the kind of a call from its callee and arguments; empty for none."""
    linen = sys.modules.get("flax.linen")
    owner = static_attribute(f, "__self__", f)
    if linen is not None and isinstance(owner, linen.Module) and owner.scope is not None:
        return ""  # a bound Linen module changes variables that `jax.checkpoint` does not see
    is_node = nnx_objects().is_node if "flax.nnx" in sys.modules else lambda _: False
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_node)
    objects = [x for x in leaves if is_node(x)]
    others = [x for x in leaves if not isinstance(x, (jax.Array, np.ndarray)) and not is_node(x)]
    if is_node(owner):
        return "" if objects else _METHOD
    if objects:
        return "" if others or kwargs else _OBJECTS
    plain = inspect.isfunction(f) or (inspect.isfunction(inspect.unwrap(f)) and jax.tree_util.all_leaves([f]))
    return _ARRAYS if plain and not others else _OTHERS


def remat_edits(step: "ShardedStep", cells: Cells) -> OptionEdits:
    """Return `jax.checkpoint` around bodies of scans, calls or the loss, or loops in segments.

    Args:
        step: A step with a recorded call.
        cells: The user's text.

    Returns:
        Edits for the option `remat`. Empty where the text allows none; with a note where the user's functions raise.
    """
    try:
        if step.request.gradients.remat in POLICIES:
            edits = checkpoint_edits(cells, _policy(step) or None)
        else:
            edits = _by_blocks(step, cells)
    except Exception as error:  # raised by the user's functions under the edits
        said = str(error).partition(chr(10))[0]
        return OptionEdits(notes=(f"--remat at the lines of the cells is left out: {type(error).__name__}: {said}",))
    return OptionEdits(tuple(edits), frozenset({"remat"} if edits else ()))


def _policy(step: "ShardedStep") -> str:
    """Return the policy of `--remat` as an expression, empty for JAX's own policy."""
    how, entry = step.request.gradients.remat or "", last_call(step)[0]
    names = {"full": "", "nothing": "", "nothing_saveable": "", "dots": "dots_saveable"}
    names["offload"] = 'offload_dot_with_no_batch_dims("device", "pinned_host")'
    own, policies = names.get(how, how), "jax.checkpoint_policies"
    losses = entry.rewritten.rematted if entry.rewritten is not None else ()
    equations = (e for loss in losses for e in loss.program.equations)
    ragged = next((e.name for e in equations if (c := e.contraction) and c.ragged_dim is not None), None)
    # JAX's policy for matrix products ignores ragged products.
    if how == "dots" and ragged is not None:
        kept = f'lambda primitive, *_, **params: primitive.name == "{ragged}"'
        return f"{policies}.save_from_both_policies({policies}.{own}, {kept})"
    return own and f"{policies}.{own}"


def _by_blocks(step: "ShardedStep", cells: Cells) -> list[Edit]:
    """Return the edits that recompute the plan's blocks; none unless the edited step has the plan's FLOPs."""
    entry, _ = last_call(step)
    rewritten = entry.rewritten
    if step.request.gradients.remat is None or rewritten is None:
        return []
    edits = _edits(step, cells, rewritten.rematted, step.request.gradients.remat.strip())
    # Edits are used only if the text then recomputes as much as the plan.
    planned = _flop_counts(Program(entry.traced.closed))
    return edits if edits and _flop_counts(_traced(step, cells, edits)) == planned else []


def _edits(step: "ShardedStep", cells: Cells, losses: Sequence[RematLoss], how: str) -> list[Edit]:
    """Return the edits for some losses; none where a block is no call, loop or range of statements in the text."""
    if all(map(_is_by_value, losses)):
        return _of_values(losses, cells)
    sites, again_at = _CallSites(cells), defaultdict[_CallSite | None, set[int]](set)
    for loss in losses:
        for site, what in _done_again(loss, how, sites, cells.imports):
            again_at[site].add(what)
    wanted = {site: what for site, what in again_at.items() if what != {_NOTHING}}
    if any(len(what) > 1 for what in wanted.values()):
        return []
    return _at_sites(step, cells, sites, {site: min(what) for site, what in wanted.items()})


def _is_by_value(loss: RematLoss) -> bool:
    """Return whether the blocks recompute values named by `checkpoint_name`."""
    return any(isinstance(b.policy, SaveAllBut) for blocks in loss.recomputed.ranges.values() for b in blocks)


def _done_again(
    loss: RematLoss, how: str, sites: _CallSites, imports: Mapping[str, str]
) -> Iterator[tuple[_CallSite | None, int]]:
    """Yield the recomputation at each call that leads to equations of a loss.

    None as the call: no single call of the text leads to a block.
    """
    program, blocks = loss.program, loss.recomputed
    own = dict(_block_equations(loss, how, sites))
    if own == dict.fromkeys(range(len(program.equations))) and is_number(how):
        yield None, _LOSS
        return
    for e in (e for e in program.equations if e.is_scan):
        site, trips = _loop(sites.innermost(call_stack(e)), imports), e.params["length"]
        each = e.bodies[0].sub_jaxpr in blocks.bodies
        count = trips if each else blocks.segments.get(e.index, (0, None))[0]
        if count:
            in_segments = site is not None and full_name(site.node, imports) == "jax.lax.scan"
            yield site if each or in_segments else None, _TRIPS if each else count
        elif site is not None and not any(own.get(i.index) is site for i in e.bodies[0].sub_jaxpr.equations):
            yield site, _NOTHING
    for site in set(own.values()):
        yield site, _CALL if _loop(site, imports) is None else _TRIPS
    for e in program.equations:
        if not e.primitive.alias:
            through = sites.all_in_frames(call_stack(e)) - {own.get(e.index)}
            yield from ((site, _NOTHING) for site in through if _loop(site, imports) is None)


def _block_equations(loss: RematLoss, how: str, sites: _CallSites) -> Iterator[tuple[int, _CallSite | None]]:
    """Yield the index of each equation in a block, with the call that makes up the block."""
    names, numbered = ProgramNames(loss.program), is_number(how)

    def with_nested(e: Equation, site: _CallSite | None) -> Iterator[tuple[int, _CallSite | None]]:
        yield e.index, site
        for body in e.bodies:
            for within in body.sub_jaxpr.equations:
                yield from with_nested(within, site)

    for scope, blocks in loss.recomputed.ranges.items():
        for e in (e for block in blocks for e in scope.equations[block.start : block.stop]):
            callers = None if numbered else names.callers(e, remat_expression(how))
            yield from with_nested(e, None if callers is None else sites.innermost(callers))


def _loop(site: _CallSite | None, imports: Mapping[str, str]) -> _CallSite | None:
    """Return the call if it is a loop of `jax.lax`, else None."""
    return site if site is not None and full_name(site.node, imports) in _LOOPS else None


def _of_values(losses: Sequence[RematLoss], cells: Cells) -> list[Edit]:
    """Return edits that turn statements into recomputed functions, from the production of a named value to the last
    use."""
    stretches: dict[_StatementRange | None, set[Any]] = defaultdict(set)
    for scope, block in ((s, b) for loss in losses for s, blocks in loss.recomputed.ranges.items() for b in blocks):
        equations = scope.equations[block.start : block.stop]
        stretches[_common_range([call_stack(e) for e in equations], cells)].add(block.policy)
    edits = []
    for at, policies in stretches.items():
        (policy,) = policies if len(policies) == 1 else (None,)
        if at is None or not isinstance(policy, SaveAllBut):
            return []
        what = f"{sorted(policy.names)}, {sorted(policy.primitives - {'name'})}"
        edits.append(at.edits(cells.program_name("segment"), f"{cells.program_name('recomputing')}({what})"))
    return [e for each in edits for e in each] if all(edits) else []


def _at_sites(
    step: "ShardedStep", cells: Cells, sites: _CallSites, wanted: Mapping[_CallSite | None, int]
) -> list[Edit]:
    """Return the edits of all calls; none where a call can't be edited."""
    if wanted.get(None) == _LOSS and len(wanted) == 1:
        return checkpoint_edits(cells, None, loops=False)
    if None in wanted:
        return []
    calls = [site for site, what in wanted.items() if site is not None and what == _CALL]
    with sites.record_kinds(calls) as kinds:
        if calls:
            _traced(step)
    edits = []
    for site, what in wanted.items():
        assert site is not None
        edits.append(_call(site, kinds[site], cells) if what == _CALL else _trips(site, what, cells))
    return [] if None in edits else [e for e in edits if e is not None]


def _call(site: _CallSite, kinds: set[str], cells: Cells) -> Edit | None:
    """Return the edit that recomputes a call; None where its arguments allow none."""
    checkpoint, nnx = _named("jax", cells), _named("flax.nnx", cells)
    around = {
        _ARRAYS: checkpoint and (f"{checkpoint}.checkpoint(", ")"),
        _OTHERS: (f"{cells.program_name('recomputed')}(", ")"),
        _METHOD: nnx and (f"{cells.program_name('recomputed_method')}(", f", {nnx}.remat)"),
        _OBJECTS: nnx and (f"{nnx}.remat(", ")"),
    }
    # `recomputed` takes arrays as well.
    kind = _OTHERS if kinds == {_ARRAYS, _OTHERS} else "".join(kinds)
    text = around.get(kind)
    return Edit(span_of(site.node.func, site.file), *text) if text else None


def _trips(site: _CallSite, what: int, cells: Cells) -> Edit | None:
    """Return the edit that recomputes a loop by iterations or segments; None where the call allows none."""
    node, place = site.node, span_of(site.node.func, site.file)
    if what != _TRIPS:
        scan = f"{cells.program_name('scan_in_segments')}({what})"
        # A replaced span has to be on one line.
        return Edit(place, scan, replaces=True) if place.line == place.end_line else None
    at, checkpoint = _LOOPS[full_name(node, cells.imports)], _named("jax", cells)
    if len(node.args) <= at or any(isinstance(a, ast.Starred) for a in node.args) or checkpoint is None:
        return None
    return Edit(span_of(node.args[at], site.file), f"{checkpoint}.checkpoint(", ")")


def _named(module: str, cells: Cells) -> str | None:
    """Return the cells' name for a module; for `jax` also the import of the generated code."""
    return cells.module(module) or ("jax" if module == "jax" == cells.program_name("jax") else None)


def _traced(step: "ShardedStep", cells: Cells | None = None, edits: Sequence[Edit] = ()) -> Program:
    """Trace the user's step, with edits in its text."""
    entry, call = last_call(step)
    mapped = entry.traced.mapping if isinstance(entry.traced, PerDeviceTrace) else None
    avals = shape_structs(call.leaves) if mapped is None else mapped.local_avals(shape_structs(call.leaves))
    both, given = {}, {}
    if cells is not None:
        both = edited_trees(cells, edits)
        given = {cells.program_name(f.__name__): f for f in _FUNCTIONS} | {"jax": jax}
    # Without it JAX would use its trace of the same function with other code.
    with swap_code(both, given), mesh_context(step.mesh), device_trace_context(mapped), trace_afresh():
        return Program(jax.make_jaxpr(lambda *leaves: call.flat_function(*leaves)[0])(*avals))


def _flop_counts(program: Program) -> tuple[int, int]:
    """Return the FLOPs of the matrix products of a step, and the FLOPs of those that are recomputed."""
    sums: WorkTotals = total_work(count_work(program, Flow(program)))
    return sums.flops, sums.recomputed


@dataclass(frozen=True)
class _StatementRange:
    """Consecutive statements of one function.

    Attributes:
        file: Name of the file.
        first: First line of the first statement.
        last: First line of the last statement.
        body: The list of statements around them.
        function: The function.
    """

    file: str
    first: int
    last: int
    body: tuple[ast.stmt, ...]
    function: ast.FunctionDef

    def edits(self, name: str, decorator: str) -> list[Edit]:
        """Turn the statements into a decorated function, called in their place.

        Returns:
            The edits. Empty for statements other than assignments to names and a final `return`, for a statement that
            shares a line with others, and for a string literal over several lines.
        """
        inside = [s for s in self.body if self.first <= s.lineno <= self.last]
        last = inside[-1]
        end = last.end_lineno or last.lineno, last.end_col_offset or last.col_offset
        others = [s for s in self.body if s not in inside]
        alone = all(s.end_lineno != self.first and s.lineno != end[0] for s in others)
        plain = all(_targets(s) is not None for s in inside[:-1])
        returns = isinstance(last, ast.Return)
        nodes = {n for s in inside for n in ast.walk(s)}
        if not (alone and plain and (returns or _targets(last) is not None)) or any(map(_is_bound_here, nodes)):
            return []
        bound = list(dict.fromkeys(name for s in inside for name in _targets(s) or ()))
        given, known = list[str](), set[str]()
        for s in inside:
            reads = {n.id for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            reads |= {*(_targets(s) or ())} if isinstance(s, ast.AugAssign) else set()
            # Assigned names are local to the new function, so their earlier values are passed in.
            given += [n for n in bound if n in reads - known and n not in given]
            known |= {*(_targets(s) or ())}
        # Names used nowhere else stay local to the new function.
        elsewhere = {n.id for n in ast.walk(self.function) if isinstance(n, ast.Name) and n not in nodes}
        results = ", ".join(n for n in bound if n in elsewhere)
        indent, call = " " * last.col_offset, f"{name}({', '.join(given)})"
        before = f"{indent}@{decorator}\n{indent}def {call}:\n"
        after = f"\n\n{indent}return {call}"
        if not returns:
            after = f"\n{indent}    return {results}\n\n{indent}{results} = {call}"
        if not (returns or results):
            return []
        rows = indented(self.file, range(self.first, end[0] + 1))
        return [*rows, Edit(SourceSpan(self.file, self.first, 0, *end), before, after)]


def _common_range(chains: Sequence[Sequence[Frame]], cells: Cells) -> _StatementRange | None:
    """Return the statements from the first to the last that led to some equations.

    Args:
        chains: Stack of frames of each equation, outermost first.
        cells: The user's text.

    Returns:
        Statements of the innermost function of the cells in all stacks. None where no function is in all of them, or
        where the statements are in different loops or branches.
    """
    depth = 0
    for level in zip(*chains, strict=False):
        # Below the first frame at different positions, equal code belongs to different calls.
        depth += len({id(code) for code, _ in level}) == 1
        if len({(id(code), at) for code, at in level}) > 1:
            break
    passed = [k for k in range(depth) if chains[0][k][0].co_filename in cells.trees]
    if not passed:
        return None
    code = chains[0][passed[-1]][0]
    file, lines = code.co_filename, {_line(chain[passed[-1]]) for chain in chains}
    if not lines <= cells.statement_lines[file]:
        return None
    # Inner lists come first, so the innermost list around all lines is taken.
    for body, function in _bodies(cells.trees[file]):
        found = {n: [s for s in body if s.lineno <= n <= (s.end_lineno or 0)] for n in lines}
        if function.name == code.co_name and all(found.values()):
            firsts = [s.lineno for around in found.values() for s in around]
            return _StatementRange(file, min(firsts), max(firsts), body, function)
    return None


def _line(frame: Frame) -> int:
    code, at = frame
    # `at` counts bytes; CPython has one position per code unit of two bytes.
    return next(islice(code.co_positions(), at // 2, None))[0] or 0


def _bodies(
    tree: ast.AST, function: ast.FunctionDef | None = None
) -> Iterator[tuple[tuple[ast.stmt, ...], ast.FunctionDef]]:
    """Yield the lists of statements in functions, inner lists first."""
    owner = tree if isinstance(tree, ast.FunctionDef) else function
    for node in ast.iter_child_nodes(tree):
        yield from _bodies(node, owner)
    if owner is not None:
        for field in ("body", "orelse", "finalbody"):
            body = getattr(tree, field, None)
            if isinstance(body, list):
                yield tuple(body), owner


def _targets(s: ast.stmt) -> list[str] | None:
    """Return the names that an assignment binds; None for other statements."""
    if isinstance(s, (ast.AugAssign, ast.AnnAssign)):
        targets = [s.target] if s.value is not None else []
    else:
        targets = s.targets if isinstance(s, ast.Assign) else []
    flat = [n for t in targets for n in (t.elts if isinstance(t, ast.Tuple) else [t])]
    names = [n.id for n in flat if isinstance(n, ast.Name)]
    return names if names and len(names) == len(flat) else None


def _is_bound_here(node: ast.AST) -> bool:
    """Return whether a node would mean something else in another function or with more indentation."""
    text = isinstance(node, (ast.JoinedStr, ast.Constant)) and node.lineno != node.end_lineno
    method = isinstance(node, ast.Name) and node.id in ("super", "locals")
    return text or method or isinstance(node, (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await))
