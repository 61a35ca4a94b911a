"""Layout of a report: leaves with their types and bytes, and experts and positions on devices."""

from dataclasses import replace

from jaxshard_magic.report import Report
from jaxshard_magic.views import leaf_rows, words
from jaxshard_magic.views.document import parts as doc
from jaxshard_magic.views.experts_positions import layout_figures, ring_figures, ring_memory_lines
from jaxshard_magic.views.format import byte_text, count_text, submesh_parts, type_parts
from jaxshard_magic.views.words import Span
from jaxshard_magic.views.words.spans import strong


def experts_positions(report: Report) -> list[doc.Part]:
    """Return the section on experts and positions; nothing if neither is sharded."""
    figures = layout_figures(report)
    if not figures:
        return []
    titles = ["Experts"] * bool(report.experts)
    titles += ["positions" if report.experts else "Positions"] * bool(report.positions)
    rings = (replace(figure, shows=doc.TERMINAL) for figure in ring_figures(report))
    memory = doc.Notes(tuple(ring_memory_lines(report)), below=False, shows=doc.TERMINAL)
    return [doc.Section(" and ".join(titles), (*figures, *rings, memory), short="")]


def layout(report: Report, largest: int | None = 8) -> list[doc.Part]:
    """Return the leaves; nothing without leaves.

    Args:
        report: Report.
        largest: Number of the largest rows to list; None gives every leaf a row of its own.
    """
    if not report.leaves:
        return []
    listing = leaf_rows.listing(report, largest)
    roles = leaf_rows.role_bytes(report.leaves)
    sizes = ", ".join(f"{'other arguments' if role == 'other' else role} {byte_text(n)}" for role, n in roles.items())
    parted = leaf_rows.partial_axes(report.leaves)
    per = "on the device that holds most of them" if parted else "per device"
    first = "the first of its devices" if parted else "the first device"
    shaded = f"shaded: what {first} holds; a second sheet: a copy elsewhere"
    columns = (
        doc.Column("", shows=frozenset((doc.HTML,))),
        doc.Column("leaf", "wrap"),
        doc.Column("type", more=0),
        doc.Column("per device", "right"),
    )
    table = doc.Table(columns, tuple(_row(r, largest) for r in listing.rows), f"Leaves, {listing.heading}", stacks=True)
    every = len(listing.rows) == listing.leaf_count
    more = () if every else ('to_text(leaves="all") lists every leaf',)
    sentences = [f"{words.sentence_case(line)}." for line in (listing.heading, *listing.notes)]
    notes = (
        doc.Notes((*listing.notes, *more), shows=doc.TERMINAL),
        doc.Notes(tuple(sentences[1:]), shows=frozenset((doc.MARKDOWN,))),
        doc.Notes((" ".join((*sentences, f"{words.sentence_case(shaded)}.")),), shows=frozenset((doc.HTML,))),
    )
    return [doc.Section(f"Layout: {sizes} {per}" if sizes else "Layout", (table, *notes), short="")]


def _row(r: leaf_rows.LeafRow, largest: int | None) -> doc.TableRow:
    path = (Span(r.path, "code"), *([Span(count_text(r.members), "times")] * (r.members > 1)))
    kind = [Span(text, "axis" if axis else "code") for text, axis in type_parts(r.leaf)]
    place = [Span(text, "axis" if axis else "name") for text, axis in submesh_parts(r.leaves)]
    not_cut, why = leaf_rows.unsharded_text(r), r.leaf.why
    below = (*([strong(not_cut)] * bool(not_cut)), Span(": " * bool(not_cut and why) + why))
    cells = (
        doc.LeafCell(r.leaf),
        doc.WordCell(path),
        doc.WordCell(kind, place, code=True),
        doc.WordCell(byte_text(r.bytes_per_device)),
    )
    return doc.TableRow(cells, below if not_cut or why else (), bool(r.leaf.wanted), largest is None)
