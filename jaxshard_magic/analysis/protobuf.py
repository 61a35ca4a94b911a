"""Reader of protocol buffers without schema or library: fields by number.

The format: https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Sequence

import numpy as np

Value = int | bytes

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NUMBERED = frozenset({_VARINT, _BYTES})  # wire types with a varint after the tag: the value, or its length
_WIDTH = {_FIXED64: 8, _FIXED32: 4}
_LONGEST = 63  # bits of a varint before its last byte
_MOST_BYTES = 10  # bytes of the longest varint
_ALONE = 64  # bytes; fewer packed numbers are read faster one by one
# Fields of each message that are read for all messages at once; further fields are read message by message.
_TOGETHER = 16


def fields(data: bytes) -> list[tuple[int, Value]]:
    """Return the fields of one message in order, each as number and value.

    A value is an int, or bytes for length-delimited fields (text, messages, packed numbers). Fixed-width fields are
    read as unsigned little-endian ints.

    Raises:
        ValueError: The bytes are not a message.

    >>> fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02]) + b"hi")
    [(1, 150), (2, b'hi')]
    """
    every: list[tuple[int, Value]] = []
    position, end = 0, len(data)
    try:
        while position < end:
            tag = data[position]
            position += 1
            if tag > 127:  # most varints have one byte, and a call for each would take half of the time
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
    """Return all messages of a repeated field.

    Args:
        fields: Fields of the outer message.
        number: Number of the repeated field.

    Raises:
        ValueError: A value of the field is a number.
    """
    return [value if isinstance(value, bytes) else message(value) for key, value in fields if key == number]


def fields_by_number(data: bytes) -> dict[int, Value]:
    """Return the fields of a message by number, and the last value of a repeated one. Raises ValueError."""
    return dict(fields(data))


def integers(value: Value) -> list[int]:
    """Return the numbers of a repeated field's value, packed or single. Raises ValueError.

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
    """Return some fields of many messages of one kind: for each field number, the values in all messages.

    Args:
        messages: The messages.
        numbers: Numbers of integer fields. The value is 0 where a message has none.
        texts: Numbers of length-delimited fields. The value is b"" where a message has none.

    Returns:
        Columns of ints and columns of bytes. Of a repeated field the last value is taken.

    Raises:
        ValueError: The bytes are not messages.

    >>> columns([bytes([0x08, 0x96, 0x01, 0x12, 0x02]) + b"hi", b""], [1], [2])
    ([[150, 0]], [[b'hi', b'']])
    """
    joined = b"".join(messages)
    data, lengths = _padded(joined), np.fromiter(map(len, messages), np.int64, len(messages))
    ends = lengths.cumsum()
    at, left = ends - lengths, np.flatnonzero(lengths)  # next position in each message, and messages with fields left
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
    # Messages with more fields than are read vectorized, or with fixed-width fields, are read one by one.
    for row in left.tolist():
        for number, value in fields(joined[at[row] : ends[row]]):
            if isinstance(value, int) and number in numbers:
                ints[numbers.index(number)][row] = value
            elif isinstance(value, bytes) and number in texts:
                parts[texts.index(number)][row] = value
    return ints, parts


def message(value: Value) -> bytes:
    """Return a value as a message. Raises ValueError for a number."""
    if isinstance(value, int):
        raise ValueError(f"a protocol buffer holds the number {value} where a message belongs")
    return value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the varint at `position`, and the start of the next field. Raises IndexError for a truncated one."""
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
    """Return the varints at many positions of padded `data`, and the starts of the next fields."""
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
    """Return the bytes followed by zeros, so that truncated tags and numbers end within the array."""
    return np.frombuffer(data + bytes(2 * _MOST_BYTES), np.uint8)


def _broken(size: int) -> ValueError:
    return ValueError(f"a protocol buffer of {size} bytes is cut short, or is none")
