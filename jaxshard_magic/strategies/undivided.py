"""Equations that need all of a dimension which the layout divides: what XLA gets wrong else, and scans' blocks."""

from dataclasses import dataclass, replace

from ..plan import Finding
from ..program.ir import Equation, Value
from ..program.lines import users_line
from ..program.xla_faults import (
    CROSSED,
    WINDOWED,
    Fault,
    Slots,
    divides_wrongly,
    whole_dimensions,
    windows_of,
)
from ..units import byte_text
from .layout import Axes, Layout, Spec
from .reductions import summed_over

_TOLD = 3  # lines of one fault that a finding names


def keep_whole(layout: Layout) -> None:
    """Have equations that need all of a divided dimension read and make it whole, and tell which of them are a fault of
    XLA's: adds to `layout.exchanges` and `layout.findings`. All strategies have filled in the layout before."""
    reads: dict[tuple[int, Value], Spec] = {}
    makes: dict[Value, Spec] = {}
    told: dict[Fault | None, list[_Changed]] = {}
    for e in layout.program.equations:
        if e.name == "divide_blocks" and (v := e.ins[0]) is not None:
            makes[v] = layout.between(
                v
            )  # whole: else it would be made divided, in another order of blocks, say
        if e.name == "gather_blocks":
            fault, changed = None, _changed(layout, e, {0: frozenset({e.params["axis"]})}, frozenset())
            makes[e.outs[0]] = layout.between(e.outs[0])
        elif (found := _at_fault(layout, e)) is not None:
            fault, changed = found[0], _changed(layout, e, found[1], found[0].across(e))
        else:
            continue
        reads |= {(e.index, v): spec for k, v, spec in changed.specs if k < len(e.ins)}
        makes |= {v: spec for k, v, spec in changed.specs if k >= len(e.ins)}
        if changed.specs:
            told.setdefault(fault, []).append(changed)
    exchanges = layout.exchanges
    layout.exchanges = replace(
        exchanges, reads={**exchanges.reads, **reads}, makes={**exchanges.makes, **makes}
    )
    for fault, changes in told.items():
        layout.findings.append(
            _about_scans(layout, changes) if fault is None else _about_fault(layout, fault, changes)
        )


def _at_fault(layout: Layout, e: Equation) -> tuple[Fault, Slots] | None:
    """Return the dimensions of `e` that must be whole, and the fault because of which they must, of several the first
    that divided ones have; None where all may be divided."""
    found = [*filter(None, [whole_dimensions(e, cpu=layout.simulated)])]
    image = found[0][1].get(0, frozenset[int]()) if found else frozenset[int]()
    in_layout = ((CROSSED, _crossed(layout, e)), (WINDOWED, _windowed(layout, e, image)))
    found += [(fault, slots) for fault, slots in in_layout if slots]
    if not found:
        return None
    ends = [[] if v is None else layout.between(v) for v in (*e.ins, *e.outs)]
    divided = (
        fault
        for fault, slots in found
        if any(ends[k][d] for k, dims in slots.items() for d in dims if ends[k])
    )
    together = {
        k: frozenset[int]().union(*(slots.get(k, ()) for _, slots in found))
        for k in {k for _, slots in found for k in slots}
    }
    return next(divided, found[0][0]), together


def chosen_wrongly(layout: Layout, e: Equation) -> bool:
    """Return whether XLA must not choose by itself which dimensions of `e` are divided."""
    return divides_wrongly(e, cpu=layout.simulated) or (several_axes(layout) and bool(windows_of(e)))


def several_axes(layout: Layout) -> bool:
    """Return whether the mesh has more than one axis that divides anything: on others XLA has no `WINDOWED`."""
    return sum(n > 1 for n in layout.mesh.shape.values()) > 1


def _windowed(layout: Layout, e: Equation, whole: frozenset[int]) -> Slots:
    """Return the dimensions under a window that a convolution must have whole; see `WINDOWED`. Those of its image that
    are `whole` already, for another reason, divide nothing.

    XLA is right where only the image is divided along them and no axis divides the output channels; and where the
    window is divided as well, as XLA divides a long one, of the gradient of a kernel, and each axis of the mesh divides
    the image.
    """
    c, (v, w) = e.contraction, (*e.ins[:2], None, None)[:2]
    if c is None or v is None or w is None or not (windows := windows_of(e)):
        return {}
    image, window = (layout.between(x) if layout.batchy(x) else layout.within(e, x) for x in (v, w))
    image = [() if d in whole else axes for d, axes in enumerate(image)]
    length, places = layout.program.shapes[w], layout.program.shapes[e.outs[0]]
    divided = [(i, j, k) for i, j, k in windows if image[i] or window[j]]
    if any(window[j] or length[j] > places[k] for _, j, k in divided):
        axes = {a for along in image for a in along}
        right = all(a in axes or n == 1 for a, n in layout.mesh.shape.items())
    else:
        right = not any(window[j] for j, _ in c.right)
    return {} if right else {k: frozenset(dims[k] for dims in divided) for k in range(3) if divided}


def _crossed(layout: Layout, e: Equation) -> Slots:
    """Return the dimensions of the second operand that a product must have whole; see `CROSSED`.

    They are summed over, and an axis that divides them divides another such dimension of the first operand, while one
    more is divided alike in both.
    """
    c, (v, w) = e.contraction, (*e.ins[:2], None, None)[:2]
    if (
        c is None
        or len(c.contracted) < 2
        or v is None
        or w is None
        or not (layout.batchy(v) and layout.batchy(w))
    ):
        return {}
    left, right = layout.between(v), layout.between(w)
    alike = {(i, j) for i, j in c.contracted if left[i] and left[i] == right[j]}
    apart = {*c.contracted} - alike
    axes = {a for i, _ in apart for a in left[i]}
    crossed = frozenset(j for i, j in apart if axes.intersection(right[j]) - {*left[i]})
    return {1: crossed} if alike and crossed else {}


