"""How attention gets at positions that other devices hold: keys and values gathered, or heads divided instead."""

from collections.abc import Sequence
from dataclasses import replace

from ..errors import ShardError
from ..plan import Finding
from ..program.lines import users_line
from .heads import Attended, Attentions
from .layout import Layout
from .rings import rings


def attend(layout: Layout, attention: str | None) -> str:
    """Fill in how attention works where positions are divided; which form it is: one that is asked for and that no
    attention of the step can take is none.

    Args:
        layout: with its positions divided.
        attention: one of `request.ATTENTION`; None for the usual form.

    Raises `ShardError` where heads are asked for and do not divide.
    """
    if attention == "heads":
        attentions = Attentions(layout)
        _all_divide(layout, attentions.found)
        layout.exchanges = attentions.by_heads()
        over = "+".join(layout.sequence_axes)
        layout.findings.append(
            Finding("inside", "info", f"attention with its heads over {over} in the place of positions")
        )
        return "heads"
    if rings(layout):
        return "ring"
    return "heads" if _heads_of_tensor(layout) else "gather"


def divides_heads(layout: Layout) -> Layout | None:
    """The same layout with the heads of every attention divided in the place of positions; None where some don't
    divide, or there are none."""
    attentions = Attentions(layout)
    if not attentions.found or not all(each.heads for each in attentions.found):
        return None
    return replace(layout, exchanges=attentions.by_heads())


def _heads_of_tensor(layout: Layout) -> bool:
    """Whether tensor parallelism divides the heads of all attentions over the axes that positions have elsewhere."""
    if not layout.tensor:
        return False
    scores = [
        e.outs[0]
        for e in layout.program.equations
        if e.primitive.product and sum(c in layout.sequence for c in layout.dims.of(e.outs[0])) > 1
    ]
    axes = ({a for has in layout.tensor_axes(v) for a in has} for v in scores)
    return bool(scores) and all(has.issuperset(layout.sequence_axes) for has in axes)


def _all_divide(layout: Layout, found: Sequence[Attended]) -> None:
    """Refuse attention whose heads do not divide over the axes of the positions, and a step without any."""
    if not found:
        raise ShardError("--attention heads: no attention over positions was found in the step; leave it out")
    for each in found:
        if not each.heads:
            raise ShardError(f"--attention heads: {_odd(layout, each)}, or --attention gather")


def _odd(layout: Layout, attention: Attended) -> str:
    """What does not divide, over what, and a mesh on which it would."""
    sizes, mesh = attention.sizes, layout.mesh.shape
    over = " ".join(f"{a}={mesh[a]}" for a in attention.over)
    heads = f"{' x '.join(map(str, sizes))} heads, which do" if sizes else "one head, which does"
    line = users_line(attention.scores.eqn)
    where = f"the attention at {line}" if line else "an attention"
    use = (
        f"use a mesh whose {'*'.join(attention.over)} divides {max(sizes)}"
        if sizes
        else "use another strategy"
    )
    return f"{where} has {heads} not divide by {over}; {use}"
