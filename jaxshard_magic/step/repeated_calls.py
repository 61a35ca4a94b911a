"""Repeat the last call of a step on copies, timed or under the profiler."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config.request import Request
from ..errors import ShardError
from ..program.unwrap import UnwrappedStep
from ..temporary import Restored, list_elements
from .compiled_step import CompiledStep
from .donation import OwnOutputs
from .loop_metrics import MonitoredPrograms

if TYPE_CHECKING:
    from ..analysis.profile_analysis import Profile


class RepeatedCalls(MonitoredPrograms):
    """Programs with loop metrics, plus the arguments of the last call for repeating the call.

    Repeated calls run on copies, timed or under the profiler. Arguments stay alive only while `keep_arguments` is set.

    Args:
        step: Unwrapped train step.
        request: Strategy, mesh and options.
    """

    def __init__(self, step: UnwrappedStep, request: Request):
        super().__init__(step, request)
        self._last_call: tuple[CompiledStep, tuple[Any, ...]] | None = None
        self._profiled: tuple[CompiledStep, Profile] | None = None
        self._fast_calls: list[Any] = []  # of the newest kinds of calls; they keep no arguments
        self.keep_arguments = False

    @property
    def keep_arguments(self) -> bool:
        """Keep the last call's arguments alive, for `repeat`."""
        return self._keep

    @keep_arguments.setter
    def keep_arguments(self, value: bool) -> None:
        # Fast calls keep no arguments, so the next call has to take the slow path.
        self._keep, self._last_call, self._fast_calls = value, None, []

    def repeat(self, n: int) -> None:
        """Call the step on the last call's arguments until `n` more calls are timed; nothing is updated.

        Args:
            n: Number of timed calls to add.

        Raises:
            ShardError: The arguments of the last call were not kept: set `keep_arguments` before the call.
        """
        entry, inputs = self.inputs(None)
        timings = entry.clock.repeated_s
        self.settle()
        enough = len(timings) + n
        # Calls replace the constants that the program carries.
        with Restored(list_elements(entry.consts)):
            while len(timings) < enough:  # calls of a pipeline that record their actions are not timed
                entry.run_timed(entry.copy_donated(inputs), timings)

    @property
    def last_profile(self) -> "Profile | None":
        """Profile of recorded calls of the last kind; None without a recording."""
        return self._profiled[1] if self._profiled and self._profiled[0] is self._current else None

    @property
    def has_inputs(self) -> bool:
        """Return whether the arguments of the last call were kept."""
        return self._last_call is not None

    def take_profile(self, entry: CompiledStep, profile: "Profile") -> None:
        """Store a profile of `entry`, and make `entry` the program of the last kind of call."""
        self._profiled, self._current = (entry, profile), entry

    def inputs(
        self, arguments: tuple[tuple[Any, ...], Mapping[str, Any]] | None
    ) -> tuple[CompiledStep, tuple[Any, ...]]:
        """Return the program of a call, and the call's inputs arranged for the program.

        Args:
            arguments: `(args, kwargs)` of the call; None for the kept arguments of the last call.

        Raises:
            ShardError: `arguments` is None and no arguments were kept.
        """
        if arguments is None and self._last_call is not None:
            return self._last_call
        if arguments is None:
            raise ShardError(
                f"the arguments of {self.name} were not kept: set keep_arguments before it is called, or give them, "
                "as in step.profile(args=(state, batch))"
            )
        peeled, entry = self._program_for(*arguments)
        if self._hosts is not None:
            peeled = self._hosts.join_parts(entry, peeled)
        return entry, entry.arrange(entry.place_inputs(entry.pad_batch(peeled.leaves), OwnOutputs()))