def summed_before(layout: Layout, e: Equation) -> bool:
    """Return whether a gradient that the product `e` makes must be summed where it is used, and divided afterwards as
    its parameter rests; see `FURTHER` in `program/xla_faults`."""
    c = e.contraction
    if c is None or not c.batch or layout.batchy(out := e.outs[0]):
        return False
    left, rest = layout.at(e, e.ins[0]), layout.at_rest(out)
    summed = {a for axes in summed_over(layout, e) for a in axes if layout.mesh.shape[a] > 1}
    divided = ({*rest[o]} & summed for i, _, o in c.batch if layout.count(left[i]) > 1)
    return len(summed) > 1 and any(further and further != summed for further in divided)


def held_against_faults(layout: Layout) -> tuple[str, ...]:
    """The user's lines at which constraints alone would have XLA go wrong: what `keep_whole` keeps so, padding between
    elements whose result is divided and whose operand is not, and gradients that are summed before they are divided."""
    found = (
        e
        for e in layout.program.equations
        if _kept_whole(layout, e) or _padded_apart(layout, e) or summed_before(layout, e)
    )
    return tuple(dict.fromkeys(_line(e) or "a library's line" for e in found))


def _kept_whole(layout: Layout, e: Equation) -> bool:
    read_otherwise = any((e.index, v) in layout.exchanges.reads for v in e.ins if v is not None)
    return read_otherwise and _at_fault(layout, e) is not None


def _padded_apart(layout: Layout, e: Equation) -> bool:
    if e.name != "pad" or e.ins[0] is None:
        return False
    before, after = layout.within(e, e.ins[0]), layout.within(e, e.outs[0])
    return any(
        there and there != here and (inner > 0 or min(low, high) < 0)
        for (low, high, inner), here, there in zip(e.params["padding_config"], before, after, strict=True)
    )


@dataclass(frozen=True)
class _Changed:
    """How `equation` works with its operands and results that lie otherwise elsewhere: each with its position and its
    spec there."""

    equation: Equation
    specs: list[tuple[int, Value, Spec]]


def _changed(layout: Layout, e: Equation, slots: Slots, across: frozenset[int]) -> _Changed:
    """`e` with dimensions of `slots` whole; what divides them divides one of `across` instead, where one has room.
    Weights that activations meet are gathered as those of other equations."""
    ends = [
        (k, v, layout.between(v))
        for k, v in enumerate((*e.ins, *e.outs))
        if v is not None and k in slots and (layout.batchy(v) or not layout.storage.batchy_equation(e))
    ]
    gone = tuple(
        dict.fromkeys(a for k, _, spec in ends for d in sorted(slots[k]) for a in spec[d : d + 1][0])
    )
    if not gone:
        return _Changed(e, [])
    instead = _with_room(layout, ends, slots, across, gone)
    specs = []
    for k, v, spec in ends:
        there: Spec = [() if d in slots[k] else axes for d, axes in enumerate(spec)]
        if instead is not None:
            there[instead] = (*there[instead], *gone)
        if there != spec:
            specs.append((k, v, there))
    return _Changed(e, specs)


def _with_room(
    layout: Layout, ends: list[tuple[int, Value, Spec]], slots: Slots, across: frozenset[int], gone: Axes
) -> int | None:
    """The largest of the dimensions `across` that divides over what divides it already and the axes `gone`."""
    shapes = layout.program.shapes

    taken = {a for k, _, spec in ends for d, axes in enumerate(spec) if d not in slots[k] for a in axes}
    if not taken.isdisjoint(gone):
        return None

    def fits(d: int) -> bool:
        return all(shapes[v][d] % layout.count((*spec[d], *gone)) == 0 for _, v, spec in ends)

    beside = across.difference(*slots.values())
    return max((d for d in beside if fits(d)), key=lambda d: shapes[ends[0][1]][d], default=None)


def _about_scans(layout: Layout, changes: list[_Changed]) -> Finding:
    """The scans whose blocks devices divide among them, by what is gathered of each block."""
    size = sum(layout.bytes_of(v, spec) * c.equation.trips for c in changes for _, v, spec in c.specs)
    v, e = changes[0].specs[0][1], changes[0].equation
    blocks = layout.program.shapes[v][e.params["axis"]]
    message = (
        f"Associative scans along a divided dimension{_lines(changes)} run in {blocks} blocks, each on the device that "
        f"has it: one element of each block is gathered, {byte_text(size)} a step, and no other. The numbers are the "
        "step's, but for the order in which elements are combined."
    )
    return Finding("scans-in-blocks", "info", message)


def _about_fault(layout: Layout, fault: Fault, changes: list[_Changed]) -> Finding:
    held = max(layout.bytes_of(v, spec) for c in changes for _, v, spec in c.specs)
    message = (
        f"{fault.name[0].upper()}{fault.name[1:]}{_lines(changes)} takes whole dimensions that are divided elsewhere, "
        f"because XLA {fault.wrong} where they are divided. A device has {byte_text(held)} of the largest array there."
    )
    return Finding("kept-whole", "info", message)


def _lines(changes: list[_Changed]) -> str:
    lines = list(dict.fromkeys(line for c in changes if (line := _line(c.equation))))
    more = f" and {len(lines) - _TOLD} more" if len(lines) > _TOLD else ""
    return f" ({', '.join(lines[:_TOLD])}{more})" if lines else ""


def _line(e: Equation | None) -> str | None:
    """The user's line, of an equation that a library's function makes that of its call."""
    while e is not None and (line := users_line(e.eqn)) is None:
        e = e.outer
    return None if e is None else line
