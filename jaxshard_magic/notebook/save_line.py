"""`%shard save DIR state` and `%shard load DIR state`: write the notebook's state to disk, and restore it to its
names."""

from contextlib import nullcontext
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ShardError, list_names, unknown_name
from . import cells
from .displays import say
from .options import LoadOptions, SaveOptions, flags_text, parse_command

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from .session import ShardSession


def run_save_line(text: str, shell: "InteractiveShell", session: "ShardSession") -> tuple[None, None]:
    """Run a `%shard save` line.

    Raises:
        ShardError: The line is malformed, no step exists so far, or `ShardedStep.save` fails.
    """
    from ..checkpoints.weight_files import SUFFIXES
    from ..step.save_restore import save

    options = parse_command(text, SaveOptions)
    if options.help:
        print(save_help())
        return None, None
    folder, names = _folder_and_names(options.words, "save")
    if not names:
        raise ShardError(f"%shard save {folder} takes the names of the state behind the folder: %shard save DIR state")
    state = _of_names(names, shell)
    step = _step(session, "save")
    number = save(step, folder, state, options.rename, options.force, warn=say)
    said = f"{list_names(names)} saved into {folder}"
    say(said if folder.endswith(SUFFIXES) else f"checkpoint {number} saved into {folder}")
    return None, None


def run_load_line(text: str, shell: "InteractiveShell", session: "ShardSession") -> tuple[None, None]:
    """Run a `%shard load` line: restore the named state, or list the contents of the folder or file.

    Raises:
        ShardError: The line is malformed, no step exists so far to lay out a named state, or `ShardedStep.restore`
            fails.
    """
    from ..checkpoints import CheckpointStore
    from ..checkpoints import weight_loading as files
    from ..checkpoints.store import list_checkpoints
    from ..checkpoints.weight_files import is_weights
    from ..step.save_restore import restore

    options = parse_command(text, LoadOptions)
    if options.help:
        print(load_help())
        return None, None
    folder, names = _folder_and_names(options.words, "load")
    path = Path(expanduser(folder))
    weights = is_weights(path)
    if not names:
        with nullcontext() if weights else CheckpointStore(folder) as store:  # None for weights
            for line in files.list_arrays(path) if store is None else list_checkpoints(store):
                say(line)
        return None, None
    like, step = _of_names(names, shell), _step(session, "load")
    # The layout of the restored arrays is the plan's, so the step has to be planned first.
    if step.entry is None:
        args, kwargs = cells.from_namespace(step.__wrapped__, shell.user_ns, step.path or step.name)
        step.prepare(*args, **kwargs)
    called = names[0].rpartition(".")[2] if len(names) == 1 else ""
    restore_options = options.number, options.cast, options.rename, options.part, called
    state = restore(step, folder, like, *restore_options, warn=say)
    for name, value in zip(names, state if len(names) > 1 else (state,), strict=True):
        _bind(name, value, shell)
    of = "" if weights else f"checkpoint {step.calls_before + step.calls} of "
    say(f"{list_names(names)} restored from {of}{folder}")
    return None, None


def _folder_and_names(words: tuple[str, ...], command: str) -> tuple[str, list[str]]:
    """Return the folder and the names of a line; raise `ShardError` without a folder."""
    if not words:
        raise ShardError(f"%shard {command} takes a folder and the names of the state: %shard {command} DIR state")
    return words[0], list(words[1:])


def _of_names(names: list[str], shell: "InteractiveShell") -> Any:
    """Return the value of one name, or the tuple of the values of several."""
    values = tuple(_value(name, shell) for name in names)
    [*_, last] = values
    return values if len(values) > 1 else last


def _value(name: str, shell: "InteractiveShell") -> Any:
    """Return the value of a name; for `state.params` the arrays of this part by name."""
    from ..checkpoints.state_arrays import flatten_state

    root, _, part = name.partition(".")
    if root not in shell.user_ns:
        known = [each for each in shell.user_ns if not each.startswith("_")]
        raise ShardError(unknown_name(f"the notebook has no {root}", root, known, "name what the step gives back"))
    value = shell.user_ns[root]
    return flatten_state(value).leaves_under(part) if part else value


def _bind(name: str, value: Any, shell: "InteractiveShell") -> None:
    """Bind a value to a name; for `state.params` bind `state` to a state with the part replaced."""
    from ..checkpoints.state_arrays import flatten_state

    root, _, part = name.partition(".")
    shell.user_ns[root] = flatten_state(shell.user_ns[root]).with_part(part, value) if part else value


def _step(session: "ShardSession", command: str) -> Any:
    """Return the last step; raise `ShardError` without one or after a comparison."""
    step: Any = session.step
    if step is None or session.comparison is not None:
        raise ShardError(
            f"there is no step yet, by whose plan the state lies: write %%shard fsdp above a cell with a train step, "
            f"then %shard {command}"
        )
    return step.sharded if isinstance(step, cells.DryRunStep) else step


def save_help() -> str:
    """Return the text printed by `%shard save --help`."""
    return f"""Save the state of the last %%shard cell's step into a folder of checkpoints, or a file of weights.

    %shard save DIR state          what the name holds; NNX objects: %shard save DIR model optimizer
    %shard save FILE state.params  a part of it, into FILE.safetensors or FILE.npz, by the names of its arrays

A checkpoint's number is that of the calls behind it.

Options:
{flags_text(SaveOptions)}
"""


def load_help() -> str:
    """Return the text printed by `%shard load --help`."""
    return f"""Restore a state, or a part of it, laid out by the last %%shard cell's plan; or tell what there is.

    %shard load DIR                what the folder of checkpoints has
    %shard load DIR state          its newest, under the name, which holds a state of the same kind
    %shard load DIR state.params   a part of it; so of a name that holds the part alone
    %shard load FILE state.params  weights: FILE.safetensors, FILE.npz, an index or a folder of safetensors

--rename says which name of the file, and of all that begin so, is which of yours; the first that fits counts:

    --rename "model=params"        model.norm.weight is params.norm.weight
    --rename "h.*.fc.weight=h.*.fc.kernel:T"   the number stays; :T swaps two dimensions, as torch has weights
    --rename "h.*.fc=h.fc"         no * on your side: stacked into one array, by number

Options:
{flags_text(LoadOptions)}
"""
