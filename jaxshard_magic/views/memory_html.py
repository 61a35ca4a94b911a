"""Memory section of the HTML report: figures and a bar for each group of devices, and the largest buffers."""

from collections.abc import Iterator, Sequence

from jaxshard_magic.report import DeviceMemory, Memory, Report
from jaxshard_magic.views import device_memory, svg, words
from jaxshard_magic.views.device_stages import DeviceStages, stages
from jaxshard_magic.views.experts_positions.html import ring_memory_html
from jaxshard_magic.views.format import UNKNOWN, byte_text, count_text, runs
from jaxshard_magic.views.html_tags import cell, code, escaped, join_nonempty, row, section, small, table
from jaxshard_magic.views.source_lines import short_line
from jaxshard_magic.views.terminal import shorten

ROWS = 8
LONG = 48  # letters of a buffer's name, at most


def memory_section(report: Report) -> str:
    """Return the section on memory; empty if nothing is known about memory."""
    memory, stage_map = report.memory, stages(report)
    if memory is None or not memory.per_device:
        return ""
    groups = device_memory.groups(memory)
    roles = [r for r in device_memory.ROLES if r == "temporaries" or any(getattr(d, r) for d in memory.per_device)]
    heads = [*(f"{svg.role_mark(r)} {r}" for r in roles), "peak"]
    if device_memory.highest_measured(memory):
        heads.append(f"{svg.measured_mark()} measured peak")
    top = row([cell("device", "left", "th"), *(cell(h, "right", "th") for h in heads)])
    left = sum(len(g.devices) for g in groups[ROWS:])
    title = "; ".join(
        filter(None, (words.memory_sentence(memory, stage_map.devices_text), words.measured_text(memory)))
    )
    return section(
        f"Memory: {escaped(title)}",
        _scale(memory),
        f"<table><thead>{top}</thead><tbody>\n{join_nonempty(_rows(memory, groups, roles, stage_map))}</tbody></table>",
        small(f"{count_text(left)} more devices hold less") if left else "",
        ring_memory_html(report),
        _buffers(memory),
    )


def _rows(
    memory: Memory, groups: Sequence[device_memory.DeviceGroup], roles: Sequence[str], stage_map: DeviceStages
) -> Iterator[str]:
    """Yield two table rows for each group: figures, and a bar over the width of the table."""
    most, fullest = device_memory.limit(memory), device_memory.highest_measured(memory)
    full, on_scale = device_memory.scale(memory)
    for group in groups[:ROWS]:
        d, measured = group.fullest, device_memory.highest_measured(memory, group.devices)
        peak = words.usage_text(d.peak, most) if d.peak is not None and most else byte_text(d.peak)
        figures = [*(byte_text(getattr(d, r)) for r in roles), f"<b>{peak}</b>"]
        stage = stage_map.stage_text(group.devices)
        label = f"{_ids(group.devices)}{stage and f' ({stage})'}: {peak}"
        if fullest is not None:
            figures.append(_measured(measured))
        if measured is not None:
            label_parts = (label, f"measured {byte_text(measured.measured)}", words.error_text(measured))
            label = ", ".join(filter(None, label_parts))
        bar = svg.memory_bar(device_memory.segments(d), d.peak, measured and measured.measured, on_scale, full, label)
        name = escaped(_ids(group.devices)) + (f" <small>{escaped(stage)}</small>" if stage else "")
        cells = [cell(name, "wrap"), *(cell(f, "right") for f in figures)]
        yield f'<tr class="jss-figures">{"".join(cells)}</tr>'
        span = f' colspan="{len(cells)}"'
        # JupyterLab shades every second table row, and would part a bar from its figures.
        yield f'<tr style="background:transparent" class="jss-bar">{cell(bar, more=span)}</tr>'


def _scale(memory: Memory) -> str:
    """Return the fullest device on the scale of the limit, with a note that the bars below have another scale.

    Empty if the bars have the limit's scale.
    """
    note, most = words.scale_note(memory), device_memory.limit(memory)
    if note is None or most is None:
        return ""
    return f"<div>{svg.limit_bar(device_memory.longest(memory), most)}</div>\n{small(escaped(note))}"


def _measured(device: DeviceMemory | None) -> str:
    if device is None:
        return UNKNOWN
    off = words.error_text(device)
    return byte_text(device.measured) + (f" <small>{off}</small>" if off else "")


def _ids(devices: Sequence[int]) -> str:
    pieces = [str(a) if a == b else f"{a} to {b}" for a, b in runs(devices)]
    return ", ".join(pieces) if len(pieces) <= 3 else f"{count_text(len(devices))} devices"


def _buffers(memory: Memory) -> str:
    lead = words.buffers_lead(memory)
    if lead is None or not memory.buffers:
        return ""
    head = [("at the peak", "right"), ("type, on one device", "left"), ("what", "wrap"), ("line", "right")]
    rows = [
        [
            byte_text(b.bytes),
            code(words.buffer_type(b)),
            f"{escaped(shorten(words.buffer_name(b), LONG))} <small>{escaped(words.buffer_about(b))}</small>",
            escaped(short_line(b) or UNKNOWN),
        ]
        for b in memory.buffers
    ]
    return f"{small(escaped(lead))}\n{table(head, rows)}"
