"""From what softmax is taken of back to a product: the equations in between, each with what it does to scores."""

from dataclasses import dataclass, field

from ..ir import Equation, Value
from .masks import UNSEEN
from .softmax import FAR, Softmax
from .trail import Labels, Trail


@dataclass(frozen=True)
class Link:
    """`equation`, whose operand `at` leads on to the scores. `labels`: of its result. `after`: what its result is
    multiplied by until softmax; None where more happens to it."""

    equation: Equation
    at: int
    labels: Labels
    after: float | None


@dataclass
class Chain:
    """`links`: from softmax back to `value`. `blocked`: the first in the way of an attention."""

    value: Value
    labels: Labels
    links: list[Link] = field(default_factory=list)
    blocked: Equation | None = None


def is_product(e: Equation) -> bool:
    """Is it a product of two arrays whose dimensions are multiplied, summed over or left as they are, and no more?"""
    c = e.contraction
    return c is not None and len(e.ins) == 2 and not c.windowed and c.grouped is None and c.ragged is None


def chain_of(trail: Trail, softmax: Softmax) -> Chain:
    """What lies between a softmax and a product, as far as it is elementwise."""
    chain, after = Chain(softmax.scores, softmax.labels), 1.0
    for _ in range(4 * FAR):
        chain.value, chain.labels = trail.plain(chain.value, chain.labels, cut=True)
        e = trail.maker(chain.value)
        if e is None or not e.primitive.elementwise:
            return chain
        leading = _leading(trail, e)
        if not leading:
            return chain
        if len(leading) > 1:
            chain.blocked = chain.blocked or e
        chain.links.append(Link(e, leading[0], chain.labels, after))
        after = _after(trail, e, leading[0], after)
        v = e.ins[leading[0]]
        assert v is not None
        chain.value = v
    return chain


def _after(trail: Trail, e: Equation, at: int, after: float | None) -> float | None:
    if after is None or e.name in ("add", "add_any", "select_n") or (e.name == "sub" and at == 0):
        return after
    number = factor(trail, e, at)
    return None if number is None or number <= 0 else after * number


def factor(trail: Trail, e: Equation, at: int) -> float | None:
    """The number that `e` multiplies its operand `at` by; None where it does something else."""
    if e.name == "neg":
        return -1.0
    if e.name not in ("mul", "div") or (e.name == "div" and at != 0):
        return None
    number = trail.scalar(e, 1 - at)
    return None if not number else number if e.name == "mul" else 1 / number


def fill_of(trail: Trail, link: Link) -> float | None:
    """The number, as softmax sees it, that `where` puts into the place of scores, where that is so small that they
    count for nothing."""
    e = link.equation
    if e.name != "select_n" or len(e.ins) != 3 or link.at == 0 or e.ins[0] is None or link.after is None:
        return None
    number = trail.scalar(e, 3 - link.at)
    return number * link.after if number is not None and number * link.after <= UNSEEN else None


def _leading(trail: Trail, e: Equation) -> list[int]:
    """The operands of `e` behind which, with only elementwise equations between, a product lies."""
    shapes, shape = trail.program.shapes, trail.program.shapes[e.outs[0]]
    floats = [k for k, v in enumerate(e.ins) if v is not None and shapes[v] == shape]
    floats = [k for k in floats if not (e.name == "select_n" and k == 0)]
    return [k for k in floats if _leads(trail, e.ins[k], 2 * FAR, {})]


def _leads(trail: Trail, v: Value | None, far: int, known: dict[Value, bool]) -> bool:
    assert v is not None
    v, _ = trail.plain(v, (None,) * len(trail.program.shapes[v]), cut=True)
    if v not in known:
        known[v] = False
        e = trail.maker(v)
        if e is None or far == 0:
            return False
        shape = trail.program.shapes[e.outs[0]] if e.outs else ()
        same = [w for w in e.ins if w is not None and trail.program.shapes[w] == shape]
        known[v] = is_product(e) or (
            e.primitive.elementwise and any(_leads(trail, w, far - 1, known) for w in same)
        )
    return known[v]
