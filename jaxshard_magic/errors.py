"""`ShardError`, helpers for its messages, readers of numbers and expressions by users, and shortened tracebacks."""

import re
import types
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TypeVar

_MOST = 20_000  # characters of a message
_SPACES = "\u00a0\u202f"  # no-break spaces, which numbers with units have
_Function = TypeVar("_Function", bound=types.FunctionType)
_calling: set[types.CodeType] = set()  # code of functions marked by `calls_users_code`


class ShardError(Exception):
    """Request that can't be carried out; the message is one line with a remedy.

    Args:
        message: Problem and remedy, with a semicolon between them.
        fix: Text to paste.
        option: Option responsible for the error; becomes the beginning of the message.

    Attributes:
        fix: Text to paste, None without one.
        why: The problem alone, for readers who gave no option.

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
    r"""Return `text` on one line, with control and formatting characters replaced.

    >>> printable("state\x1b[31m.w") == "state\ufffd[31m.w"
    True
    """
    if text.isprintable():
        return text
    # A name in a message could otherwise move the cursor of a terminal.
    return "".join(" " if c.isspace() and c not in _SPACES else c if _shows(c) else "\ufffd" for c in text)


def _shows(c: str) -> bool:
    return c.isprintable() or c in _SPACES


def list_names(names: Iterable[str]) -> str:
    """Return names as a list in a sentence: `data, model`, or `none` without names."""
    return ", ".join(str(n) for n in names) or "none"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return ` Did you mean 'model'?` for the nearest of `names`, or an empty string.

    Args:
        word: The unknown word.
        names: Known names.
    """
    near = nearest(word, names)
    return f" Did you mean '{near}'?" if near else ""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to a word, None without a similar one. An anagram of the word comes first.

    >>> nearest("fspd", ["spmd", "fsdp"])
    'fsdp'
    """
    near = get_close_matches(word, [str(n) for n in names], n=3, cutoff=0.5)
    return min(near, key=lambda name: sorted(name) != sorted(word), default=None)


def unknown_name(said: str, word: str, names: Iterable[str], all_of_them: str, where: str = "") -> str:
    """Return a message about an unknown word, with the nearest name or all names.

    Args:
        said: The problem.
        word: The unknown word.
        names: Known names.
        all_of_them: Clause that lists all names.
        where: Clause that points to the list; used after a near name instead of `all_of_them`.

    >>> unknown_name("no view 'htlm'", "htlm", ["html", "text"], "the views are html, text")
    "no view 'htlm'. Did you mean 'html'? The views are html, text"
    >>> unknown_name("no view 'x'", "x", ["html", "text"], "the views are html, text")
    "no view 'x'; the views are html, text"
    """
    near = did_you_mean(word, names)
    if not near:
        return f"{said}; {all_of_them}"
    told = where or all_of_them
    return f"{said}.{near} {told[:1].upper()}{told[1:]}"


def quoted(text: str) -> str:
    """Return a text in quotes; of a text above 100 characters the beginning and the length.

    >>> quoted("none"), quoted("9" * 5000)
    ("'none'", "'999999999999999999999999999999...', 5,000 characters")
    """
    return repr(text) if len(text) <= 100 else f"'{text[:30]}...', {len(text):,} characters"


def parse_count(text: str, most: int = 1_000_000) -> int | None:
    """Return the number that `text` spells, None for other text.

    Args:
        text: Decimal digits.
        most: Highest number; the lowest is 1.

    >>> parse_count("16"), parse_count("0"), parse_count("9" * 5000)
    (16, None, None)
    """
    # `int` raises ValueError for more than 4,300 digits.
    if not text.isdecimal() or len(text) > len(str(most)):
        return None
    number = int(text)
    return number if 1 <= number <= most else None


def compile_pattern(pattern: str) -> "re.Pattern[str] | str":
    """Return a user's regular expression, compiled, or the reason why it does not compile.

    >>> compile_pattern("kernel$"), compile_pattern("(")
    (re.compile('kernel$'), 'missing ), unterminated subpattern at position 0')
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        return str(error)
    except (OverflowError, RecursionError):
        return "it repeats or nests more than Python's re can compile"


def no_results_error(name: str, kind: str) -> ShardError:
    """Return the error for a function without results when called.

    Args:
        name: Name of the function.
        kind: `async` or `generator`.
    """
    if kind == "async":
        fix = "make it a plain def, and await around its call"
        return ShardError(f"{name} is an async function, and a step gives its results when it is called: {fix}")
    fix = "return them instead of yielding"
    return ShardError(f"{name} is a generator function, and a step gives its results when it is called: {fix}")


def calls_users_code(function: _Function) -> _Function:
    """Mark a function of this package that calls the user's code.

    An error raised in the function's own line, as for a missing argument, counts as the user's.
    """
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
        traceback: Traceback of an error.
        is_ours: Returns whether a file, by its name in Python, belongs to the package.
        is_users: Returns whether a file is the user's.
        whole: Remove all frames of the package. Otherwise frames after the user's last line stay where the package
            raised the error itself, so that the cause can be found; not for functions marked by `calls_users_code`.
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
            line = frame.tb_lineno or frame.tb_frame.f_code.co_firstlineno  # None for an interrupt between two lines
            kept = types.TracebackType(kept, frame.tb_frame, frame.tb_lasti, line)
    return kept
