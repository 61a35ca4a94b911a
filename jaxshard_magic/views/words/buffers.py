"""Buffers in memory at the peak, in words."""

from jaxshard_magic.report import Buffer, Memory, Report
from jaxshard_magic.views.format import UNKNOWN, byte_text, count_text, share_text
from jaxshard_magic.views.words.spans import Span, called_spans, line_span

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
