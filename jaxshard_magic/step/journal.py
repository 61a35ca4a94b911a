"""What the calls of a run gave that is small, call by call: a run that goes on later gives it once more."""

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..placing import whole

SMALL = 64  # bytes of an output that is kept for every call
MOST = 256  # calls whose outputs wait on their devices; then the older half of them is read


class Small(NamedTuple):
    """A small output: which of the program's, its shape, and the name of its dtype."""

    output: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=int)) * jnp.dtype(self.dtype).itemsize


Kind = tuple[Small, ...]  # of the outputs of one program, in order


class Journal:
    """The small outputs of each call so far. `add` waits for nothing but calls long past; `read` for all."""

    def __init__(self) -> None:
        self.kinds: list[Kind] = []
        self._which = array("H")
        self._values: list[bytearray] = []
        self._waiting: deque[tuple[int, Sequence[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._which) + len(self._waiting)

    def add(self, kind: Kind, outs: Sequence[Any]) -> None:
        """One more call, which gave `outs`."""
        if kind not in self.kinds:
            self.kinds.append(kind)
            self._values.append(bytearray())
        self._waiting.append((self.kinds.index(kind), outs))
        if len(self._waiting) >= MOST:
            self._read(MOST // 2)

    def read(self) -> None:
        """Wait for the calls so far, and read what they gave. Raises what a call raises that failed."""
        self._read(len(self._waiting))

    def calls(self) -> Iterator[tuple[Kind, list[np.ndarray]]]:
        """What each call gave, from the first on."""
        at = [0] * len(self.kinds)
        for which in list(self._which):
            values = []
            for small in self.kinds[which]:
                n, start = small.nbytes, at[which]
                part = bytes(self._values[which][start : start + n])
                values.append(np.frombuffer(part, jnp.dtype(small.dtype)).reshape(small.shape))
                at[which] += n
            yield self.kinds[which], values

    def data(self) -> tuple[list[Any], dict[str, np.ndarray]]:
        """All that was read: the kinds, as JSON has them, and arrays."""
        arrays: dict[str, np.ndarray] = {"which": np.array(self._which, np.uint16)}
        for k, values in enumerate(self._values):
            arrays[f"values{k}"] = np.frombuffer(bytes(values), np.uint8)
        return [[list(small) for small in kind] for kind in self.kinds], arrays

    @classmethod
    def of(cls, kinds: Sequence[Any], arrays: Mapping[str, Any]) -> "Journal":
        """The journal that `data` gave. Raises ValueError, TypeError and KeyError for anything else."""
        journal = cls()
        journal.kinds = [tuple(Small(o, tuple(shape), dtype) for o, shape, dtype in kind) for kind in kinds]
        journal._which = array("H", np.asarray(arrays["which"], np.uint16).tolist())
        journal._values = [
            bytearray(np.asarray(arrays[f"values{k}"], np.uint8).tobytes()) for k in range(len(kinds))
        ]
        calls = Counter(journal._which)
        for k, kind in enumerate(journal.kinds):
            if calls.pop(k, 0) * sum(small.nbytes for small in kind) != len(journal._values[k]):
                raise ValueError("calls and what they gave differ in number")
        if calls:
            raise ValueError("calls of no kind")
        return journal

    def _read(self, count: int) -> None:
        for _ in range(count):
            which, outs = self._waiting[0]
            values = [whole(x) for x in outs]
            self._waiting.popleft()
            self._which.append(which)
            for small, value in zip(self.kinds[which], values, strict=True):
                self._values[which] += np.asarray(value, jnp.dtype(small.dtype)).tobytes()
