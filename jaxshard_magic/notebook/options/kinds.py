"""What a parsed `%%shard` line asks for, and what goes with it: one step, a comparison, a search, a command."""

from collections.abc import Container
from dataclasses import replace

from ...errors import ShardError, one_of
from .flags import STRATEGIES, Options


def chooses(options: Options) -> bool:
    """Whether a `%%shard` line asks for a search. Raises ShardError for its options on another line, and for those that
    it has no place for."""
    if options.words[:1] == ("auto",):
        if options.words[1:]:
            raise ShardError(f"%%shard auto takes options alone; unexpected: {' '.join(options.words[1:])}")
        for given, name, why in (
            (options.compare, "--compare", "what it compiles is compared in any case"),
            (options.keep_going, "--keep-going", "it goes on in any case"),
            (options.profile, "--profile", "many are tried; %shard profile records the step that was chosen"),
            (
                options.checkpoint,
                "--checkpoint",
                "the steps of many are tried; save with the one that was chosen",
            ),
        ):
            if given:
                raise ShardError(f"{name}: under auto {why}; leave {name} out")
        return True
    _of_profile(options)
    _of_checkpoint(options)
    for name in ("budget", "among", "plan_only"):
        if getattr(options, name) != getattr(Options, name):
            raise ShardError(f"--{name.replace('_', '-')} is for a search: %%shard auto")
    return False


def _of_profile(options: Options) -> None:
    """Refuse options that have nothing to record, or none that is kept."""
    if options.trace is not None and not options.profile:
        raise ShardError("--trace keeps what --profile records: add --profile")
    if options.profile and options.dry_run:
        raise ShardError("--profile records steps that run, and --dry-run runs none: leave one of them out")


def _of_checkpoint(options: Options) -> None:
    """Refuse what says how to save where nothing is saved."""
    if options.checkpoint is None:
        for given, name in (
            (options.every, "--every"),
            (options.keep, "--keep"),
            (options.resume, "--resume"),
        ):
            if given:
                raise ShardError(
                    f"{name} is of --checkpoint: say the folder too, --checkpoint runs/mine {name}"
                )
    elif options.dry_run:
        raise ShardError("--checkpoint saves what steps give, and --dry-run runs none: leave one of them out")


def compares(options: Options) -> bool:
    """Whether a `%%shard` line asks for several candidates side by side."""
    several = any("," in word for word in options.words)
    return several or options.compare or options.meshes is not None or bool(options.vary)


def with_strategies(options: Options) -> tuple[Options, list[str]]:
    """The options of a line that compares, and the strategies that it names. Raises ShardError for options that only
    one step can have."""
    for given, name, why in (
        (options.check, "--check", "each is checked anyway"),
        (options.donate, "--donate", "each runs on copies"),
        (options.profile, "--profile", "none is recorded; record one of them with %%shard and its name"),
        (options.checkpoint, "--checkpoint", "none trains; save with one of them, %%shard and its name"),
    ):
        if given:
            raise ShardError(f"{name}: in a comparison {why}; leave {name} out")
    words = [word for text in options.words for word in text.split(",") if word]
    return replace(options, words=(), strategy=",".join(words)), words


def with_strategy(options: Options) -> Options:
    """The options of a `%%shard` line, which has one word, as they are with that word as the strategy."""
    if options.keep_going:
        raise ShardError(
            "--keep-going is for a comparison: name several strategies, as in %%shard dp,fsdp,tp"
        )
    if not options.words:
        raise ShardError(f"%%shard needs a strategy: {one_of(STRATEGIES)}, or a sum such as fsdp+tp")
    strategy, *rest = options.words
    if rest:
        quote = f'; quote the mesh: --mesh "{options.mesh} {" ".join(rest)}"' if options.mesh else ""
        raise ShardError(f"%%shard takes one strategy, then options; unexpected: {' '.join(rest)}{quote}")
    return replace(options, strategy=strategy)


def compiled_only(options: Options, target: str) -> Options:
    """The options of a cell whose step is compiled for what is not attached. Raises ShardError where they ask for
    calls of it."""
    for asked, name in (
        (options.check, "--check"),
        (options.repeat, "--repeat"),
        (options.profile, "--profile"),
        (options.checkpoint, "--checkpoint"),
    ):
        if asked:
            raise ShardError(
                f"{name} runs the step, and {target} is not attached: it only compiles. Leave {name} out, or take a "
                "mesh of simulated devices"
            )
    if options.on is not None:
        raise ShardError(f"--on {options.on}: the mesh names the chip, {target}. Leave --on out")
    return replace(options, dry_run=True)


def keeps_apart(name: str | None, used: Container[str], who: str) -> None:
    """Raise ShardError where `-o` would put what is returned in the place of something that is used, and by whom."""
    if name is not None and name in used:
        raise ShardError(f"-o {name}: {who} has that name, and would lose it; take another: -o found")


def only(options: Options, command: str, *fields: str) -> None:
    """Raise ShardError where a line of `%shard command` has more than that word and the options of `fields`."""
    plain = replace(options, words=(command,), **{name: getattr(Options, name) for name in fields})
    if options.words == (command,) and plain == Options(words=(command,)):
        return
    allowed = one_of(f"{flag.name} {flag.metavar}" for flag in Options.flags() if flag.into in fields)
    given = " ".join(options.words[1:]) or one_of(_given(plain))
    quote = f'; quote the mesh: --mesh "{options.mesh} {given}"' if options.mesh and options.words[1:] else ""
    raise ShardError(f"%shard {command} takes {allowed} and nothing else; unexpected: {given}{quote}")


def _given(options: Options) -> list[str]:
    return [
        flag.name for flag in Options.flags() if getattr(options, flag.into) != getattr(Options, flag.into)
    ]
