"""Memory of a report: bytes on each group of devices, and the largest buffers at the peak."""

from jaxshard_magic.report import Memory, Report
from jaxshard_magic.views import device_memory, words
from jaxshard_magic.views.device_memory import DeviceStages, stages
from jaxshard_magic.views.document import parts as doc
from jaxshard_magic.views.experts_positions import ring_memory_lines
from jaxshard_magic.views.format import UNKNOWN, byte_text, count_text
from jaxshard_magic.views.source_lines import short_line
from jaxshard_magic.views.terminal import shorten

GROUPS = 8
BUFFERS = 5  # in a terminal
LONG = 48  # letters of a buffer's name, at most
LEAST_WHAT = 12  # columns of a buffer's name and purpose in a terminal, at least


def memory(report: Report, *, page: bool = False) -> list[doc.Part]:
    """Return the section on memory; nothing if nothing is known about memory.

    Args:
        report: Report.
        page: Whether there is room for all listed buffers.
    """
    known, stage_map = report.memory, stages(report)
    if known is None or not known.per_device:
        return []
    measured = words.measured_text(known)
    title = "; ".join(filter(None, (words.memory_sentence(known, stage_map.devices_text), measured)))
    parts: list[doc.Part] = [
        _bars(known, stage_map),
        doc.Notes((measured,) if measured else (), shows=doc.TERMINAL),
    ]
    parts += [doc.Notes(tuple(ring_memory_lines(report)), shows=doc.PAGES)]
    return [
        doc.Section(
            f"Memory: {title}", (*parts, *_buffers(known, None if page else BUFFERS)), short="Memory per device"
        )
    ]


def _bars(memory: Memory, stage_map: DeviceStages) -> doc.MemoryBars:
    groups, most = device_memory.groups(memory), device_memory.limit(memory)
    roles = [
        role
        for role in device_memory.ROLES
        if role == "temporaries" or any(getattr(device, role) for device in memory.per_device)
    ]
    rows = []
    for group in groups[:GROUPS]:
        d, measured = group.fullest, device_memory.highest_measured(memory, group.devices)
        rows.append(
            doc.MemoryRow(
                group,
                stage_map.stage_text(group.devices),
                {role: byte_text(getattr(d, role)) for role in roles},
                byte_text(d.peak),
                words.usage_text(d.peak, most) if d.peak is not None and most else byte_text(d.peak),
                measured and measured.measured,
                UNKNOWN if measured is None else byte_text(measured.measured),
                (measured and words.error_text(measured)) or "",
            )
        )
    # A role that only devices below the fullest of their group have is not drawn.
    drawn = [r for r in roles if r == "temporaries" or any(getattr(g.fullest, r) for g in groups)]
    full, on_scale = device_memory.scale(memory)
    left = sum(len(group.devices) for group in groups[GROUPS:])
    note = words.scale_note(memory)
    return doc.MemoryBars(
        tuple(rows),
        {role: byte_text(getattr(groups[0].fullest, role)) for role in drawn},
        full,
        on_scale,
        None if note is None or most is None else (device_memory.longest(memory), most),
        note,
        device_memory.highest_measured(memory) is not None,
        f"{count_text(left)} more devices hold less" if left else "",
    )


def _buffers(memory: Memory, shown: int | None) -> list[doc.Part]:
    """Return the largest temporaries at the peak, and the lines of code that made them."""
    buffers = (memory.buffers or ())[:shown]
    if not buffers:
        return []
    columns = (
        doc.Column("at the peak", "right", "size"),
        doc.Column("type, on one device", "left", "at the peak", most=1 / 3),
        doc.Column("what", "wrap", least=LEAST_WHAT, more=0, joint=", "),
        doc.Column("line", "right"),
    )
    rows = []
    for b in buffers:
        line = short_line(b)
        what = doc.WordCell(doc.names(shorten(words.buffer_name(b), LONG)), doc.names(words.buffer_about(b)))
        rows.append(
            doc.TableRow(
                (
                    doc.WordCell(byte_text(b.bytes)),
                    doc.WordCell(words.buffer_type(b), code=True),
                    what,
                    doc.WordCell(doc.names(line), short=line.partition(" from ")[0]) if line else doc.WordCell(UNKNOWN),
                )
            )
        )
    lead = words.buffers_lead(memory)
    # It counts all buffers, which a page lists.
    notes = doc.Notes((lead,) if lead and shown is None else (), shows=doc.PAGES)
    return [notes, doc.Table(columns, tuple(rows))]
