"""Picture of memory: a bar by role for each group of devices with equal memory, against the limit."""

from jaxshard_magic.report import Memory, Report
from jaxshard_magic.views import device_memory, svg, words
from jaxshard_magic.views.device_stages import stages
from jaxshard_magic.views.format import byte_text, count_text, limit_text
from jaxshard_magic.views.pictures.sheet import CONTENT_WIDTH, SMALL, Sheet, columns_in
from jaxshard_magic.views.terminal import clip

ROWS = 16
BAR, END, ROW = 170, CONTENT_WIDTH - 130, 24  # px: left and right end of bars, height of a row
HIGH = 12


def memory(report: Report, theme: str) -> str:
    """Draw the memory of a report's devices at the peak, the fullest first; return SVG."""
    held, stage_map = report.memory, stages(report)
    assert held is not None
    groups, most = device_memory.groups(held), device_memory.limit(held)
    full, on_scale = device_memory.scale(held)
    sheet = Sheet(report.mesh)
    sheet.sentence(words.memory_lead(held, stage_map.devices_text))
    sheet.small(words.scale_note(held) or "")
    _legend(sheet, held, on_scale)
    for group in groups[:ROWS]:
        d, own = group.fullest, device_memory.highest_measured(held, group.devices)
        peak = words.usage_text(d.peak, most) if d.peak is not None and most else byte_text(d.peak)
        bar = svg.memory_bar(device_memory.segments(d), d.peak, own and own.measured, on_scale, full, "")
        sheet.text(0, clip(stage_map.devices_text(group.devices), columns_in(BAR - 10)), down=11)
        sheet.stretch(BAR, bar, END - BAR, HIGH + 4, down=1 if own is None else -1)
        sheet.text(CONTENT_WIDTH, peak, down=11, end=True)
        sheet.skip(ROW)
    left = sum(len(group.devices) for group in groups[ROWS:])
    sheet.small(f"{count_text(left)} more devices hold less" if left else "")
    return sheet.svg(f"memory: {words.memory_sentence(held, stage_map.devices_text)}", theme)


def _legend(sheet: Sheet, held: Memory, most: int | None) -> None:
    """Draw the roles in their colours, the tick of measured peaks, and the limit."""
    x = float(BAR)
    sheet.skip(4)
    for role in device_memory.roles(held):
        sheet.draw(x, svg.role_mark(role))
        sheet.text(x + 14, role, down=9, size=SMALL)
        x += 28 + 7 * len(role)
    if device_memory.highest_measured(held) is not None:
        sheet.draw(x, svg.measured_mark(), down=-1)
        sheet.text(x + 8, "measured peak", down=9, size=SMALL)
    if most is not None:
        sheet.text(END, f"limit {limit_text(most)}", down=9, end=True, size=SMALL)
    sheet.skip(20)
