"""The `%%shard` line of an explored layout: strategy, mesh, rules and specs."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..specs import format_spec
from .shard_sizes import DimAxes, spec_of


@dataclass(frozen=True)
class ShardLine:
    """Parts of the `%%shard` line that the explorer does not edit.

    Attributes:
        other_options: Other options of the cell's own line, each as text.
        rules: Rules of the cell's own line, `REGEX=SPEC`. A rule set by hand comes before them and replaces a rule with
            the same expression.
        default_mesh: Text of the notebook's mesh, used by a line that names none; None if the line must name its mesh.
    """

    other_options: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    default_mesh: str | None = None

    def text(self, strategy: str, mesh: str, rules: Mapping[str, DimAxes], specs: Mapping[str, DimAxes]) -> str:
        """Return the line, `%%shard fsdp --mesh "data=8" --rule "w=P('data')"`.

        Args:
            strategy: Strategy text.
            mesh: Mesh text, omitted where it is the default.
            rules: Axes of each dimension, by regular expression.
            specs: Axes of each dimension, by path.
        """
        words = [f"%%shard {strategy}"]
        if mesh != self.default_mesh:
            words.append(f'--mesh "{mesh}"')
        words += self.other_options
        own = [text for text in self.rules if text.rpartition("=P(")[0] not in rules]
        words += [f'--rule "{text}"' for text in (*_assignments(rules), *own)]
        words += [f'--spec "{text}"' for text in _assignments(specs)]
        return " ".join(words)


def _assignments(cuts: Mapping[str, DimAxes]) -> Iterable[str]:
    """Yield `NAME=SPEC`."""
    return (f"{name}={format_spec(spec_of(cut))}" for name, cut in cuts.items())


def path_regex(path: str, paths: Sequence[str], same_layout: Collection[str]) -> str:
    """Return the shortest regular expression that finds `path` and no path with another layout.

    >>> path_regex("w", ["w", "w.b", "mu.w"], ["mu.w"])
    'w$'

    Args:
        path: Path to find.
        paths: All paths.
        same_layout: Other paths that may match.
    """
    # A quote in the expression would end the text of `--rule`.
    plain = re.sub(r"[\[\](){}*+?^$|\\]", r"\\\g<0>", path).replace('"', ".")
    # An unescaped dot is easier to read, and is escaped only if the expression matches too much.
    dots = plain.replace(".", r"\.")
    allowed = {path, *same_layout}
    for expression in (plain, f"{plain}$", f"^{plain}$"):
        find = re.compile(expression).search
        if all(other in allowed for other in paths if find(other)):
            return expression
    return f"^{dots}$"
