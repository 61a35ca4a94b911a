"""A pipeline in HTML without script: its words, its timeline as a drawing, and a table of its ranks."""

from jaxshard_magic.report import Pipeline
from jaxshard_magic.views import words
from jaxshard_magic.views.format import UNKNOWN, count_text, printable
from jaxshard_magic.views.page import document
from jaxshard_magic.views.tags import joined, section, small, table, text
from jaxshard_magic.views.timeline import data, svg

ROWS = 64


def to_html(p: Pipeline, also: str = "") -> str:
    """The timeline as one `<div>`, to stand in a notebook or a page; `also` is one more class of the `<div>`."""
    lead = "".join(
        f"<b>{text(s.text)}</b>" if s.kind == "strong" else text(s.text) for s in words.pipeline_lead(p)
    )
    head = f'<p class="jss-verdict">{lead} <small>{text(words.pipeline_about(p))}</small></p>'
    classes = f"jss {text(also)}".rstrip()
    return f'<div class="{classes}">\n{joined([head, *_content(p)])}\n</div>\n'


def page(p: Pipeline) -> str:
    """The timeline as a whole document that follows the reader's light or dark theme."""
    return document(printable(f"{p.schedule}, {words.size_text(p)}"), to_html(p))


def pipeline_section(p: Pipeline | None) -> str:
    """The section of a report on its pipeline, empty where it has none."""
    if p is None:
        return ""
    lead = "".join(span.text for span in words.pipeline_lead(p)).rstrip(".")
    about = small(text(words.pipeline_about(p)))
    return section(f"Pipeline: {text(lead[:1].lower() + lead[1:])}", about, *_content(p))


def _content(p: Pipeline) -> list[str]:
    return [_parts(p), _legend(p), svg.drawing(p), _ranks(p)]


def _parts(p: Pipeline) -> str:
    """What the bubble is made of, where that is more than the schedule."""
    parts = words.bubble_parts(p)
    if len(parts) < 2:
        return ""
    told = (
        f"<b>{text(words.part_text(part, i == 0))}</b> {text(part.what)}"
        + (f" <small>({text(part.more)})</small>" if part.more else "")
        for i, part in enumerate(parts)
    )
    work = words.work_text(p)
    return f"<p>{' &nbsp; '.join(told)} &nbsp; <small>{work} of device time is work</small></p>"


def _legend(p: Pipeline) -> str:
    kinds = [f"{svg.kind_mark(kind)} {kind} {words.KINDS[kind]}" for kind in data.kinds_of(p)]
    entries = " &nbsp; ".join([*kinds, f"{svg.idle_mark()} bubble", text(svg.lanes_text(p))])
    return small(entries)


def _ranks(p: Pipeline) -> str:
    """A row for each rank, in columns for what is known."""
    rows = range(min(ROWS, len(p.ranks)))
    columns = {
        "": [(f"<b>{text(words.rank_name(p, i))}</b>", "left") for i in rows],
        "stages": [(text((words.stages_text(p, i) or "").removeprefix("stages ")), "left") for i in rows],
        "of the model": [(text(p.ranks[i].holds or ""), "wrap") for i in rows],
        "devices": [(text(_bare(words.devices_of(p.ranks[i]))), "left") for i in rows],
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
    return joined([table(head, rows_of_cells), more])


def _bare(devices: str | None) -> str:
    return (devices or "").removeprefix("devices").removeprefix("device").strip()


def _held(p: Pipeline, i: int) -> str:
    held, size = words.held_text(p.ranks[i]), words.held_bytes(p.ranks[i])
    if held is None:
        return UNKNOWN
    return text(held.removeprefix("holds ")) + (f" <small>{text(size)}</small>" if size else "")
