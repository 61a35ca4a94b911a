"""The contents of a folder of checkpoints as lines of text."""

from ..errors import ShardError, printable
from .store import CheckpointStore


def list_checkpoints(store: CheckpointStore) -> list[str]:
    """Return one line for each checkpoint, and one for interrupted saves, which are removed.

    Raises ShardError if the folder has none.
    """
    lines, torn = [], store.remove_interrupted()
    for step in store.steps():
        try:
            saved = store.info(step)
        except ShardError as error:
            lines.append(str(error))
            continue
        versions = ", ".join(f"{name} {number}" for name, number in saved.versions.items())
        lines.append(
            f"checkpoint {step}: {len(saved.leaves)} arrays, {saved.strategy} on {saved.mesh}, {saved.when}, "
            f"{versions}, hash {saved.hash}"
        )
    if strays := store.incomplete_names():
        lines.append(f"no checkpoints, or damaged ones, as they don't tell what is in them: {', '.join(strays)}")
    if torn:
        lines.append(f"cut off while they were saved, and removed: {', '.join(torn)}")
    if not lines:
        raise ShardError(f"{store.name} has no checkpoints.{store.name_suggestion} %shard save DIR state makes one")
    return [printable(line) for line in lines]
