"""`Schedule`: the order in which each rank of a pipeline runs its actions; checked, printed and parsed."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from jaxshard_magic.errors import ShardError
from jaxshard_magic.schedule.actions import KINDS, Action, Step, flat, moved, parse_step, parts
from jaxshard_magic.schedule.costs import Costs

if TYPE_CHECKING:
    from jaxshard_magic.report import Pipeline

Grid = tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """Which actions each rank of a pipeline runs, in its order; when they run follows from what they wait for.

    A pipeline has `stages` ranks, each a device or a group of them, and each rank holds `chunks` parts of the model.
    An action names its part of the model: stage 0 to stages x chunks - 1, in the order of the forward pass. A step of
    several `losses` runs one after the other, the stages of each numbered on from those of the one before, which it
    hands nothing to.

    Every stage runs each microbatch forward once, and backward once, whole (`B`) or in halves (`I`, later `W`).

    `costs` are those that it was made for, and shown at; equal schedules may have been made for others.

    Raises ShardError that points at the rank and the place in it, for an action that is missing, doubled, before what
    it needs, or on a second rank. Whether ranks wait for each other for ever is told by `simulate`.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    grid: Grid
    costs: Costs | None = field(default=None, compare=False)
    losses: int = 1

    def __post_init__(self) -> None:
        _check(self)

    @property
    def stages_of_loss(self) -> int:
        """How many stages each loss is cut into."""
        return self.stages * self.chunks

    @property
    def all_stages(self) -> int:
        """How many stages the ranks hold together, of all losses."""
        return self.stages_of_loss * self.losses

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank that holds each stage."""
        held = {stage: rank for rank, row in enumerate(self.grid) for stage, _, _ in flat(row)}
        return tuple(held[stage] for stage in range(self.all_stages))

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank holds, in the model's order."""
        return tuple(
            tuple(stage for stage, held in enumerate(self.rank_of) if held == rank)
            for rank in range(self.stages)
        )

    @property
    def actions(self) -> int:
        """How many actions there are, on all ranks together."""
        return sum(len(flat(row)) for row in self.grid)

    def __str__(self) -> str:
        """The grid as text, one line a rank, which `parse` reads."""
        head = f"# {self.name}: {self.stages} stages, {self.microbatches} microbatches, {self.chunks} chunks"
        head += f", {self.losses} losses" if self.losses > 1 else ""
        return "\n".join([head, *(" ".join(map(str, row)) for row in self.grid)]) + "\n"

    def __repr__(self) -> str:
        size = f"{self.stages} stages x {self.microbatches} microbatches"
        chunks = f" x {self.chunks} chunks" if self.chunks > 1 else ""
        losses = f" x {self.losses} losses" if self.losses > 1 else ""
        return f"<Schedule {self.name}: {size}{chunks}{losses}>"

    def timeline(self, *, beside: bool = True) -> "Pipeline":
        """When each action runs, at its costs: what a notebook shows of it, to save and to send.

        >>> parse("0F0 0B0\\n1F0 1B0").timeline(beside=False)
        <Pipeline custom: 2 stages x 1 microbatches, predicted>

        `beside`: what other schedules and sizes would cost as well, which takes about half a second.
        """
        from jaxshard_magic.analysis.timeline import timeline

        return timeline(self, beside=beside)

    def for_losses(self, losses: int) -> "Schedule":
        """This schedule for each of so many losses in turn, each stage at the costs of the same one of the first.

        >>> s = parse("0F0 0B0\\n1F0 1B0").for_losses(2)
        >>> print(s)
        # custom: 2 stages, 1 microbatches, 1 chunks, 2 losses
        0F0 0B0 2F0 2B0
        1F0 1B0 3F0 3B0
        <BLANKLINE>
        """
        if losses == 1:
            return self
        every = range(0, losses * self.all_stages, self.all_stages)
        grid = tuple(tuple(moved(step, by) for by in every for step in row) for row in self.grid)
        return replace(self, grid=grid, losses=losses * self.losses, costs=None)


_FEW = 1_000_000
_HEAD = re.compile(r"#\s*(?P<name>[^:]+):(?:.*\b(?P<losses>\d{1,6}) losses)?")
_LABEL = re.compile(r"\s*(?:rank|stage)?\s*\d+\s*:", re.IGNORECASE)


def parse(text: str, name: str | None = None) -> Schedule:
    """The schedule that `text` writes, one line a rank: actions separated by spaces, or by commas as in a CSV file.

    Empty cells, empty lines and a label such as `rank 0:` are passed over; a line `# name: ..., 2 losses` gives the
    name and the number of losses.

    >>> parse("0F0 0F1 0B0 0B1").microbatches
    2

    Args:
        text: the lines.
        name: what to call it; the text's own name by default, or "custom".

    Raises ShardError that points at the line and the word, or at the action that is wrong (see `Schedule`).
    """
    rows: list[tuple[Step, ...]] = []
    losses = 1
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            said = _HEAD.match(line.strip())
            name = name or (said["name"].strip() if said else None)
            losses = int(said["losses"]) if said and said["losses"] else losses
        elif words := _LABEL.sub("", line, count=1).replace(",", " ").split():
            rows.append(tuple(parse_step(word, f"line {number}: ") for word in words))
    if not rows:
        raise ShardError("a schedule needs a line for each rank; the text has none")
    return from_rows(name or "custom", rows, losses)


