"""Memory in sentences: who is fullest, what was measured, and the largest buffers."""

from jaxshard_magic.report import Buffer, DeviceMemory, Memory
from jaxshard_magic.views import memory as mem
from jaxshard_magic.views.format import byte_text, count_text, device_text, share_text
from jaxshard_magic.views.words.spans import Span, sentence_case, strong


def memory_lead(memory: Memory, named: mem.Named = device_text) -> list[Span]:
    """What the memory view opens with: who is fullest, in bold, and what the others hold."""
    head, rest = mem.clauses(memory, named)
    measured = measured_text(memory)
    said = (
        f" {sentence_case('; '.join([*rest, *([measured] if measured else [])]))}."
        if rest or measured
        else ""
    )
    return [strong(f"{sentence_case(head)}."), Span(said)]


def measured_text(memory: Memory) -> str | None:
    """`measured 5.15 GiB on device 0, 1.2% more than computed`, of the device that held most; None where none was."""
    top = mem.measured(memory)
    if top is None:
        return None
    text = f"measured {byte_text(top.measured)} on device {top.device}"
    off = error_text(top)
    return text if off is None else f"{text}, {off} than computed"


def error_text(device: DeviceMemory) -> str | None:
    """`1.2% more`: the measured peak beside the computed one; None where one of them is not known."""
    off = mem.error(device)
    return None if off is None else f"{share_text(abs(off))} {'more' if off >= 0 else 'less'}"


def live_lead(memory: Memory) -> str:
    """What the curve of live bytes is from."""
    _, refused, stand_in = memory.source.partition("compiled for ")
    source = (
        f"as compiled for {stand_in}, which has the room" if refused else "from XLA\u2019s buffer assignment"
    )
    return f"program order, one device, {source}"


def buffers_lead(memory: Memory) -> str | None:
    """`10 buffers are 95% of the temporaries; 81 more are 152 MiB`; None where the compiler does not tell."""
    if not memory.buffers or memory.others is None:
        return None
    count, rest = memory.others
    told, n = sum(b.bytes for b in memory.buffers), sum(b.count for b in memory.buffers)
    are = f"{count_text(n)} buffer{'s are' if n != 1 else ' is'} {share_text(told / (told + rest))} of the temporaries"
    return are + (
        f"; {count_text(count)} more {'are' if count != 1 else 'is'} {byte_text(rest)}" if count else ""
    )


def buffer_type(buffer: Buffer) -> str:
    """`f32[8,16,128] x2`: the type of one, and how many there are."""
    times = f" \u00d7{count_text(buffer.count)}" if buffer.count > 1 else ""
    return f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]{times}"
