"""What a step was asked for beside its strategy, as plain data for its report."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec


def asked_for(
    specs: Mapping[str, PartitionSpec],
    rules: Sequence[tuple[str, PartitionSpec]],
    donate: bool | None,
    check: bool,
    on: str | None,
) -> dict[str, Any]:
    """The options by name, without those that were left out."""
    asked: dict[str, Any] = {
        "specs": {k: _text(v) for k, v in specs.items()},
        "rules": {k: _text(v) for k, v in rules},
    }
    asked |= {"donate": donate, "check": check or None, "on": on}
    return {k: v for k, v in asked.items() if v not in (None, {})}


def _text(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"
