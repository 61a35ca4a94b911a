"""`CalledAgain`: calls of a step that were made, made once more."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config.request import Request
from ..errors import ShardError
from ..program.unwrap import Step
from ..temporary import Kept, elements
from .donation import Ours
from .entry import Entry
from .followed import Followed

if TYPE_CHECKING:
    from ..analysis.profiled import Profile


class CalledAgain(Followed):
    """Programs that are followed, and the arguments of the last call where they are kept: it is made again on copies,
    timed or under a recording."""

    def __init__(self, step: Step, request: Request):
        super().__init__(step, request)
        self._kept: tuple[Entry, tuple[Any, ...]] | None = None
        self._profiled: tuple[Entry, Profile] | None = None
        self._recent: list[Any] = []  # kinds of calls that take the short way, which keeps no arguments
        self.keep_arguments = False

    @property
    def keep_arguments(self) -> bool:
        """Keep the last call's arguments alive, for `repeat`."""
        return self._keep

    @keep_arguments.setter
    def keep_arguments(self, value: bool) -> None:
        self._keep, self._kept, self._recent = value, None, []

    def repeat(self, n: int) -> None:
        """Call the step on the last call's arguments until `n` more calls are timed; nothing is updated.

        Needs `keep_arguments` set before that call: arguments are not kept alive otherwise.
        """
        entry, inputs = self.inputs(None)
        taken = entry.clock.copies
        self.settle()
        enough = len(taken) + n
        with Kept(elements(entry.consts)):
            while len(taken) < enough:  # calls of a pipeline that are watched action by action don't count
                entry.timed(entry.copies(inputs), taken)

    @property
    def last_profile(self) -> "Profile | None":
        """What was read of recorded calls of the last kind."""
        return self._profiled[1] if self._profiled and self._profiled[0] is self._current else None

    @property
    def has_inputs(self) -> bool:
        """Whether the arguments of the last call were kept."""
        return self._kept is not None

    def take_profile(self, entry: Entry, profile: "Profile") -> None:
        """Take what was recorded of a program, which is that of the last kind of call from now on."""
        self._profiled, self._current = (entry, profile), entry

    def inputs(
        self, given: tuple[tuple[Any, ...], Mapping[str, Any]] | None
    ) -> tuple[Entry, tuple[Any, ...]]:
        """The program of a call, and its inputs as it takes them; None: those of the last call that were kept. Raises
        ShardError where none were."""
        if given is None and self._kept is not None:
            return self._kept
        if given is None:
            raise ShardError(
                f"the arguments of {self.name} were not kept: set keep_arguments before it is called, or give them, "
                "as in step.profile(args=(state, batch))"
            )
        peeled, entry = self._entry(*given)
        if self._hosts is not None:
            peeled = self._hosts.joined(entry, peeled)
        return entry, entry.arrange(entry.place(entry.with_rows(peeled.leaves), Ours()))
