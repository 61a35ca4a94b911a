"""The option that says how attention gets at positions that other devices hold, checked."""

from collections.abc import Sequence

from ..errors import ShardError
from .gradient_options import check_choice

ATTENTION = ("gather", "heads", "ring", "auto")


def check_attention(names: Sequence[str], attention: str | None) -> None:
    """Raise `ShardError` for a word that is none of `ATTENTION`, and for any where the strategy, the sum of `names`,
    divides no positions."""
    if attention is None:
        return
    check_choice("--attention", attention, ATTENTION)
    if "sp" not in names:
        strategy = "+".join((*(name for name in names if name not in ("pmap", "spmd")), "sp"))
        raise ShardError(
            f"--attention {attention} says how attention reads divided positions, and {'+'.join(names)} divides none; "
            f"leave it out, or write %%shard {strategy} --attention {attention}",
            fix=f"%%shard {strategy} --attention {attention}",
        )
