"""Compare a call of a step between hosts.

Hosts that call with different shapes run different programs, and each waits for the others' collectives.
"""

import json
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ..coordination import BarrierTimeout, gather_texts
from ..errors import ShardError

# Types with an equal `repr` on all hosts. Of other Python values, whose `repr` may have an address in it, only the type
# is compared.
_TOLD = (bool, int, float, str, type(None))
LeafInfo = tuple[str, str, list[int], bool]  # path, dtype, shape, and whether the array is this host's own


class CallComparison:
    """One call of a step on this host, for comparison with the other hosts.

    Hosts compare if one of them calls with another kind of arguments than in its last call.

    Args:
        name: Name of the step.
        is_new: Whether this host's last call was of another kind.
        describe: Makes the description to compare; called only for a comparison.
        hosts: Number of hosts.
        per_host: Whether each host has its own rows of the batch, `--data per-host`.
    """

    def __init__(self, name: str, is_new: bool, describe: "Callable[[], CallDescription]", hosts: int, per_host: bool):
        self.name, self.is_new, self._describe = name, is_new, describe
        self._hosts, self._per_host = hosts, per_host
        self.compared = False

    def compare(self, seconds: float | None = None) -> None:
        """Compare the call with the calls of all other hosts. Every host must call this function.

        Args:
            seconds: Time limit for the other hosts; None for the usual limit.

        Raises:
            ShardError: The calls differ, raised on all hosts with the difference; or not all hosts came within
                `seconds`.
        """
        self.compared = True
        head, leaves = self._describe()
        text = json.dumps([head, leaves])
        try:
            descriptions = [
                json.loads(each) for each in (gather_texts(text, seconds) if seconds else gather_texts(text))
            ]
        except BarrierTimeout:
            largest = max(leaves, key=lambda leaf: prod(leaf[2]), default=("nothing", "", [], True))
            raise ShardError(
                f"this host calls {self.name} with other shapes or options than before, {largest[0]} is {largest[1]}"
                f"{largest[2]}, and not all hosts have come with such a call"
                + (f" within {seconds:g} s" if seconds else "")
            ) from None
        for host, (other_head, other_leaves) in enumerate(descriptions[1:], 1):
            first_head, leaves = descriptions[0]
            if other_head != first_head:
                raise ShardError(
                    f"hosts call {self.name} with other options or fixed arguments: "
                    f"{_first_difference(first_head, other_head)} on host 0, "
                    f"{_first_difference(other_head, first_head)} on host {host}. Give the same on all hosts"
                )
            # Unequal numbers of arrays are reported below, if the common ones are equal.
            for first_leaf, other_leaf in zip(leaves, other_leaves, strict=False):
                if not self._is_compatible(first_leaf, other_leaf):
                    raise ShardError(self._describe_mismatch(first_leaf, other_leaf, host))
            if len(leaves) != len(other_leaves):
                n, m = len(leaves), len(other_leaves)
                raise ShardError(
                    f"hosts call {self.name} with {n} arrays on host 0 and {m} on host {host}. Give as many on all"
                )

    def _is_compatible(self, one: LeafInfo, two: LeafInfo) -> bool:
        """Return whether two hosts' arrays fit the same program: equal, or the global array and a part of it."""
        if one[:2] != two[:2] or len(one[2]) != len(two[2]):
            return False
        if one[3] == two[3] or not self._per_host:
            return one[2] == two[2]
        # One dimension may differ, the batch: each host has an equal part of it.
        whole, part = (two, one) if one[3] else (one, two)
        sizes = [(n, m) for n, m in zip(whole[2], part[2], strict=True) if n != m]
        return not sizes or (len(sizes) == 1 and sizes[0][0] == sizes[0][1] * self._hosts)

    def _describe_mismatch(self, one: LeafInfo, two: LeafInfo, host: int) -> str:
        """Return an error message for an array that differs between host 0 and `host`."""
        if one[0] != two[0]:
            return (
                f"hosts call {self.name} with other trees: {one[0]} on host 0 is {two[0]} on host {host}. Give the "
                "same on all hosts"
            )
        rows = "as many rows: leave out a short last batch, or fill it up"
        how = rows if self._per_host else "the same"
        return (
            f"{self.name}: {one[0]} is {one[1]}{one[2]} on host 0 and {two[1]}{two[2]} on host {host}. Give all hosts "
            f"{how}"
        )


CallDescription = tuple[list[str], list[LeafInfo]]  # texts that must be equal on all hosts, and the flat inputs


def comparable_values(values: Sequence[Any]) -> list[str]:
    """Return a text to compare between hosts for each value that stays a Python value."""
    return [repr(x) if isinstance(x, _TOLD) else type(x).__name__ for x in values]


def _first_difference(texts: Sequence[str], others: Sequence[str]) -> str:
    """Return the first of some texts without an equal text at the same position in `others`."""
    return next((each for i, each in enumerate(texts) if i >= len(others) or each != others[i]), "nothing more")
