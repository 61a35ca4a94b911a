"""Layout shared by all plotly figures: fonts, background, title, legend and axes."""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
TOP, BOTTOM, SIDE, LINE = 32, 32, 16, 17  # px
LEGEND = 52  # px
LETTERS = 110  # letters in a line of the title, at most
CLEAR = "rgba(0,0,0,0)"


def figure_layout(
    head: str, rest: str, legend_title: str | None, bars: int, colours: Mapping[str, str]
) -> dict[str, Any]:
    """Return the layout of a figure.

    Args:
        head: Start of the title, bold.
        rest: Remaining title.
        legend_title: Title of the legend; None for no legend.
        bars: Height of the plot in px.
        colours: Colours of the theme.
    """
    title = [f"<b>{head}</b>{rest}"]
    if len(head + rest) > LETTERS:
        title = [f"<b>{head}</b>", *wrap(rest.strip(), LETTERS)]
    more = LINE * (len(title) - 1)
    lines = TOP + more
    top = lines + LEGEND * (legend_title is not None)
    height = top + bars + BOTTOM
    return {
        "template": "none",
        "barmode": "stack",
        "bargap": 0.3,
        "height": height,
        "margin": {"l": SIDE, "r": SIDE, "t": top, "b": BOTTOM},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": FONT, "size": 12, "color": colours["ink"]},
        "title": {
            "text": "<br>".join(title),
            "font": {"size": 13},
            "x": 0,
            "y": 1,
            "yanchor": "top",
            "pad": {"t": 8 + more / 2, "l": SIDE},  # plotly centres all lines at the first line's place
        },
        "showlegend": legend_title is not None,
        "legend": {
            "title": {"text": legend_title, "font": {"size": 12, "color": colours["ink-2"]}},
            "orientation": "h",
            "traceorder": "normal",
            "bgcolor": CLEAR,
            "xref": "container",
            "x": 0.01,
            "yref": "container",
            "y": 1 - lines / height,
            "yanchor": "top",
        },
        "hoverlabel": {"bgcolor": colours["bg"], "bordercolor": colours["line"], "font": {"family": FONT}},
    }


def category_axis(texts: Sequence[str]) -> dict[str, Any]:
    """Return a y axis for bars with these labels, the first on top."""
    return {
        "autorange": "reversed",
        "tickvals": list(range(len(texts))),
        "ticktext": list(texts),
        "ticks": "outside",
        "ticklen": 6,
        "tickcolor": CLEAR,
        "automargin": True,
        "showgrid": False,
        "zeroline": False,
    }


def value_axis(end: float, ticks: Sequence[float], texts: Sequence[str], colours: Mapping[str, str]) -> dict[str, Any]:
    """Return an x axis from 0 to `end` with a grid.

    Args:
        end: End of the axis.
        ticks: Positions of ticks.
        texts: Label of each tick.
        colours: Colours of the theme.
    """
    return {
        "range": [0, end],
        "tickvals": list(ticks),
        "ticktext": list(texts),
        "gridcolor": colours["line"],
        "zeroline": False,
        "ticks": "",
        "tickfont": {"color": colours["ink-2"]},
    }
