"""Log the small outputs of every call of a run, for replay by a resumed run."""

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..device_arrays import to_numpy

MAX_SMALL_BYTES = 64  # bytes of an output that is logged at every call
MAX_PENDING = 256  # calls with outputs on their devices; at this number the older half is read


class SmallOutput(NamedTuple):
    """Description of a small output.

    Attributes:
        output: Position among the program's flat outputs.
        shape: Shape of the array.
        dtype: Name of the dtype.
    """

    output: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return int(np.prod(self.shape, dtype=int)) * jnp.dtype(self.dtype).itemsize


OutputSchema = tuple[SmallOutput, ...]  # small outputs of one program, in order


class StepLog:
    """Small outputs of each call so far.

    `add` waits for long past calls only; `flush` waits for all.
    """

    def __init__(self) -> None:
        self.schemas: list[OutputSchema] = []
        self._schema_indices = array("H")
        self._values: list[bytearray] = []
        self._waiting: deque[tuple[int, Sequence[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._schema_indices) + len(self._waiting)

    def add(self, schema: OutputSchema, outs: Sequence[Any]) -> None:
        """Append a call.

        Args:
            schema: Descriptions of the small outputs of the program, in order.
            outs: The outputs, possibly not finished.
        """
        if schema not in self.schemas:
            self.schemas.append(schema)
            self._values.append(bytearray())
        self._waiting.append((self.schemas.index(schema), outs))
        # The older half has long finished: reading it does not wait for the device.
        if len(self._waiting) >= MAX_PENDING:
            self._read_pending(MAX_PENDING // 2)

    def flush(self) -> None:
        """Wait for all calls so far and read their outputs. Raises the exception of a failed call."""
        self._read_pending(len(self._waiting))

    def iter_calls(self) -> Iterator[tuple[OutputSchema, list[np.ndarray]]]:
        """Yield the descriptions and outputs of each call, from the first on."""
        at = [0] * len(self.schemas)
        for which in list(self._schema_indices):
            values = []
            for small in self.schemas[which]:
                n, start = small.nbytes, at[which]
                part = bytes(self._values[which][start : start + n])
                values.append(np.frombuffer(part, jnp.dtype(small.dtype)).reshape(small.shape))
                at[which] += n
            yield self.schemas[which], values

    def to_data(self) -> tuple[list[Any], dict[str, np.ndarray]]:
        """Return all outputs read so far: the descriptions as JSON data, and arrays by name."""
        arrays: dict[str, np.ndarray] = {"which": np.array(self._schema_indices, np.uint16)}
        for k, values in enumerate(self._values):
            arrays[f"values{k}"] = np.frombuffer(bytes(values), np.uint8)
        return [[list(small) for small in kind] for kind in self.schemas], arrays

    @classmethod
    def from_data(cls, schemas: Sequence[Any], arrays: Mapping[str, Any]) -> "StepLog":
        """Rebuild a log from the values of `to_data`. Raises ValueError, TypeError or KeyError for anything else.

        Args:
            schemas: Descriptions of small outputs, as JSON data.
            arrays: Arrays by name.
        """
        journal = cls()
        journal.schemas = [tuple(SmallOutput(o, tuple(shape), dtype) for o, shape, dtype in kind) for kind in schemas]
        journal._schema_indices = array("H", np.asarray(arrays["which"], np.uint16).tolist())
        journal._values = [bytearray(np.asarray(arrays[f"values{k}"], np.uint8).tobytes()) for k in range(len(schemas))]
        calls = Counter(journal._schema_indices)
        for k, kind in enumerate(journal.schemas):
            if calls.pop(k, 0) * sum(small.nbytes for small in kind) != len(journal._values[k]):
                raise ValueError("calls and what they gave differ in number")
        if calls:
            raise ValueError("calls of no kind")
        return journal

    def _read_pending(self, count: int) -> None:
        """Move the outputs of the oldest `count` pending calls to the host."""
        for _ in range(count):
            # The call stays in the queue during the wait, in which an interrupt may come.
            which, outs = self._waiting[0]
            values = [to_numpy(x) for x in outs]
            self._waiting.popleft()
            self._schema_indices.append(which)
            for small, value in zip(self.schemas[which], values, strict=True):
                self._values[which] += np.asarray(value, jnp.dtype(small.dtype)).tobytes()
