"""`ShardError` and the helpers its messages are built with."""

from collections.abc import Iterable
from difflib import get_close_matches


class ShardError(Exception):
    """What was given cannot be done; the message is one line that says what would fix it.

    `fix` is the text to paste, when there is one.
    """

    def __init__(self, message: str, *, fix: str | None = None):
        super().__init__(message)
        self.fix = fix


def one_of(names: Iterable[str]) -> str:
    """The allowed names as a reader meets them: `data, model`, or `none` when there are none."""
    return ", ".join(str(n) for n in names) or "none"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """` Did you mean 'model'?` for the nearest of `names`, or an empty string."""
    near = get_close_matches(word, [str(n) for n in names], n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""


def no_step(name: str, kind: str) -> ShardError:
    """Of a function whose call gives no results: `kind` is `async` or `generator`."""
    if kind == "async":
        fix = "make it a plain def, and await around its call"
        return ShardError(
            f"{name} is an async function, and a step gives its results when it is called: {fix}"
        )
    fix = "return them instead of yielding"
    return ShardError(
        f"{name} is a generator function, and a step gives its results when it is called: {fix}"
    )
