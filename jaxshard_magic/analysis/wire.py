"""Protocol buffers as they lie in memory: fields by number, without the schema or the library.

The format: https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Sequence

import numpy as np

Value = int | bytes

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NUMBERED = frozenset({_VARINT, _BYTES})  # a number stands behind the tag: the value, or its length
_WIDTH = {_FIXED64: 8, _FIXED32: 4}
_LONGEST = 63  # the bits of a number that may stand before its last byte
_MOST_BYTES = 10  # of a number
_ALONE = 64  # packed numbers in fewer bytes are sooner read one by one
_TOGETHER = 16  # fields of many messages are read side by side; those that longer ones have more, one by one


def fields(data: bytes) -> list[tuple[int, Value]]:
    """The fields of one message in order, each a number and its value.

    A value is an int, or bytes for what has a length: text, a message, packed numbers. Fixed-width fields are read
    as unsigned little-endian ints. Raises ValueError for bytes that are no message.

    >>> fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02]) + b"hi")
    [(1, 150), (2, b'hi')]
    """
    every: list[tuple[int, Value]] = []
    position, end = 0, len(data)
    try:
        while position < end:
            tag = data[position]
            position += 1
            if tag > 127:  # most numbers are of one byte, and a call for each would take half of the time
                tag, position = _varint(data, position - 1)
            kind = tag & 7
            if kind in _NUMBERED:
                value = data[position]
                position += 1
                if value > 127:
                    value, position = _varint(data, position - 1)
                if kind == _VARINT:
                    every.append((tag >> 3, value))
                    continue
            else:
                value = _WIDTH[kind]
            inside = data[position : position + value]
            position += value
            every.append((tag >> 3, inside if kind == _BYTES else int.from_bytes(inside, "little")))
    except (IndexError, KeyError):
        position = end + 1
    if position != end:
        raise _broken(end)
    return every


def messages(fields: Sequence[tuple[int, Value]], number: int) -> list[bytes]:
    """All messages of a repeated field among `fields`. Raises ValueError where a number is among them."""
    return [value if isinstance(value, bytes) else message(value) for key, value in fields if key == number]


def record(data: bytes) -> dict[int, Value]:
    """The fields of a message by number; of those that it has twice, the last. Raises ValueError."""
    return dict(fields(data))


def integers(value: Value) -> list[int]:
    """The numbers of a repeated field's value, packed or alone. Raises ValueError.

    >>> integers(bytes([3, 0x8E, 0x02]))
    [3, 270]
    """
    if isinstance(value, int):
        return [value]
    if len(value) >= _ALONE and value[-1] < 128:
        data = _padded(value)
        ends = np.flatnonzero(data[: len(value)] < 128) + 1
        return _varints(data, np.concatenate(([0], ends[:-1])))[0].tolist()
    numbers, position = [], 0
    try:
        while position < len(value):
            number, position = _varint(value, position)
            numbers.append(number)
    except IndexError:
        raise ValueError("the last of the packed numbers of a protocol buffer is cut short") from None
    return numbers


def columns(
    messages: Sequence[bytes], numbers: Sequence[int], texts: Sequence[int] = ()
) -> tuple[list[list[int]], list[list[bytes]]]:
    """Some fields of many messages of one kind: for each of `numbers` and each of `texts` a value of every message.

    Those of `numbers` are ints, 0 where a message has none, those of `texts` bytes; of those that it has twice, the
    last. Raises ValueError.

    >>> columns([bytes([0x08, 0x96, 0x01, 0x12, 0x02]) + b"hi", b""], [1], [2])
    ([[150, 0]], [[b'hi', b'']])
    """
    joined = b"".join(messages)
    data, lengths = _padded(joined), np.fromiter(map(len, messages), np.int64, len(messages))
    ends = lengths.cumsum()
    at, left = ends - lengths, np.flatnonzero(lengths)  # where to go on, and in which messages
    table = np.zeros((len(numbers), len(messages)), np.uint64)
    spans = np.zeros((len(texts), 2, len(messages)), np.int64)
    for _ in range(_TOGETHER):
        tags, inside = _varints(data, at[left])
        values, inside = _varints(data, inside)
        kinds = tags & 7
        if (kinds[kinds != _BYTES] != _VARINT).any():
            break
        long = np.where(kinds == _BYTES, np.minimum(values, len(data)), 0)
        behind = inside + long.astype(np.int64)
        if (behind > ends[left]).any():
            raise _broken(len(joined))
        for number, column in zip(numbers, table, strict=True):
            here = tags == number << 3 | _VARINT
            column[left[here]] = values[here]
        for number, span in zip(texts, spans, strict=True):
            here = tags == number << 3 | _BYTES
            span[:, left[here]] = inside[here], behind[here]
        at[left] = behind
        left = left[behind < ends[left]]
    ints = table.tolist()
    parts = [[joined[a:b] for a, b in zip(*span, strict=True)] for span in spans.tolist()]
    for row in left.tolist():
        for number, value in fields(joined[at[row] : ends[row]]):
            if isinstance(value, int) and number in numbers:
                ints[numbers.index(number)][row] = value
            elif isinstance(value, bytes) and number in texts:
                parts[texts.index(number)][row] = value
    return ints, parts


def message(value: Value) -> bytes:
    """A value that must be a message. Raises ValueError for a number."""
    if isinstance(value, int):
        raise ValueError(f"a protocol buffer holds the number {value} where a message belongs")
    return value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at `position`, and where the next field starts. Raises IndexError where it does not end."""
    value = data[position]
    position += 1
    if value < 128:
        return value, position
    value &= 127
    for shift in range(7, _LONGEST + 1, 7):
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise IndexError


def _varints(data: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers at many positions of `data`, which is `_padded`, and where the next fields start."""
    values, at = data[at].astype(np.uint64), at + 1
    more = np.flatnonzero(values > 127)
    values &= 127
    for shift in range(7, _LONGEST + 1, 7):
        if not more.size:
            break
        part = data[at[more]].astype(np.uint64)
        values[more] |= (part & 127) << shift
        at[more] += 1
        more = more[part > 127]
    if more.size:
        raise _broken(data.size)
    return values, at


def _padded(data: bytes) -> np.ndarray:
    """The bytes with zeros behind them, so that a tag and a number that are cut short end there."""
    return np.frombuffer(data + bytes(2 * _MOST_BYTES), np.uint8)


def _broken(size: int) -> ValueError:
    return ValueError(f"a protocol buffer of {size} bytes is cut short, or is none")
