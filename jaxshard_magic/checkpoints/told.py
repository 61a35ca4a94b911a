"""What a folder of checkpoints has, in lines."""

from ..errors import ShardError, printable
from .store import Store


def listing(store: Store) -> list[str]:
    """A line for each checkpoint, and one for saves that were cut off, which are cleared. Raises ShardError where there
    is none at all."""
    lines, torn = [], store.torn()
    for step in store.steps():
        try:
            saved = store.saved(step)
        except ShardError as error:
            lines.append(str(error))
            continue
        versions = ", ".join(f"{name} {number}" for name, number in saved.versions.items())
        lines.append(
            f"checkpoint {step}: {len(saved.leaves)} arrays, {saved.strategy} on {saved.mesh}, {saved.when}, "
            f"{versions}, hash {saved.hash}"
        )
    if strays := store.strays():
        lines.append(
            f"no checkpoints, or damaged ones, as they don't tell what is in them: {', '.join(strays)}"
        )
    if torn:
        lines.append(f"cut off while they were saved, and removed: {', '.join(torn)}")
    if not lines:
        raise ShardError(f"{store.name} has no checkpoints.{store.nearest} %shard save DIR state makes one")
    return [printable(line) for line in lines]
