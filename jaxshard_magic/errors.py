"""`ShardError` and the helpers its messages are built with."""

from collections.abc import Iterable
from difflib import get_close_matches


class ShardError(Exception):
    """What was given cannot be done; the message is one line that says what would fix it.

    `option`: what on the line asks for it, which the message then begins with. `fix`: the text to paste, when there is
    one. `why`: what is wrong alone, for a reader who gave no option.
    """

    def __init__(self, message: str, *, fix: str | None = None, option: str | None = None):
        super().__init__(message if option is None else f"{option}: {message}")
        self.fix, self.why = fix, message.partition("; ")[0]


def one_of(names: Iterable[str]) -> str:
    """The allowed names as a reader meets them: `data, model`, or `none` when there are none."""
    return ", ".join(str(n) for n in names) or "none"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """` Did you mean 'model'?` for the nearest of `names`, or an empty string."""
    near = get_close_matches(word, [str(n) for n in names], n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""
