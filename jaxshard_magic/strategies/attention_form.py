"""Form of attention over sharded positions: gathered keys and values, a ring, or sharded heads."""

from collections.abc import Sequence
from dataclasses import replace

from ..errors import ShardError
from ..plan import Finding
from ..program.source_lines import user_line
from .attention_heads import AttentionBlock, AttentionBlocks
from .layout import Layout
from .ring_layout import find_rings


def choose_attention_form(layout: Layout, attention: str | None) -> str:
    """Fill in how attention works over sharded positions, and return the form in use.

    A form requested but not possible for any attention of the step is not returned.

    Args:
        layout: The layout, with positions already sharded. `spec_overrides` and `findings` are changed for heads.
        attention: "gather", "heads", "ring" or "auto", or None for the usual form.

    Returns:
        "heads", "ring" or "gather".

    Raises:
        ShardError: Heads are requested and do not divide over the axes, or the step has no attention.
    """
    if attention == "heads":
        attentions = AttentionBlocks(layout)
        _check_heads_divide(layout, attentions.blocks)
        layout.spec_overrides = attentions.head_overrides()
        over = "+".join(layout.position_axes)
        layout.findings.append(
            Finding("inside", "info", f"attention with its heads over {over} in the place of positions")
        )
        return "heads"
    if find_rings(layout):
        return "ring"
    return "heads" if _heads_are_tensor_parallel(layout) else "gather"


def with_sharded_heads(layout: Layout) -> Layout | None:
    """Return a copy of the layout with heads sharded in place of positions in every attention.

    Return None where the heads of some attention do not divide, or where the step has no attention.
    """
    attentions = AttentionBlocks(layout)
    if not attentions.blocks or not all(each.head_classes for each in attentions.blocks):
        return None
    return replace(layout, spec_overrides=attentions.head_overrides())


def _heads_are_tensor_parallel(layout: Layout) -> bool:
    """Return whether tensor parallelism shards the heads of every attention over the axes used by positions outside
    attention."""
    if not layout.tensor_class_axes:
        return False
    # Scores are products with two dimensions of positions, those of the queries and those of the keys.
    scores = [
        e.results[0]
        for e in layout.program.equations
        if e.primitive.is_product
        and sum(c in layout.position_classes for c in layout.dims.classes_of(e.results[0])) > 1
    ]
    axes = ({a for has in layout.tensor_axes(v) for a in has} for v in scores)
    return bool(scores) and all(has.issuperset(layout.position_axes) for has in axes)


def _check_heads_divide(layout: Layout, blocks: Sequence[AttentionBlock]) -> None:
    """Raise `ShardError` for heads not divisible by the position axes, and for a step without attention."""
    if not blocks:
        raise ShardError("--attention heads: no attention over positions was found in the step; leave it out")
    for each in blocks:
        if not each.head_classes:
            raise ShardError(f"--attention heads: {_describe_indivisible_heads(layout, each)}, or --attention gather")


def _describe_indivisible_heads(layout: Layout, block: AttentionBlock) -> str:
    """Describe the head counts that do not divide, the mesh axes concerned, and a mesh that would work."""
    sizes, mesh = block.sizes, layout.mesh.shape
    over = " ".join(f"{a}={mesh[a]}" for a in block.axes)
    heads = f"{' x '.join(map(str, sizes))} heads, which do" if sizes else "one head, which does"
    line = user_line(block.scores.jaxpr_eqn)
    where = f"the attention at {line}" if line else "an attention"
    use = f"use a mesh whose {'*'.join(block.axes)} divides {max(sizes)}" if sizes else "use another strategy"
    return f"{where} has {heads} not divide by {over}; {use}"
