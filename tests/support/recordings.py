"""Recordings by hand: an XSpace as jax's profiler makes one, from operations that a test writes down."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jax.profiler import ProfileData

from jaxshard_magic.analysis.xplane import STEP_ANNOTATION

CELL = "/tmp/cell.py"
HEADER = """HloModule jit_step, is_scheduled=true

FileNames
1 "/tmp/cell.py"

FunctionNames
1 "loss"

FileLocations
{locations}

StackFrames
{frames}

"""
_LINES = range(1, 10)


def program(body: str) -> str:
    """HLO text whose `stack_frame_id=n` is line n of the cell."""
    locations = "\n".join(f"{n} {{file_name_id=1 function_name_id=1 line={n}}}" for n in _LINES)
    frames = "\n".join(f"{n} {{file_location_id={n} parent_frame_id=0}}" for n in _LINES)
    return HEADER.format(locations=locations, frames=frames) + body


def at(line: int, name: str) -> str:
    """What stands behind an instruction that jax called `name` on a line of the cell."""
    return f'metadata={{op_name="jit(step)/{name}" stack_frame_id={line}}}'


@dataclass(frozen=True)
class Event:
    """From `start` to `end`, in microseconds."""

    name: str
    start: float
    end: float
    stats: Mapping[str, str | int] = field(default_factory=dict)


def operation(name: str, start: float, end: float, device: int, module: str = "jit_step") -> Event:
    """An operation as CPU records one."""
    return Event(name, start, end, {"hlo_op": name, "hlo_module": module, "device_ordinal": device})


def call(start: float, end: float) -> Event:
    """A call of the step."""
    return Event(STEP_ANNOTATION, start, end)


def recorded(planes: Mapping[str, Mapping[str, Sequence[Event]]]) -> bytes:
    """Planes of lines of events as an XSpace, serialized."""
    text = "\n".join(_plane(name, lines) for name, lines in planes.items())
    return ProfileData.text_proto_to_serialized_xspace(text)


def _plane(name: str, lines: Mapping[str, Sequence[Event]]) -> str:
    events, stats = dict[str, int](), dict[str, int]()
    rows = "\n".join(_line(i, line, each, events, stats) for i, (line, each) in enumerate(lines.items()))
    named = (("event_metadata", events), ("stat_metadata", stats))
    tables = (
        f'{table} {{ key: {n} value {{ id: {n} name: "{name}" }} }}'
        for table, names in named
        for name, n in names.items()
    )
    return f'planes {{ name: "{name}"\n{rows}\n' + "\n".join(tables) + " }"


def _line(number: int, name: str, events: Sequence[Event], names: dict[str, int], stats: dict[str, int]) -> str:
    def event(e: Event) -> str:
        told = " ".join(
            f"stats {{ metadata_id: {stats.setdefault(key, len(stats) + 1)} "
            + (f'str_value: "{value}"' if isinstance(value, str) else f"int64_value: {value}")
            + " }"
            for key, value in e.stats.items()
        )
        metadata = names.setdefault(e.name, len(names) + 1)
        start, takes = round(e.start * 1e6), round((e.end - e.start) * 1e6)
        return f"events {{ metadata_id: {metadata} offset_ps: {start} duration_ps: {takes} {told} }}"

    return f'lines {{ id: {number} name: "{name}" timestamp_ns: 0 ' + "\n".join(map(event, events)) + " }"
