"""`--remat` in the user's text."""

from typing import TYPE_CHECKING

from ..gradients.remat import POLICIES
from .cells import Cells
from .edits import Asked, rematted

if TYPE_CHECKING:
    from ..step import ShardedStep


def recomputed(step: "ShardedStep", cells: Cells) -> Asked:
    """`jax.checkpoint` around what is scanned over, or around the loss; none where the option has no such form."""
    policy = _policy(step)
    if policy is None:
        return Asked()
    how = policy or None
    files = cells.trees.items()
    edits = [e for f, tree in files for e in rematted(tree, f, cells.lines[f], how, cells.imports)]
    return Asked(tuple(edits), frozenset({"remat"} if edits else ()))


def _policy(step: "ShardedStep") -> str | None:
    """The policy of the step's remat as Python, empty for jax's own; None where it has none, or another way."""
    names = {"full": "", "nothing": "", "nothing_saveable": "", "dots": "dots_saveable"}
    how = step.inside.remat
    if how not in POLICIES or how == "offload":
        return None
    own = names.get(how, how)
    return own and f"jax.checkpoint_policies.{own}"
