"""Calls of a step held against those of other hosts: with other shapes each would run another program, and wait."""

import json
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ..coordination import Late, gathered
from ..errors import ShardError

_TOLD = (
    bool,
    int,
    float,
    str,
    type(None),
)  # of values that stay Python's, those that mean the same everywhere
Leaf = tuple[str, str, list[int], bool]  # path, dtype, shape, and whether it is this host's own array


class CallKind:
    """One call of a step as this host makes it, which hosts compare where one of them says that it is another one than
    its last.

    Args:
        name: The step's.
        is_new: Whether this host's last call was of another kind.
        describe: What there is to compare, asked where it is compared.
        hosts: How many there are.
        apart: Whether each host has its own rows of the batch, `--data per-host`.
    """

    def __init__(
        self, name: str, is_new: bool, describe: "Callable[[], Description]", hosts: int, apart: bool
    ):
        self.name, self.is_new, self._describe = name, is_new, describe
        self._hosts, self._apart = hosts, apart
        self.compared = False

    def compare(self, seconds: float | None = None) -> None:
        """Compare it with that of the other hosts, all of which come here. Raises ShardError on all of them where they
        differ; the line says what is what on which. Also where others do not come in so many seconds."""
        self.compared = True
        head, leaves = self._describe()
        text = json.dumps([head, leaves])
        try:
            said = [json.loads(each) for each in (gathered(text, seconds) if seconds else gathered(text))]
        except Late:
            largest = max(leaves, key=lambda leaf: prod(leaf[2]), default=("nothing", "", [], True))
            raise ShardError(
                f"this host calls {self.name} with other shapes or options than before, {largest[0]} is {largest[1]}"
                f"{largest[2]}, and not all hosts have come with such a call within {seconds:g} s"
            ) from None
        for host, (other, others) in enumerate(said[1:], 1):
            first, leaves = said[0]
            if other != first:
                raise ShardError(
                    f"hosts call {self.name} with other options or fixed arguments: {_apart(first, other)} on host 0, "
                    f"{_apart(other, first)} on host {host}. Give the same on all hosts"
                )
            for one, two in zip(leaves, others, strict=False):
                if not self._go_together(one, two):
                    raise ShardError(self._told(one, two, host))
            if len(leaves) != len(others):
                n, m = len(leaves), len(others)
                raise ShardError(
                    f"hosts call {self.name} with {n} arrays on host 0 and {m} on host {host}. Give as many on all"
                )

    def _go_together(self, one: Leaf, two: Leaf) -> bool:
        """Whether two hosts' arrays are of one program: alike, or one of them all of what the other has a part of."""
        if one[:2] != two[:2] or len(one[2]) != len(two[2]):
            return False
        if one[3] == two[3] or not self._apart:
            return one[2] == two[2]
        whole, part = (two, one) if one[3] else (one, two)
        sizes = [(n, m) for n, m in zip(whole[2], part[2], strict=True) if n != m]
        return not sizes or (len(sizes) == 1 and sizes[0][0] == sizes[0][1] * self._hosts)

    def _told(self, one: Leaf, two: Leaf, host: int) -> str:
        if one[0] != two[0]:
            return (
                f"hosts call {self.name} with other trees: {one[0]} on host 0 is {two[0]} on host {host}. Give the "
                "same on all hosts"
            )
        rows = "as many rows: leave out a short last batch, or fill it up"
        how = rows if self._apart else "the same"
        return (
            f"{self.name}: {one[0]} is {one[1]}{one[2]} on host 0 and {two[1]}{two[2]} on host {host}. Give all hosts "
            f"{how}"
        )


Description = tuple[list[str], list[Leaf]]  # what is to be equal, and the flat inputs


def fixed(held: Sequence[Any]) -> list[str]:
    """What of values that stay Python's can be held against another host's."""
    return [repr(x) if isinstance(x, _TOLD) else type(x).__name__ for x in held]


def _apart(one: Sequence[str], two: Sequence[str]) -> str:
    """The first of some texts that others have not."""
    return next((each for i, each in enumerate(one) if i >= len(two) or each != two[i]), "nothing more")
