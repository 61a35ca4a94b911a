"""Memory in words: the fullest devices, measured peaks, and the buffers in use at the peak."""

from collections.abc import Callable, Sequence

from jaxshard_magic.report import Buffer, DeviceMemory, Memory, Report
from jaxshard_magic.views import device_memory
from jaxshard_magic.views.format import UNKNOWN, byte_text, count_text, device_text, limit_text, share_text, usage_text
from jaxshard_magic.views.source_lines import line_in_words
from jaxshard_magic.views.words.spans import Span, called_spans, line_span, sentence_case, strong

Named = Callable[[Sequence[int]], str]
# Names of operations in JAX and XLA, with a reader's name for the result.
OPERATIONS = {
    "add": "sum of two",
    "add_any": "sum of two",
    "all-gather": "gathered array",
    "all-reduce": "sum over devices",
    "all-to-all": "array dealt out anew",
    "broadcast_in_dim": "broadcast",
    "collective-permute": "array from a neighbour",
    "concatenate": "concatenation",
    "conv_general_dilated": "convolution",
    "convert": "cast",
    "convert_element_type": "cast",
    "convolution": "convolution",
    "cumsum": "running sum",
    "custom-call": "custom call",
    "div": "quotient",
    "divide": "quotient",
    "dot": "matmul",
    "dot_general": "matmul",
    "dynamic-slice": "slice",
    "dynamic_slice": "slice",
    "dynamic-update-slice": "stack",
    "dynamic_update_slice": "stack",
    "exp": "exponential",
    "exponential": "exponential",
    "fusion": "fused operations",
    "gather": "lookup",
    "integer_pow": "power",
    "iota": "positions",
    "logistic": "sigmoid",
    "max": "larger of two",
    "maximum": "larger of two",
    "min": "smaller of two",
    "minimum": "smaller of two",
    "mul": "product of two",
    "multiply": "product of two",
    "neg": "negative",
    "pad": "padded array",
    "pow": "power",
    "random_bits": "random bits",
    "reduce": "reduction",
    "reduce-scatter": "sum over devices, a part each",
    "reduce_max": "maximum",
    "reduce_min": "minimum",
    "reduce_sum": "sum",
    "reduce_window": "pooling",
    "reduce_window_max": "pooling",
    "reduce_window_sum": "pooling",
    "rsqrt": "inverse root",
    "scatter-add": "sum by index",
    "scatter_add": "sum by index",
    "select": "masked choice",
    "select_and_scatter_add": "gradient of pooling",
    "select_n": "masked choice",
    "sharding_constraint": "array in another layout",
    "sqrt": "root",
    "sub": "difference",
    "subtract": "difference",
    "threefry2x32": "random bits",
    "while": "state of a loop",
}


def memory_lead(memory: Memory, named: Named = device_text) -> list[Span]:
    """Return the first sentences of the memory view: the fullest devices in bold, then the others.

    Args:
        memory: Memory of all devices.
        named: Returns the text for device ids.
    """
    head, rest = clauses(memory, named)
    others = "; ".join(filter(None, [*rest, measured_text(memory)]))
    return [strong(f"{sentence_case(head)}."), Span(f" {sentence_case(others)}." if others else "")]


def measured_text(memory: Memory) -> str | None:
    """Return the largest measured peak: `measured 5.15 GiB on device 0, 1.2% more than computed`; None without a
    measurement."""
    top = device_memory.highest_measured(memory)
    if top is None:
        return None
    text = f"measured {byte_text(top.measured)} on device {top.device}"
    off = error_text(top)
    return text if off is None else f"{text}, {off} than computed"


def error_text(device: DeviceMemory) -> str | None:
    """Return the measured peak relative to the computed one: `1.2% more`; None if either is unknown."""
    off = device_memory.error(device)
    return None if off is None else f"{share_text(abs(off))} {'more' if off >= 0 else 'less'}"


def live_lead(memory: Memory) -> str:
    """Return the source of the curve of bytes in use, and the difference between its top and the peak."""
    # A source "compiled for CHIP" means that the chip's compiler refused the step; figures are those of a larger chip.
    _, refused, stand_in = memory.source.partition("compiled for ")
    source = f"as compiled for {stand_in}, which has the room" if refused else "from XLA\u2019s buffer assignment"
    sentence = f"program order, one device, {source}"
    live, top = memory.live, device_memory.fullest(memory)
    if refused or live is None or top is None or top.peak is None:
        return sentence
    most, alike = live.bytes[live.peak], {byte_text(d.peak) for d in memory.per_device}
    if byte_text(most) in alike:
        return sentence
    more = "the gaps between buffers" if most < top.peak else "no constants of the program"
    return f"{sentence}; the peak of {byte_text(top.peak)} counts {more}{' as well' * (most < top.peak)}"


def live_text(memory: Memory) -> str | None:
    """Return the top of the curve with its line: `at most 4.63 GiB in use, cell [7], line 15`; None without a curve."""
    live = memory.live
    if live is None or not live.bytes:
        return None
    return ", ".join(filter(None, (f"at most {byte_text(live.bytes[live.peak])} in use", line_in_words(live))))


def fullest_text(groups: Sequence[device_memory.DeviceGroup]) -> str:
    """Return the devices of the fullest group: `every device`, `the fullest device`; empty for a single device."""
    if len(groups) > 1:
        return "the fullest device" if len(groups[0].devices) == 1 else "the fullest devices"
    return "every device" if len(groups[0].devices) > 1 else ""


