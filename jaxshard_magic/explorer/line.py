"""The line for the cell: a strategy, its mesh where that is another one, and a rule for what was set by hand."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..specs import format_spec
from .cuts import Cut, spec_of


@dataclass(frozen=True)
class Line:
    """What the line has beside what is explored.

    Args:
        kept: options of the cell's own line, by the text of each, without those below.
        rules: the cell's own rules, `REGEX=SPEC`; a rule set by hand comes before them, and takes the place of one with
            the same expression.
        home: the mesh, as text, that the notebook takes where the line names none; None where it must.
    """

    kept: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    home: str | None = None

    def text(self, strategy: str, mesh: str, rules: Mapping[str, Cut], specs: Mapping[str, Cut]) -> str:
        """`%%shard fsdp --mesh "data=8" --rule "w=P('data')"`; `rules` by their expression, `specs` by path."""
        words = [f"%%shard {strategy}"]
        if mesh != self.home:
            words.append(f'--mesh "{mesh}"')
        words += self.kept
        own = [text for text in self.rules if text.rpartition("=P(")[0] not in rules]
        words += [f'--rule "{text}"' for text in (*_assignments(rules), *own)]
        words += [f'--spec "{text}"' for text in _assignments(specs)]
        return " ".join(words)


def _assignments(cuts: Mapping[str, Cut]) -> Iterable[str]:
    return (f"{name}={format_spec(spec_of(cut))}" for name, cut in cuts.items())


def pattern(path: str, paths: Sequence[str], alike: Collection[str]) -> str:
    """The shortest expression that finds `path`, and of all `paths` no other but those that lie as it does, `alike`.

    >>> pattern("w", ["w", "w.b", "mu.w"], ["mu.w"])
    'w$'
    """
    plain = re.sub(r"[\[\](){}*+?^$|\\]", r"\\\g<0>", path).replace('"', ".")
    dots = plain.replace(".", r"\.")
    allowed = {path, *alike}
    for expression in (plain, f"{plain}$", f"^{plain}$"):
        find = re.compile(expression).search
        if all(other in allowed for other in paths if find(other)):
            return expression
    return f"^{dots}$"
