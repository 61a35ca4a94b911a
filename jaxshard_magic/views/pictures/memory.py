"""The picture of memory: a bar for each group of devices that hold alike, by role, against the limit."""

from jaxshard_magic.report import Memory, Report
from jaxshard_magic.views import device_memory, svg, words
from jaxshard_magic.views.device_stages import stages
from jaxshard_magic.views.format import byte_text, count_text, limit_text
from jaxshard_magic.views.pictures.sheet import ROOM, SMALL, Sheet, fitting
from jaxshard_magic.views.terminal import clip

ROWS = 16
BAR, END, ROW = 170, ROOM - 130, 24  # px: where bars begin and end, and the height of a row
HIGH = 12


def memory(report: Report, theme: str) -> str:
    """What the devices of a report hold at its peak, fullest first."""
    held, told = report.memory, stages(report)
    assert held is not None
    groups, most = device_memory.groups(held), device_memory.limit(held)
    full, on_scale = device_memory.scale(held)
    sheet = Sheet(report.mesh)
    sheet.sentence(words.memory_lead(held, told.named))
    sheet.small(words.scale_note(held) or "")
    _legend(sheet, held, on_scale)
    for group in groups[:ROWS]:
        d, own = group.most, device_memory.measured(held, group.devices)
        peak = words.of_limit(d.peak, most) if d.peak is not None and most else byte_text(d.peak)
        bar = svg.memory_bar(device_memory.segments(d), d.peak, own and own.measured, on_scale, full, "")
        sheet.text(0, clip(told.named(group.devices), fitting(BAR - 10)), down=11)
        sheet.stretch(BAR, bar, END - BAR, HIGH + 4, down=1 if own is None else -1)
        sheet.text(ROOM, peak, down=11, end=True)
        sheet.down(ROW)
    left = sum(len(group.devices) for group in groups[ROWS:])
    sheet.small(f"{count_text(left)} more devices hold less" if left else "")
    return sheet.svg(f"memory: {words.memory_sentence(held, told.named)}", theme)


def _legend(sheet: Sheet, held: Memory, most: int | None) -> None:
    """The roles in their colours, and what else a bar has."""
    x = float(BAR)
    sheet.down(4)
    for role in device_memory.roles(held):
        sheet.draw(x, svg.role_mark(role))
        sheet.text(x + 14, role, down=9, size=SMALL)
        x += 28 + 7 * len(role)
    if device_memory.measured(held) is not None:
        sheet.draw(x, svg.measured_mark(), down=-1)
        sheet.text(x + 8, "measured peak", down=9, size=SMALL)
    if most is not None:
        sheet.text(END, f"limit {limit_text(most)}", down=9, end=True, size=SMALL)
    sheet.down(20)
