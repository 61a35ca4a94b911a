"""Timeline of a pipeline as HTML without script: text, a drawing, and a table of ranks."""

from jaxshard_magic.report import Pipeline
from jaxshard_magic.views import words
from jaxshard_magic.views.format import UNKNOWN, count_text, printable
from jaxshard_magic.views.html_document import document
from jaxshard_magic.views.html_tags import escaped, join_nonempty, section, small, table
from jaxshard_magic.views.timeline import data, svg

ROWS = 64


def to_html(p: Pipeline, also: str = "") -> str:
    """Render the timeline as one `<div>`, for a notebook or a page.

    Args:
        p: Pipeline to show.
        also: Further class of the `<div>`.
    """
    lead = "".join(
        f"<b>{escaped(s.text)}</b>" if s.kind == "strong" else escaped(s.text) for s in words.pipeline_lead(p)
    )
    head = f'<p class="jss-verdict">{lead} <small>{escaped(words.pipeline_about(p))}</small></p>'
    classes = f"jss {escaped(also)}".rstrip()
    return f'<div class="{classes}">\n{join_nonempty([head, *_content(p)])}\n</div>\n'


def page(p: Pipeline) -> str:
    """Render the timeline as a whole HTML document; the theme, light or dark, is the reader's."""
    return document(printable(f"{p.schedule}, {words.size_text(p)}"), to_html(p))


def pipeline_section(p: Pipeline | None) -> str:
    """Return the section of a report on its pipeline; empty without a pipeline."""
    if p is None:
        return ""
    lead = "".join(span.text for span in words.pipeline_lead(p)).rstrip(".")
    about = small(escaped(words.pipeline_about(p)))
    return section(f"Pipeline: {escaped(lead[:1].lower() + lead[1:])}", about, *_content(p))


def _content(p: Pipeline) -> list[str]:
    return [_parts(p), _legend(p), svg.timeline_svg(p), _ranks(p)]


def _parts(p: Pipeline) -> str:
    """Return the parts of the bubble; empty if the schedule is the only one."""
    parts = words.bubble_parts(p)
    if len(parts) < 2:
        return ""
    told = (
        f"<b>{escaped(words.part_text(part, i == 0))}</b> {escaped(part.what)}"
        + (f" <small>({escaped(part.more)})</small>" if part.more else "")
        for i, part in enumerate(parts)
    )
    work = words.work_text(p)
    return f"<p>{' &nbsp; '.join(told)} &nbsp; <small>{work} of device time is work</small></p>"


def _legend(p: Pipeline) -> str:
    kinds = [f"{svg.kind_mark(kind)} {kind} {words.KINDS[kind]}" for kind in data.kinds_of(p)]
    entries = " &nbsp; ".join([*kinds, f"{svg.idle_mark()} bubble", escaped(svg.lanes_text(p))])
    return small(entries)


def _ranks(p: Pipeline) -> str:
    """Return a table with a row for each rank, without columns of unknown figures."""
    rows = range(min(ROWS, len(p.ranks)))
    columns = {
        "": [(f"<b>{escaped(words.rank_name(p, i))}</b>", "left") for i in rows],
        "stages": [(escaped((words.stages_text(p, i) or "").removeprefix("stages ")), "left") for i in rows],
        "of the model": [(escaped(p.ranks[i].holds or ""), "wrap") for i in rows],
        "devices": [(escaped(_bare(words.devices_of(p.ranks[i]))), "left") for i in rows],
        "bubble": [(words.percent_text(p.ranks[i].bubble), "right") for i in rows],
        "ideal bubble": [(words.percent_text(p.ranks[i].ideal), "right") for i in rows],
        "work": [(words.time_text(p.ranks[i].work, p.unit), "right") for i in rows],
        "activations held": [(_held(p, i), "right") for i in rows],
    }
    shown = {head: cells for head, cells in columns.items() if any(c not in ("", UNKNOWN) for c, _ in cells)}
    if len(shown) < 2:
        return ""
    head = [(name, cells[0][1]) for name, cells in shown.items()]
    rows_of_cells = zip(*([content for content, _ in cells] for cells in shown.values()), strict=True)
    left = len(p.ranks) - ROWS
    more = small(f"{count_text(left)} more ranks") if left > 0 else ""
    return join_nonempty([table(head, rows_of_cells), more])


def _bare(devices: str | None) -> str:
    return (devices or "").removeprefix("devices").removeprefix("device").strip()


def _held(p: Pipeline, i: int) -> str:
    """Return the activations of a rank at its peak, and their bytes."""
    held, size = words.held_text(p.ranks[i]), words.held_bytes(p.ranks[i])
    if held is None:
        return UNKNOWN
    return escaped(held.removeprefix("holds ")) + (f" <small>{escaped(size)}</small>" if size else "")
