"""`ShardError`, the helpers its messages are built with, what reads numbers and expressions of a user's, and an error's
traceback without our frames."""

import re
import types
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TypeVar

_MOST = 20_000  # characters of a line
_SPACES = "\u00a0\u202f"  # that stand in figures
_Function = TypeVar("_Function", bound=types.FunctionType)
_calling: set[types.CodeType] = set()  # of functions that call the user's


class ShardError(Exception):
    """What was given cannot be done; the message is one line that says what would fix it.

    `option`: what on the line asks for it, which the message then begins with. `fix`: the text to paste, when there is
    one. `why`: what is wrong alone, for a reader who gave no option.

    >>> import jaxshard_magic
    >>> try:
    ...     jaxshard_magic.shard(len, "fdsp")
    ... except ShardError as error:
    ...     print(error)
    'fdsp' is no strategy. Did you mean 'fsdp'? %%shard --help lists them and their sums
    """

    def __init__(self, message: str, *, fix: str | None = None, option: str | None = None):
        message = printable(message if len(message) <= _MOST else f"{message[:_MOST]}\u2026")
        super().__init__(message if option is None else f"{option}: {message}")
        self.fix, self.why = fix, message.partition("; ")[0]


def printable(text: str) -> str:
    r"""`text` on one line, control and formatting characters replaced, so that no name can move a cursor.

    >>> printable("state\x1b[31m.w") == "state\ufffd[31m.w"
    True
    """
    if text.isprintable():
        return text
    return "".join(" " if c.isspace() and c not in _SPACES else c if _shows(c) else "\ufffd" for c in text)


def _shows(c: str) -> bool:
    return c.isprintable() or c in _SPACES


def one_of(names: Iterable[str]) -> str:
    """The allowed names as a reader meets them: `data, model`, or `none` when there are none."""
    return ", ".join(str(n) for n in names) or "none"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """` Did you mean 'model'?` for the nearest of `names`, or an empty string."""
    near = nearest(word, names)
    return f" Did you mean '{near}'?" if near else ""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The one of `names` that looks most like a word, of the same letters before any other; None where none does.

    >>> nearest("fspd", ["spmd", "fsdp"])
    'fsdp'
    """
    near = get_close_matches(word, [str(n) for n in names], n=3, cutoff=0.5)
    return min(near, key=lambda name: sorted(name) != sorted(word), default=None)


def none_of(said: str, word: str, names: Iterable[str], all_of_them: str, where: str = "") -> str:
    """What is said of a word that is none of `names`: the nearest of them first, then `where` all are told, which is
    `all_of_them` unless given; where none is near, all of them.

    >>> none_of("no view 'htlm'", "htlm", ["html", "text"], "the views are html, text")
    "no view 'htlm'. Did you mean 'html'? The views are html, text"
    >>> none_of("no view 'x'", "x", ["html", "text"], "the views are html, text")
    "no view 'x'; the views are html, text"
    """
    near = did_you_mean(word, names)
    if not near:
        return f"{said}; {all_of_them}"
    told = where or all_of_them
    return f"{said}.{near} {told[:1].upper()}{told[1:]}"


def quoted(text: str) -> str:
    """What was given in quotes, of a long text the beginning.

    >>> quoted("none"), quoted("9" * 5000)
    ("'none'", "'999999999999999999999999999999...', 5,000 characters")
    """
    return repr(text) if len(text) <= 100 else f"'{text[:30]}...', {len(text):,} characters"


def whole_number(text: str, most: int = 1_000_000) -> int | None:
    """The number from 1 to `most` that `text` says; None for other text. Python itself reads no more than 4,300 digits.

    >>> whole_number("16"), whole_number("0"), whole_number("9" * 5000)
    (16, None, None)
    """
    if not text.isdecimal() or len(text) > len(str(most)):
        return None
    number = int(text)
    return number if 1 <= number <= most else None


def regular(pattern: str) -> "re.Pattern[str] | str":
    """A regular expression of a user's, compiled; or why it can't be.

    >>> regular("kernel$"), regular("(")
    (re.compile('kernel$'), 'missing ), unterminated subpattern at position 0')
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        return str(error)
    except (OverflowError, RecursionError):
        return "it repeats or nests more than Python's re can compile"


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


def calls_users_code(function: _Function) -> _Function:
    """Mark a function of ours that calls the user's: what is raised in its own line, as where an argument lacks, is the
    user's error."""
    _calling.add(function.__code__)
    return function


def without_our_frames(
    traceback: types.TracebackType | None,
    is_ours: Callable[[str], bool],
    is_users: Callable[[str], bool],
    *,
    whole: bool = False,
) -> types.TracebackType | None:
    """Return a traceback without the package's frames.

    Args:
        traceback: that of an error.
        is_ours: whether a file, by the name that Python knows it by, is of the package.
        is_users: whether it is the user's.
        whole: whether all of our frames go. Else those below the user's last line stay where we raised the error
            ourselves, so that it can be found; not where it was raised in a function that `calls_users_code`.
    """
    frames: list[types.TracebackType] = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    last = max((at for at, file in enumerate(files) if is_users(file)), default=-1)
    raised_here = bool(frames) and is_ours(files[-1]) and frames[-1].tb_frame.f_code not in _calling
    kept = None
    for at, (frame, file) in reversed([*enumerate(zip(frames, files, strict=True))]):
        if not is_ours(file) or (raised_here and not whole and at > last):
            line = frame.tb_lineno or frame.tb_frame.f_code.co_firstlineno  # an interrupt may come at no line
            kept = types.TracebackType(kept, frame.tb_frame, frame.tb_lasti, line)
    return kept
