"""A `%%shard auto` cell: at its step's first call a strategy is chosen, and the cell goes on with it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from . import cells
from .compare_cell import Growing
from .options import Options
from .shard_cell import placed_by, preparing, requests_of

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ..comparing import Requests
    from ..report.choice import Choice
    from ..step import ShardedStep
    from .session import ShardSession


class Choosing:
    """The choice of one cell. `lead` is given its step, to follow it; without `goes_on` the cell ends at the step's
    first call, and nothing runs."""

    def __init__(
        self,
        session: "ShardSession",
        options: Options,
        cell: cells.Cell,
        place: cells.Step,
        mesh: "Mesh",
        lead: "Callable[[ShardedStep], None]",
        *,
        name_of: Callable[[str], str | None],
        in_kernel: bool,
        goes_on: bool,
        say: Callable[[str], None],
    ):
        self._session, self._options, self._cell, self._place = session, options, cell, place
        self._mesh, self._lead, self._name_of, self._goes_on = mesh, lead, name_of, goes_on
        self._wanted = session.progress and not cell.quiet and in_kernel
        self._say = say
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

        if not binding.bound:
            raise ShardError(f"the cell ended without binding {self._place.path}")
        if self._choice is None:
            stand_in = binding.sharded
            with binding:
                args, kwargs = cells.from_namespace(stand_in.__wrapped__, binding.namespace, self._place.path)
                stand_in(*copies(args), **copies(kwargs))
        assert self._choice is not None
        if self.step is not None:
            binding.settle(self.step)
        return self._choice

    def _decided(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The step of the choice for a call with these arguments. Raises Stopped where the cell is to end."""
        from ..comparing import BUDGET, How, Searching, hardware_for
        from ..step import ShardedStep

        options, session, path = self._options, self._session, self._place.path
        plain = function.__wrapped__ if isinstance(function, ShardedStep) else function
        method = hasattr(plain, "__self__")
        hardware = hardware_for(self._mesh, options.on)
        placed = placed_by(options, path, plain) | {"on": hardware.on}
        with Growing(self._wanted, session.view) as growing:
            how = How(
                options.name or path,
                run=self._goes_on and not method,
                repeat=options.repeat or None,
                say=self._say,
                show=growing,
                prepare=preparing(session, self._cell, path, self._name_of),
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

        among = self._options.among
        words = AMONG if among is None else [word.strip() for word in among.split(",") if word.strip()]
        return requests_of(self._options, words, self._mesh)
