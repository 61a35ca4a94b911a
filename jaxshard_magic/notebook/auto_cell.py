"""`%%shard auto`: choose a strategy at the first call of the cell's step, and continue the cell with the chosen
step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from ..introspect import is_method
from . import cells
from .live_output import LiveOutput
from .shard_cell import ShardCell, requests_of, shard_arguments

if TYPE_CHECKING:
    from ..report.choice import Choice
    from ..search import Requests
    from ..step import ShardedStep


class AutoCell:
    """Search for the strategy of one `%%shard auto` cell.

    Args:
        this: The cell.
        lead: Called with the chosen step, to attach progress and monitoring.
        say: Receives a text about the current action.
        goes_on: Continue the cell with the chosen step. If false, the cell ends at the first call of its step, and no
            step runs.
    """

    def __init__(
        self, this: ShardCell, *, lead: "Callable[[ShardedStep], None]", say: Callable[[str], None], goes_on: bool
    ):
        self._cell, self._lead, self._say, self._goes_on = this, lead, say, goes_on
        self._choice: Choice | None = None
        self.step: ShardedStep | None = None  # chosen step, if the cell continues with it

    def check_line(self) -> None:
        """Check the line before the cell runs.

        Raises:
            ShardError: The options of the line do not describe a search space.
        """
        from ..search import strategy_space

        strategy_space(self._requests())

    def make_stand_in(self, function: Any) -> cells.DeferredStep:
        """Return the stand-in bound in place of the step until the first call."""
        return cells.DeferredStep(function, partial(self._choose, function))

    def finish(self, binding: cells.Binding) -> "Choice":
        """Return the choice after the cell has run, and bind the chosen step or the plain step.

        A step not called by the cell is called here once, on copies of the notebook's values.

        Args:
            binding: Binding of the step's name during the cell.

        Raises:
            ShardError: The cell neither called nor bound the step, or the notebook has no arguments for the call.
        """
        from ..step.copies import copy_arguments

        if self._choice is None and self._cell.not_called_message is not None:
            raise ShardError(self._cell.not_called_message)
        if not binding.bound:
            raise ShardError(f"the cell ended without binding {self._cell.path}")
        if self._choice is None:
            stand_in = binding.sharded
            with binding:
                args, kwargs = cells.from_namespace(stand_in.__wrapped__, binding.namespace, self._cell.path)
                # The step may donate its arguments, and the notebook's arrays have to survive.
                stand_in(*copy_arguments(args), **copy_arguments(kwargs))
        assert self._choice is not None
        self.bind_step(binding)
        return self._choice

    def bind_step(self, binding: cells.Binding) -> None:
        """Bind the chosen step, if any, in place of the stand-in."""
        if self.step is not None:
            binding.settle(self.step)

    def _choose(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Search with the arguments of the first call, and return the chosen step.

        Raises:
            CellStopped: The cell ends here: no step was chosen, none may run, or the step is a method.
        """
        from ..search import BUDGET, StrategySearch, TrialOptions, hardware_for
        from ..step import ShardedStep

        this, options, path = self._cell, self._cell.options, self._cell.path
        plain = function.__wrapped__ if isinstance(function, ShardedStep) else function
        # Running a method would change its object, so methods are only compiled.
        method = is_method(plain)
        hardware = hardware_for(this.mesh, options.on)
        placed = shard_arguments(options, path, plain) | {"on": hardware.on}
        with LiveOutput(this.shows_early_results, this.session.view) as growing:
            how = TrialOptions(
                options.name or path,
                run=self._goes_on and not method,
                repeat=options.repeat or None,
                say=self._say,
                show=growing,
                prepare=this.prepare,
            )
            search = StrategySearch(
                plain,
                replace(self._requests(), fixed=placed),
                how,
                hardware,
                budget=BUDGET if options.budget is None else options.budget,
                compile=not options.plan_only,
            )
            self._choice = search(args, kwargs)
        step = search.step
        if step is None or not self._goes_on or method:
            raise cells.CellStopped
        self.step = step
        if options.check:
            self.step.check = True
            self.step.programs.request = replace(self.step.request, check=True)
        self._lead(self.step)
        return self.step

    def _requests(self) -> "Requests":
        from ..config.strategies import SEARCHED_STRATEGIES

        among = self._cell.options.among
        words = SEARCHED_STRATEGIES if among is None else [word.strip() for word in among.split(",") if word.strip()]
        return requests_of(self._cell.options, words, self._cell.mesh)
