"""Compare a step under several strategies, meshes and options, or search for the fastest."""

from .candidates import (
    FIXED_OPTIONS,
    VARIABLE_OPTIONS,
    Candidate,
    RefusedCandidate,
    Requests,
    candidates,
    fixed_options_line,
    line_of,
    parse_vary,
)
from .meshes import parse_meshes
from .search_space import Hardware, chip_for, hardware_for, strategy_space
from .strategy_search import BUDGET, StrategySearch
from .trials import REPEAT, TrialOptions, TrialRunner

__all__ = [
    "BUDGET",
    "FIXED_OPTIONS",
    "REPEAT",
    "VARIABLE_OPTIONS",
    "Candidate",
    "Hardware",
    "RefusedCandidate",
    "Requests",
    "StrategySearch",
    "TrialOptions",
    "TrialRunner",
    "candidates",
    "chip_for",
    "fixed_options_line",
    "hardware_for",
    "line_of",
    "parse_meshes",
    "parse_vary",
    "strategy_space",
]