def memory_sentence(memory: Memory, named: Named = device_text) -> str:
    """Return the memory of all devices in one sentence: `device 0 is fullest, 5.09 of 15.75 GiB; devices 1 to 7 ...`.

    Args:
        memory: Memory of all devices.
        named: Returns the text for device ids.
    """
    head, rest = clauses(memory, named)
    return "; ".join((head, *rest))


def clauses(memory: Memory, named: Named = device_text) -> tuple[str, list[str]]:
    """Return a clause on the fullest devices, and clauses on the others.

    Args:
        memory: Memory of all devices.
        named: Returns the text for device ids.
    """
    groups, most = device_memory.groups(memory), device_memory.limit(memory)
    known = groups[0].fullest.peak is not None
    sizes = [device_memory.bytes_at_peak(g.fullest) for g in groups]
    texts = [usage_text(size, most) if most and i == 0 else byte_text(size) for i, size in enumerate(sizes)]
    names = [named(g.devices) for g in groups]
    if len(groups) == 1:
        alike = len(groups[0].devices)
        what = f"all {alike} devices are alike at" if alike > 1 else f"{names[0]} holds"
        head = f"{what} {texts[0]}"
    else:
        verb = "is" if len(groups[0].devices) == 1 else "are"
        head = f"{names[0]} {verb} fullest, {texts[0]}"
    rest = [
        f"{name} {'are alike at' if len(g.devices) > 1 else 'holds'} {text}"
        for name, g, text in list(zip(names, groups, texts, strict=True))[1:4]
    ]
    if len(groups) > 4:
        rest.append(f"{count_text(sum(len(g.devices) for g in groups[4:]))} more hold less")
    return (head, rest) if known else (f"{head} of arrays", [*rest, "temporaries and peak are not known"])


def scale_note(memory: Memory) -> str | None:
    """Return a note on enlarged bars: `Bars below are drawn 1,230 times as long as on the scale of the limit, 15.75
    GiB.`

    None for bars on the scale of the limit.
    """
    most = device_memory.limit(memory)
    if most is None or not device_memory.has_own_scale(memory):
        return None
    times = count_text(int(most / device_memory.longest(memory)))
    return f"Bars below are drawn {times} times as long as on the scale of the limit, {limit_text(most)}."


def share_of_limit(memory: Memory) -> str | None:
    """Return the peak as a share of the limit: `32% of 15.75 GiB`; None if either is unknown."""
    most, top = device_memory.limit(memory), device_memory.groups(memory)[0].fullest
    return f"{share_text(top.peak / most)} of {limit_text(most)}" if most and top.peak is not None else None


def buffer_name(buffer: Buffer) -> str:
    """Return the name of a buffer: `matmul`, `gradient of params.w`."""
    return OPERATIONS.get(buffer.what, buffer.what)


def buffer_about(buffer: Buffer) -> str:
    """Return the operand, loop, purpose and phase of a buffer: `with params.up.kernel, kept for the backward pass`."""
    parts = [
        f"with {buffer.reads}" if buffer.reads else "",
        f"of a loop, {count_text(buffer.trips)} times" if buffer.trips else "",
        f"on the way to the gradient of {buffer.toward}" if buffer.toward else "",
        "kept for the backward pass" if buffer.kept else buffer.phase or "",
    ]
    return ", ".join(filter(None, parts))


def array_type(buffer: Buffer) -> str:
    """Return the type of one array of a buffer: `f32[8,16,128]`; a dash for a buffer without arrays."""
    return f"{buffer.dtype}[{','.join(map(str, buffer.shape))}]" if buffer.dtype else UNKNOWN


def buffer_type(buffer: Buffer) -> str:
    """Return the type of one array, and the number of arrays: `f32[8,16,128] ×2`."""
    times = f" \u00d7{count_text(buffer.count)}" if buffer.count > 1 else ""
    return f"{array_type(buffer)}{times}"


def buffers_lead(memory: Memory) -> str | None:
    """Return the share of the listed buffers: `10 buffers are 95% of the temporaries in use there; 81 more are 152
    MiB`.

    None if the compiler does not report buffers.
    """
    if not memory.buffers or memory.others is None:
        return None
    count, rest = memory.others
    size, n = sum(b.bytes for b in memory.buffers), sum(b.count for b in memory.buffers)
    are = f"{count_text(n)} buffer{'s are' if n != 1 else ' is'} {share_text(size / (size + rest))}"
    more = f"; {count_text(count)} more {'are' if count != 1 else 'is'} {byte_text(rest)}"
    return f"{are} of the temporaries in use there{more if count else ''}"


def largest_spans(report: Report) -> list[Span]:
    """Return the largest array at the peak: ` Largest: f32[16,1024,50257], 3.07 GiB, from cell [7], line 14.`

    Empty if the compiler does not report buffers.
    """
    buffers = report.memory.buffers if report.memory else None
    if not buffers:
        return []
    top, leaf = buffers[0], max(report.leaves, key=lambda leaf: leaf.bytes_per_device, default=None)
    # `bytes` of a buffer is the sum over `count` equal arrays.
    if leaf is not None and leaf.bytes_per_device > top.bytes // top.count:
        return [Span(" Largest: "), Span(leaf.path, "code"), Span(f", {byte_text(leaf.bytes_per_device)}.")]
    spans = [Span(" Largest: "), Span(buffer_type(top), "code"), Span(f", {byte_text(top.bytes)}")]
    return [
        *spans,
        *([Span(", from "), line_span(top.file, top.line)] if top.line is not None else []),
        *called_spans([top.called]),
        Span("."),
    ]
