"""What of the user's own text goes into a program."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """A statement of the user's.

    `file` is what Python calls its cell, and `line` its first line there; `before`: how many bytes of that line are
    another statement's; `title`: the cell as a reader knows it. `imports`: does it import; `calls`: does it call the
    step when it runs; `makes`: does it give the step its name; `early`: it comes before imports, as it
    changes what they find.
    """

    text: str
    file: str
    line: int
    title: str
    before: int = 0
    imports: bool = False
    calls: bool = False
    makes: bool = False
    early: bool = False

    @property
    def lines(self) -> range:
        return range(self.line, self.line + self.text.count("\n") + 1)
