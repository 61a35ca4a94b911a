"""A `%%shard auto` cell: at its step's first call a strategy is chosen, and the cell goes on with it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from ..introspect import is_method
from . import cells
from .growing import Growing
from .shard_cell import ShardCell, placed_by, requests_of

if TYPE_CHECKING:
    from ..comparing import Requests
    from ..report.choice import Choice
    from ..step import ShardedStep


class Choosing:
    """The choice of one cell. `lead` is given its step, to follow it; `say` is told what is done. Without `goes_on` the
    cell ends at the step's first call, and nothing runs."""

    def __init__(
        self,
        this: ShardCell,
        *,
        lead: "Callable[[ShardedStep], None]",
        say: Callable[[str], None],
        goes_on: bool,
    ):
        self._cell, self._lead, self._say, self._goes_on = this, lead, say, goes_on
        self._choice: Choice | None = None
        self.step: ShardedStep | None = None  # that of the choice, where the cell goes on with it

    def ready(self) -> None:
        """Raise ShardError for what the line alone tells, before the cell runs."""
        from ..comparing import space

        space(self._requests())

    def standing_in(self, function: Any) -> cells.Deciding:
        """What stands in the place of the cell's step until it is called."""
        return cells.Deciding(function, partial(self._decided, function))

    def settled(self, binding: cells.Binding) -> "Choice":
        """What was chosen, after the cell: its step is bound then, or the plain one as before.

        A cell that did not call its step has it called once, on copies of what the notebook holds. Raises ShardError
        where there are no arguments for that.
        """
        from ..step.copies import copies

        if self._choice is None and self._cell.not_called is not None:
            raise ShardError(self._cell.not_called)
        if not binding.bound:
            raise ShardError(f"the cell ended without binding {self._cell.path}")
        if self._choice is None:
            stand_in = binding.sharded
            with binding:
                args, kwargs = cells.from_namespace(stand_in.__wrapped__, binding.namespace, self._cell.path)
                stand_in(*copies(args), **copies(kwargs))
        assert self._choice is not None
        self.settle(binding)
        return self._choice

    def settle(self, binding: cells.Binding) -> None:
        """Bind the step of the choice, where there is one, in the place of what stood in for it."""
        if self.step is not None:
            binding.settle(self.step)

    def _decided(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The step of the choice for a call with these arguments. Raises Stopped where the cell is to end."""
        from ..comparing import BUDGET, How, Searching, hardware_for
        from ..step import ShardedStep

        this, options, path = self._cell, self._cell.options, self._cell.path
        plain = function.__wrapped__ if isinstance(function, ShardedStep) else function
        method = is_method(plain)
        hardware = hardware_for(this.mesh, options.on)
        placed = placed_by(options, path, plain) | {"on": hardware.on}
        with Growing(this.grows, this.session.view) as growing:
            how = How(
                options.name or path,
                run=self._goes_on and not method,
                repeat=options.repeat or None,
                say=self._say,
                show=growing,
                prepare=this.prepare,
            )
            search = Searching(
                plain,
                replace(self._requests(), placed=placed),
                how,
                hardware,
                budget=BUDGET if options.budget is None else options.budget,
                compile=not options.plan_only,
            )
            self._choice = search(args, kwargs)
        step = search.step
        if step is None or not self._goes_on or method:
            raise cells.Stopped
        self.step = step
        if options.check:
            self.step.check, self.step.request = True, replace(self.step.request, check=True)
        self._lead(self.step)
        return self.step

    def _requests(self) -> "Requests":
        from ..comparing import AMONG

        among = self._cell.options.among
        words = AMONG if among is None else [word.strip() for word in among.split(",") if word.strip()]
        return requests_of(self._cell.options, words, self._cell.mesh)
