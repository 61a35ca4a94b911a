"""`%shard save DIR state` and `%shard load DIR state`: the notebook's state on disk, and back under its names."""

from typing import TYPE_CHECKING, Any

from ..errors import ShardError, none_of, one_of
from . import cells
from .displays import say
from .options import LoadOptions, SaveOptions, flags_text, parse_command

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from .session import ShardSession


def saved(text: str, shell: "InteractiveShell", session: "ShardSession") -> tuple[None, None]:
    """Save what a `%shard save` line names. Raises ShardError for a line that it can't be, before there is a step, and
    as `ShardedStep.save` does."""
    options = parse_command(text, SaveOptions)
    if options.help:
        print(save_help())
        return None, None
    folder, names = _folder_and_names(options.words, "save")
    if not names:
        raise ShardError(
            f"%shard save {folder} takes the names of the state behind the folder: %shard save DIR state"
        )
    state = _of_names(names, shell)
    step = _step(session, "save")
    number = step.save(folder, state)
    say(f"checkpoint {number} saved into {folder}")
    return None, None


def loaded(text: str, shell: "InteractiveShell", session: "ShardSession") -> tuple[None, None]:
    """Restore what a `%shard load` line names, or tell what its folder has. Raises ShardError for a line that it can't
    be, and as `ShardedStep.restore` does."""
    from ..checkpoints import Store
    from ..checkpoints.told import listing
    from ..step.kept import restore

    options = parse_command(text, LoadOptions)
    if options.help:
        print(load_help())
        return None, None
    folder, names = _folder_and_names(options.words, "load")
    if not names:
        with Store(folder) as store:
            for line in listing(store):
                say(line)
        return None, None
    like, step = _of_names(names, shell), _step(session, "load")
    if step.entry is None:
        args, kwargs = cells.from_namespace(step.__wrapped__, shell.user_ns, step.path or step.name)
        step.prepare(*args, **kwargs)
    state = restore(step, folder, like, options.number, options.cast, tell=say)
    shell.user_ns.update(zip(names, state if len(names) > 1 else (state,), strict=True))
    say(f"{one_of(names)} restored from checkpoint {step.calls_before + step.calls} of {folder}")
    return None, None


def _folder_and_names(words: tuple[str, ...], command: str) -> tuple[str, list[str]]:
    if not words:
        raise ShardError(
            f"%shard {command} takes a folder and the names of the state: %shard {command} DIR state"
        )
    return words[0], list(words[1:])


def _of_names(names: list[str], shell: "InteractiveShell") -> Any:
    known = [name for name in shell.user_ns if not name.startswith("_")]
    for name in names:
        if name not in shell.user_ns:
            said = f"the notebook has no {name}"
            raise ShardError(none_of(said, name, known, "name what the step gives back"))
    values = tuple(shell.user_ns[name] for name in names)
    [*_, last] = values
    return values if len(values) > 1 else last


def _step(session: "ShardSession", command: str) -> Any:
    step: Any = session.step
    if step is None or session.comparison is not None:
        raise ShardError(
            f"there is no step yet, by whose plan the state lies: write %%shard fsdp above a cell with a train step, "
            f"then %shard {command}"
        )
    return step.sharded if isinstance(step, cells.Rehearsal) else step


def save_help() -> str:
    """What `%shard save --help` prints."""
    return f"""Save the state of the last %%shard cell's step into a folder of checkpoints.

    %shard save DIR state          what the name holds; NNX objects: %shard save DIR model optimizer

Its number is that of the calls behind it.

Options:
{flags_text(SaveOptions)}
"""


def load_help() -> str:
    """What `%shard load --help` prints."""
    return f"""Tell what a folder of checkpoints has, or restore its newest, laid out by the last %%shard cell's plan.

    %shard load DIR                what is there
    %shard load DIR state          restored under the name, which holds a state of the same kind

Options:
{flags_text(LoadOptions)}
"""
