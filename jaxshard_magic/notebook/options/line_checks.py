"""Kinds of `%%shard` lines (one step, comparison, search, command), and checks of the options each kind refuses."""

from collections.abc import Container
from dataclasses import replace

from ...config.flags import Flag
from ...config.strategies import AUTO, WORDS
from ...errors import ShardError, list_names
from .line_options import ShardOptions

_BY_PARAMETER = {flag.parameter: flag for flag in ShardOptions.flags()}


def is_search(options: ShardOptions) -> bool:
    """Return whether a `%%shard` line asks for a search."""
    return options.words[:1] == (AUTO,)


def check_kind(options: ShardOptions) -> None:
    """Check that a `%%shard` line has no options of another kind of line.

    Raises:
        ShardError: A search has options that it refuses, or more words; another line has options of a search, options
            that `--dry-run` refuses, or an option without the one that it needs.
    """
    if is_search(options):
        if options.words[1:]:
            raise ShardError(f"%%shard auto takes options alone; unexpected: {' '.join(options.words[1:])}")
        _refuse(options, "auto", "under auto ")
        return
    if options.dry_run:
        _refuse(options, "dry_run")
    for flag in _given(options):
        if flag.needs and not options.has(need := _BY_PARAMETER[flag.needs]):
            value = "" if need.bare is not None else f" {need.metavar}"
            raise ShardError(f"{flag.name} is of {need.name}: add {need.name}{value}")
        if flag.command == AUTO:
            raise ShardError(f"{flag.name} is for a search: %%shard auto")


def is_comparison(options: ShardOptions) -> bool:
    """Return whether a `%%shard` line asks for a comparison of several candidates."""
    several = any("," in word for word in options.words)
    return several or options.compare or options.meshes is not None or bool(options.vary)


def with_strategies(options: ShardOptions) -> tuple[ShardOptions, list[str]]:
    """Return the options of a comparison, and the strategies on the line.

    Raises:
        ShardError: An option is for single steps only.
    """
    _refuse(options, "compare", "in a comparison ")
    words = [word for text in options.words for word in text.split(",") if word]
    return replace(options, words=(), strategy=",".join(words)), words


def with_strategy(options: ShardOptions) -> ShardOptions:
    """Return the options of a line with one word, with the word as the strategy.

    Raises:
        ShardError: The line has no word or several, or `--keep-going`.
    """
    if options.keep_going:
        raise ShardError("--keep-going is for a comparison: name several strategies, as in %%shard dp,fsdp,tp")
    if not options.words:
        raise ShardError(f"%%shard needs a strategy: {list_names(WORDS)}, or a sum such as fsdp+tp")
    strategy, *rest = options.words
    if rest:
        # In a mesh without quotes, axes after the first are read as words of the line.
        quote = f'; quote the mesh: --mesh "{options.mesh} {" ".join(rest)}"' if options.mesh else ""
        raise ShardError(f"%%shard takes one strategy, then options; unexpected: {' '.join(rest)}{quote}")
    return replace(options, strategy=strategy)


def compiled_only(options: ShardOptions, target: str) -> ShardOptions:
    """Return the options of a cell whose step is compiled for hardware not attached, with `dry_run` set.

    Raises:
        ShardError: An option calls the step, or `--on` names a chip, which the mesh names already.
    """
    for flag in _given(options):
        if flag.calls:
            raise ShardError(
                f"{flag.name} runs the step, and {target} is not attached: it only compiles. Leave {flag.name} out, "
                "or take a mesh of simulated devices"
            )
    if options.on is not None:
        raise ShardError(f"--on {options.on}: the mesh names the chip, {target}. Leave --on out")
    return replace(options, dry_run=True)


def check_output(name: str | None, used: Container[str], user: str) -> None:
    """Raise `ShardError` if `-o` would overwrite a name that `user` needs.

    Args:
        name: Name given by `-o`; None if the line has none.
        used: Names needed.
        user: Words for the user of the names, for the message.
    """
    if name is not None and name in used:
        raise ShardError(f"-o {name}: {user} has that name, and would lose it; take another: -o found")


def check_only(options: ShardOptions, command: str, *allowed: str) -> None:
    """Raise `ShardError` if a line of `%shard command` has other words or options than allowed.

    Args:
        options: Parsed options of the line.
        command: The command, the only word allowed.
        *allowed: Fields of the allowed options.
    """
    others = [flag.name for flag in _given(options) if flag.parameter not in allowed]
    if options.words == (command,) and not others:
        return
    takes = list_names(f"{flag.name} {flag.metavar}" for flag in ShardOptions.flags() if flag.parameter in allowed)
    given = " ".join(options.words[1:]) or list_names(others)
    quote = f'; quote the mesh: --mesh "{options.mesh} {given}"' if options.mesh and options.words[1:] else ""
    raise ShardError(f"%shard {command} takes {takes} and nothing else; unexpected: {given}{quote}")


def _given(options: ShardOptions) -> list[Flag]:
    """Return the flags present on a line."""
    return [flag for flag in ShardOptions.flags() if options.has(flag)]


def _refuse(options: ShardOptions, kind: str, words: str = "") -> None:
    """Raise `ShardError` for an option refused by this kind of line."""
    for flag in _given(options):
        if why := flag.refused.get(kind):
            raise ShardError(f"{flag.name}: {words}{why}; leave {flag.name} out")
