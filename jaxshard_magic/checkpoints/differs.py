"""What a checkpoint has, held against what is wanted of it, before anything is read."""

from collections.abc import Collection, Sequence

from ..errors import ShardError, did_you_mean
from .saved import SavedLeaf


def check_same(
    saved: Sequence[SavedLeaf],
    wanted: Sequence[SavedLeaf],
    where: str,
    *,
    cast: bool = False,
    spare: Collection[str] = (),
) -> None:
    """Raise ShardError, in one line that names the first leaf that differs, where a checkpoint is of another state.

    `where`: what the checkpoint is called. `cast`: whether another dtype is converted; never to or from PRNG keys.
    `spare`: leaves that need not be wanted.

    >>> check_same([SavedLeaf("w", (8,), "float32")], [SavedLeaf("w", (4,), "float32")], "ckpt/3")
    Traceback (most recent call last):
    jaxshard_magic.errors.ShardError: w is float32[8] in ckpt/3 and float32[4] here; build the model that was saved
    """
    have, want = {x.path: x for x in saved}, {x.path: x for x in wanted}
    for path, leaf in want.items():
        if path not in have:
            others = f"{len(want.keys() - have.keys())} of {len(want)} are not in it"
            raise ShardError(
                f"{where} has no {path}.{did_you_mean(path, have.keys() - want.keys())} It was saved under another "
                f"name, or of another model: {others}"
            )
        there = have[path]
        keys = "key<" in leaf.dtype or "key<" in there.dtype
        if there.shape != leaf.shape or (there.dtype != leaf.dtype and (keys or not cast)):
            a, b = (str(x).removeprefix(f"{path} ") for x in (there, leaf))
            fix = "build the model that was saved"
            if there.shape == leaf.shape and not keys:
                fix = "cast=True, or --cast on the line, converts it"
            raise ShardError(f"{path} is {a} in {where} and {b} here; {fix}")
    if left := [path for path in have if path not in want and path not in spare]:
        raise ShardError(
            f"{where} has {left[0]}, which is not in the state that it is restored into"
            f"{f', and {len(left) - 1} more' if len(left) > 1 else ''}; give all of the state that was saved"
        )
