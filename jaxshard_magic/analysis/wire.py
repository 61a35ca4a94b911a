"""Protocol buffers as they lie in memory: fields by number, without the schema or the library.

The format: https://protobuf.dev/programming-guides/encoding/
"""

Value = int | bytes

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NUMBERED = frozenset({_VARINT, _BYTES})  # a number stands behind the tag: the value, or its length
_WIDTH = {_FIXED64: 8, _FIXED32: 4}
_LONGEST = 63  # the bits of a number that may stand before its last byte


def fields(data: bytes) -> list[tuple[int, Value]]:
    """The fields of one message in order, each a number and its value.

    A value is an int, or bytes for what has a length: text, a message, packed numbers. Fixed-width fields are read
    as unsigned little-endian ints. Raises ValueError for bytes that are no message.

    >>> fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02]) + b"hi")
    [(1, 150), (2, b'hi')]
    """
    found: list[tuple[int, Value]] = []
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
                    found.append((tag >> 3, value))
                    continue
            else:
                value = _WIDTH[kind]
            inside = data[position : position + value]
            position += value
            found.append((tag >> 3, inside if kind == _BYTES else int.from_bytes(inside, "little")))
    except (IndexError, KeyError):
        position = end + 1
    if position != end:
        raise ValueError(f"a protocol buffer of {end} bytes is cut short, or is none")
    return found


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
    found, position = [], 0
    try:
        while position < len(value):
            number, position = _varint(value, position)
            found.append(number)
    except IndexError:
        raise ValueError("the last of the packed numbers of a protocol buffer is cut short") from None
    return found


def message(value: Value) -> bytes:
    """A value that must be a message. Raises ValueError for a number."""
    if isinstance(value, int):
        raise ValueError(f"a protocol buffer holds the number {value} where a message belongs")
    return value


def integer(value: Value) -> int:
    """A value that must be a number. Raises ValueError for bytes."""
    if isinstance(value, bytes):
        raise ValueError("a protocol buffer holds bytes where a number belongs")
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
