"""Which dimensions are the same dimension: one small rule per primitive, in a table.

A rule sees one equation and calls `link(value, dim, value, dim)` for every pair of dimensions that are
one logical dimension. `alike` says that the values also lie in memory alike (a parameter and its gradient),
which a matmul's operands do not.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .ir import Equation, Program, Value
from .primitives import rules_in

Rule = Callable[["Links", Equation], None]
RULES: dict[str, Rule] = {}
rule = rules_in(RULES)

RANDOM = ("random_", "threefry")
_UNLINKED = frozenset({"iota", "shard_map", "pure_callback", "io_callback", "custom_partitioning"})
CUTTING = frozenset({"concatenate", "split", "slice", "pad", "dynamic_slice", "dynamic_update_slice"})


@dataclass(frozen=True, slots=True)
class Link:
    a: int
    b: int
    equation: int | None  # None: through the door of a body
    alike: bool


@dataclass(frozen=True, slots=True)
class Split:
    """A reshape that cut the dimension `whole` into `parts`, major first, or merged them into it."""

    whole: int
    parts: tuple[int, ...]
    equation: int


@dataclass(eq=False)
class Links:
    """All links of a program.

    `looped`: leading dimensions that a scan steps over. `splits`: reshapes that cut or merge. `cut`: pairs where one
    is a part of the other (concatenate, slice, pad).
    """

    program: Program
    links: list[Link] = field(default_factory=list)
    looped: set[int] = field(default_factory=set)
    cut: list[tuple[int, int]] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)

    def link(
        self, e: Equation | None, a: Value | None, da: int, b: Value | None, db: int, alike: bool = True
    ) -> None:
        if a is not None and b is not None:
            p = self.program
            self.links.append(Link(p.first[a] + da, p.first[b] + db, e.index if e else None, alike))

    def shape(self, value: Value | None) -> tuple[int, ...]:
        return () if value is None else self.program.shapes[value]

    def same(self, a: Value | None, b: Value | None, lead: int = 0) -> None:
        """All dimensions one to one through a door; `lead` = 1: a loop dimension of `a` is not in `b`."""
        for d in range(len(self.shape(b))):
            self.link(None, a, d + lead, b, d)


def find_links(program: Program) -> Links:
    """The links of every equation of `program`, bodies included."""
    links = Links(program)
    for e in program.equations:
        if e.doors:
            _through_doors(links, e)
        elif e.name not in _UNLINKED and not e.name.startswith(RANDOM):
            RULES.get(e.name, _by_family(e.name))(links, e)
    return links


def _by_family(name: str) -> Rule:
    if name.startswith("scatter"):
        return _scatter
    if name.startswith(("reduce_window", "select_and")):
        return _window
    summed = name.startswith("reduce_") and name not in ("reduce_precision", "reduce_scatter")
    return _reduce if summed else _elementwise


def _through_doors(links: Links, e: Equation) -> None:
    for door in e.doors:
        for a, b, lead in door.into:
            links.same(a, b, lead)
            if lead and a is not None:
                links.looped.add(links.program.node(a, 0))
        for a, b, lead in door.out:
            links.same(b, a, lead)
            if lead and b is not None:
                links.looped.add(links.program.node(b, 0))
        for a, b in (*door.loop, *door.skip):
            links.same(a, b)


@rule("dot_general")
def _dot(links: Links, e: Equation) -> None:
    (lc, rc), (lb, rb) = e.params["dimension_numbers"]
    (left, right), out = e.ins, e.outs[0]
    for a, b in zip(lc, rc, strict=True):
        links.link(e, left, a, right, b, False)
    for o, (a, b) in enumerate(zip(lb, rb, strict=True)):
        links.link(e, left, a, out, o, False)
        links.link(e, right, b, out, o, False)
    o = len(lb)
    for value, used in ((left, (*lc, *lb)), (right, (*rc, *rb))):
        for d in range(len(links.shape(value))):
            if d not in used:
                links.link(e, value, d, out, o, False)
                o += 1


@rule("conv_general_dilated")
def _conv(links: Links, e: Equation) -> None:
    """Batch and channels; spatial dimensions are left alone."""
    dn, groups = e.params["dimension_numbers"], e.params["feature_group_count"]
    batches, (left, right), out = e.params["batch_group_count"], e.ins, e.outs[0]
    if batches == 1:
        links.link(e, left, dn.lhs_spec[0], out, dn.out_spec[0], False)
    if groups == 1:
        links.link(e, left, dn.lhs_spec[1], right, dn.rhs_spec[1], False)
    if groups == batches == 1:
        links.link(e, right, dn.rhs_spec[0], out, dn.out_spec[1], False)


@rule("broadcast_in_dim")
def _broadcast(links: Links, e: Equation) -> None:
    for a, b in enumerate(e.params["broadcast_dimensions"]):
        if links.shape(e.ins[0]) and links.shape(e.ins[0])[a] == links.shape(e.outs[0])[b]:
            links.link(e, e.ins[0], a, e.outs[0], b)


@rule("transpose")
def _transpose(links: Links, e: Equation) -> None:
    for b, a in enumerate(e.params["permutation"]):
        links.link(e, e.ins[0], a, e.outs[0], b)


@rule("squeeze", "expand_dims")
def _squeeze(links: Links, e: Equation) -> None:
    big, small = (e.ins[0], e.outs[0]) if e.name == "squeeze" else (e.outs[0], e.ins[0])
    kept = (d for d in range(len(links.shape(big))) if d not in e.params["dimensions"])
    for b, a in enumerate(kept):
        links.link(e, big, a, small, b)


@rule("argmax", "argmin", "reduce")
def _reduce(links: Links, e: Equation) -> None:
    gone = e.params["axes"] if "axes" in e.params else e.params["dimensions"]
    for operand, out in itertools.product(e.ins, e.outs):
        kept = [d for d in range(len(links.shape(operand))) if d not in gone]
        if len(kept) == len(links.shape(out)):
            for b, a in enumerate(kept):
                links.link(e, operand, a, out, b)


@rule("gather")
def _gather(links: Links, e: Equation) -> None:
    """Index dimensions go on as the result's; whole slices keep the operand's dimension."""
    dn, (operand, index), out = e.params["dimension_numbers"], e.ins[:2], e.outs[0]
    gone = (*dn.collapsed_slice_dims, *dn.operand_batching_dims)
    sliced = (d for d in range(len(links.shape(operand))) if d not in gone)
    for b, a in zip(dn.offset_dims, sliced, strict=True):
        if e.params["slice_sizes"][a] == links.shape(operand)[a]:
            links.link(e, operand, a, out, b, False)
    if index is not None:
        rest = (d for d in range(len(links.shape(out))) if d not in dn.offset_dims)
        for a, b in enumerate(rest):
            links.link(e, index, a, out, b, False)
    for a, b in zip(dn.operand_batching_dims, dn.start_indices_batching_dims, strict=True):
        links.link(e, operand, a, index, b, False)


def _scatter(links: Links, e: Equation) -> None:
    dn, (operand, index, updates) = e.params["dimension_numbers"], e.ins[:3]
    gone = (*dn.inserted_window_dims, *dn.operand_batching_dims)
    for d in range(len(links.shape(operand))):
        links.link(e, operand, d, e.outs[0], d)
    if updates is not None:
        kept = (d for d in range(len(links.shape(e.outs[0]))) if d not in gone)
        for b, a in zip(dn.update_window_dims, kept, strict=True):
            if links.shape(updates)[b] == links.shape(e.outs[0])[a]:
                links.link(e, e.outs[0], a, updates, b, False)
    if index is not None and updates is not None:
        rest = (d for d in range(len(links.shape(updates))) if d not in dn.update_window_dims)
        for a, b in enumerate(rest):
            links.link(e, index, a, updates, b, False)
    for a, b in zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims, strict=True):
        links.link(e, e.outs[0], a, index, b, False)


def _window(links: Links, e: Equation) -> None:
    """Pooling: dimensions that the window leaves alone."""
    window = e.params.get("window_dimensions")
    for operand, out in itertools.product(e.ins, e.outs):
        a, b = links.shape(operand), links.shape(out)
        if len(a) == len(b):
            for d in range(len(a)):
                if a[d] == b[d] and (window is None or window[d] == 1):
                    links.link(e, operand, d, out, d)


def _elementwise(links: Links, e: Equation) -> None:
    """Everything else: equal sizes at the same place are the same dimension, unless the equation works along it."""
    along = {e.params[k] for k in ("dimension", "axis") if isinstance(e.params.get(k), int)}
    if e.name == "rev":
        along |= set(e.params["dimensions"])
    for out, operand in itertools.product(e.outs, e.ins):
        a, b = links.shape(operand), links.shape(out)
        if operand is None or len(a) != len(b):
            continue
        for d in range(len(a)):
            if a[d] == b[d] and d not in along:
                links.link(e, operand, d, out, d)
            elif e.name in CUTTING:
                links.cut.append((links.program.node(operand, d), links.program.node(out, d)))


@rule("reshape")
def _reshape(links: Links, e: Equation) -> None:
    """Minimal groups of equal product: one to one, or one dimension cut into parts, or parts merged into one."""
    (a, out), shapes = (e.ins[0], e.outs[0]), (links.shape(e.ins[0]), links.shape(e.outs[0]))
    if a is None:
        return
    node = links.program.node
    for group in reshape_groups(*shapes):
        old, new = ([d for d in dims if shape[d] != 1] for dims, shape in zip(group, shapes, strict=True))
        if not old or not new:
            continue
        if len(old) == 1 < len(new):
            links.splits.append(Split(node(a, old[0]), tuple(node(out, d) for d in new), e.index))
        elif len(new) == 1 < len(old):
            links.splits.append(Split(node(out, new[0]), tuple(node(a, d) for d in old), e.index))
        else:
            links.link(e, a, old[0], out, new[0])


def reshape_groups(a: Sequence[int], b: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The minimal groups of dimensions of shapes `a` and `b` with equal products, in order.

    >>> reshape_groups((8, 6), (8, 2, 3))
    [([0], [0]), ([1], [1, 2])]
    """
    groups, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        left, right = ([i] if i < len(a) else []), ([j] if j < len(b) else [])
        pa, pb = (a[i] if left else 1), (b[j] if right else 1)
        i, j = i + len(left), j + len(right)
        while pa != pb:
            if pa < pb and i < len(a):
                pa, i = pa * a[i], i + 1
                left.append(i - 1)
            elif j < len(b):
                pb, j = pb * b[j], j + 1
                right.append(j - 1)
            else:
                return groups  # an empty array: sizes of 0 say nothing
        groups.append((left, right))
    return groups