def from_rows(name: str, rows: Sequence[Iterable[Step]], losses: int = 1) -> Schedule:
    """The schedule of these rows, one a rank, of so many losses; its sizes are read from its actions.

    Raises ShardError where the stages don't spread evenly over the ranks and losses, and as `Schedule` does.
    """
    grid = tuple(map(tuple, rows))
    actions = [part for row in grid for part in flat(row)]
    if not actions:
        raise ShardError(f"schedule {name} has no actions")
    held = 1 + max(action.stage for action in actions)
    if held % len(grid):
        raise ShardError(
            f"schedule {name} has {held} stages on {len(grid)} ranks; each rank holds the same number of stages"
        )
    if losses < 1 or held % (len(grid) * losses):
        raise ShardError(
            f"schedule {name} has {held} stages on {len(grid)} ranks for {losses} losses; each rank holds the same "
            "number of stages of each"
        )
    microbatches = 1 + max(action.microbatch for action in actions)
    if held * microbatches > max(len(actions), _FEW):  # a wrong number in a file must not fill the memory
        raise ShardError(
            f"schedule {name} has {len(actions):,} actions, too few for the {held:,} stages and {microbatches:,} "
            "microbatches that they name"
        )
    return Schedule(name, len(grid), microbatches, held // (len(grid) * losses), grid, losses=losses)


def _check(schedule: Schedule) -> None:
    """That every action stands once, on one rank, after what it needs there."""
    if len(schedule.grid) != schedule.stages:
        raise ShardError(f"{schedule.name} has {len(schedule.grid)} lines for {schedule.stages} ranks")
    seen = _Seen.none(schedule)
    places, rank_of, microbatches = seen.places, seen.rank_of, schedule.microbatches
    always, never = [0] * len(places["F"]), [_NOWHERE] * len(places["F"])
    # Of each kind: where it stands itself, what must stand before it, and what must not stand there as well.
    rules = {
        "F": (places["F"], always, never),
        "B": (places["B"], places["F"], places["I"]),
        "I": (places["I"], places["F"], places["B"]),
        "W": (places["W"], places["I"], never),
    }
    for rank, row in enumerate(schedule.grid):
        for place, step in enumerate(row):
            for action in (step,) if type(step) is Action else parts(step):
                stage, kind, microbatch = action
                if 0 <= stage < len(rank_of) and 0 <= microbatch < microbatches and kind in rules:
                    own, needed, other = rules[kind]
                    index = stage * microbatches + microbatch
                    if rank_of[stage] < 0:
                        rank_of[stage] = rank
                    if rank_of[stage] == rank and own[index] < 0 <= needed[index] and other[index] < 0:
                        own[index] = place
                        continue
                why = _wrong(schedule, seen, rank, action)
                raise ShardError(f"schedule {schedule.name}: rank {rank}, action {place}, {action}: {why}")
    for index, (forward, whole, weight) in enumerate(zip(places["F"], places["B"], places["W"], strict=True)):
        if forward < 0 or (whole < 0 and weight < 0):
            raise ShardError(f"schedule {schedule.name}: {_missing(seen, *divmod(index, microbatches))}")


_NOWHERE = -1


class _Seen(NamedTuple):
    """What the rows so far hold: of each kind, every stage's microbatches and their places in its row; its rank."""

    places: dict[str, list[int]]
    rank_of: list[int]

    @staticmethod
    def none(schedule: Schedule) -> "_Seen":
        stages = schedule.all_stages
        places = {kind: [_NOWHERE] * (stages * schedule.microbatches) for kind in KINDS}
        return _Seen(places, [_NOWHERE] * stages)


def _wrong(schedule: Schedule, seen: _Seen, rank: int, action: Action) -> str:
    """Why `action` may not stand here."""
    stage, kind, microbatch = action
    stages = schedule.all_stages
    if kind not in KINDS:
        return f"kinds are {', '.join(KINDS)}"
    if not (0 <= stage < stages and 0 <= microbatch < schedule.microbatches):
        return f"there are {stages} stages and {schedule.microbatches} microbatches, each counted from 0"
    if seen.rank_of[stage] != rank:
        return f"stage {stage} already stands on rank {seen.rank_of[stage]}"
    index = stage * schedule.microbatches + microbatch
    if (place := seen.places[kind][index]) >= 0:
        return f"it already stands at action {place}"
    need = "I" if kind == "W" else "F"
    if seen.places[need][index] < 0:
        return f"{stage}{need}{microbatch} must stand before it"
    other = "I" if kind == "B" else "B"
    return f"{stage}{other}{microbatch} already does it, at action {seen.places[other][index]}"


def _missing(seen: _Seen, stage: int, microbatch: int) -> str:
    """What a stage lacks of a microbatch."""
    index = stage * (len(seen.places["F"]) // len(seen.rank_of)) + microbatch
    if seen.places["F"][index] < 0:
        lacks = f"{stage}F{microbatch}"
    elif seen.places["I"][index] < 0:
        lacks = f"{stage}B{microbatch}, or {stage}I{microbatch} and {stage}W{microbatch}"
    else:
        lacks = f"{stage}W{microbatch}"
    return f"rank {seen.rank_of[stage]} lacks {lacks}" if seen.rank_of[stage] >= 0 else f"no rank has {lacks}"
