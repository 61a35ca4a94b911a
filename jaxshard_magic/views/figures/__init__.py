"""Figures to zoom, restyle and save: plotly figures with the colours of the report."""

from collections.abc import Callable, Mapping

import plotly.graph_objects as go

from jaxshard_magic.errors import ShardError, list_names, unknown_name
from jaxshard_magic.report import Report
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.views.colours import THEMES
from jaxshard_magic.views.figures.memory import memory
from jaxshard_magic.views.figures.roofline import roofline
from jaxshard_magic.views.figures.scatter import scatter
from jaxshard_magic.views.figures.timeline import timeline

_FIGURES: dict[str, Callable[[Report, Mapping[str, str]], go.Figure]] = {
    "memory": memory,
    "roofline": roofline,
    "timeline": timeline,
}


def figure(report: Report, name: str, theme: str = "light") -> go.Figure:
    """Return one figure of a report.

    Args:
        report: Report to show.
        name: "memory", "roofline" or "timeline".
        theme: "light" or "dark".

    Raises:
        ShardError: Name or theme is unknown, or the report has no such part.
    """
    if name not in _FIGURES:
        raise ShardError(
            unknown_name(f"no figure {name!r}", str(name), _FIGURES, f"the figures are {list_names(_FIGURES)}")
        )
    return _FIGURES[name](report, _colours(theme))


def comparison(compared: Comparison, theme: str = "light") -> go.Figure:
    """Return peak memory against step time of compared trials.

    Args:
        compared: Comparison to show.
        theme: "light" or "dark".

    Raises:
        ShardError: No trial has both, or the theme is unknown.
    """
    return scatter(compared, _colours(theme))


def _colours(theme: str) -> Mapping[str, str]:
    """Return the colours of a theme."""
    if theme not in THEMES:
        raise ShardError(
            unknown_name(f"no theme {theme!r}", str(theme), THEMES, f"the themes are {list_names(THEMES)}")
        )
    return THEMES[theme]
