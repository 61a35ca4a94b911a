"""Compare named strategies for a step, or search for the fastest strategy that fits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from ..config.request import with_auto_axes
from ..config.strategies import COMPARED, SEARCHED_STRATEGIES
from ..introspect import static_attribute
from ..report.choice import Choice
from ..report.comparison import Comparison
from ..search import (
    BUDGET,
    FIXED_OPTIONS,
    Requests,
    StrategySearch,
    TrialOptions,
    TrialRunner,
    candidates,
    chip_for,
    fixed_options_line,
    hardware_for,
)
from ..step import ShardedStep
from ..targets import target_of
from .meshes import default_mesh, given_or


def compare(
    step: Callable[..., Any],
    strategies: str | Sequence[str] = COMPARED,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mesh | str | None = None,
    meshes: str | Sequence[str] | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    run: bool = True,
    check: bool = True,
    repeat: int | None = None,
    keep_going: bool = False,
    name: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    show: Callable[[Comparison], None] = lambda _: None,
    prepare: Callable[[ShardedStep], None] = lambda _: None,
    **options: Any,
) -> Comparison:
    """Try `step(*args, **kwargs)` under several strategies on the same devices, and return their results side by side.

    Each candidate is compiled, run on copies of the arguments, and checked against the plain step; nothing of the
    caller's is changed. A candidate that can't be compiled or run becomes a row with the reason. An interrupt returns
    the results so far. On hardware that is not attached, and with `run=False`, candidates are only compiled, and
    arguments may be shapes. Times on simulated devices measure no chip: candidates are compared by the time predicted
    for `on`, a TPU v5e by default.

    Args:
        step: Any train step.
        strategies: Strategies as `shard` takes them, in a sequence or in text with commas.
        args, kwargs: Arguments of the step: arrays, or their shapes if nothing runs.
        mesh: A `jax.sharding.Mesh`, mesh text, or None for all devices. All candidates use its devices; a strategy uses
            the mesh unchanged if each part has an axis and no axis is spare.
        meshes: "all", or the axes of each mesh to try every strategy on, such as `["data=8", "data=4 model=2"]`.
        vary: Values by option of `shard`: `{"microbatches": [1, 4], "remat": [None, "full"]}`.
        run: Whether to run; False only compiles each candidate, several at a time.
        check: Whether to compare each candidate with the plain step, which runs once.
        repeat: Timed calls of each candidate; None for three, or fewer if they take more than a second together.
        keep_going: Whether an unknown strategy is refused alone, and the others are tried.
        name: Name of the step for display.
        say: Progress callback; takes the current work, "" for none.
        show: Takes the comparison so far.
        prepare: Takes each step before compiling.
        options: Options of `shard` for all candidates; pipeline options apply to pipelines only.

    Returns:
        A `Comparison` with a `Trial` for each candidate.

    Raises:
        ShardError: At once if no candidate is possible. An exception of the step itself passes through if all
            candidates raise it.

    >>> import jax, jax.numpy as jnp
    >>> def train_step(weights, x):
    ...     return weights - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
    >>> shapes = jax.ShapeDtypeStruct((512, 64), "float32"), jax.ShapeDtypeStruct((16, 512), "float32")
    >>> found = compare(train_step, "dp,fsdp", shapes, mesh="cpu:8 data=8", on="v5e", run=False)
    >>> found.smallest.strategy
    'fsdp'
    """
    devices = _devices(mesh)
    how = TrialOptions(name or static_attribute(step, "__name__", "step"), run, check, repeat, say, show, prepare)
    # Before defaults are filled in: a candidate's line has only the options typed by the user.
    said = fixed_options_line(options | {"name": name})
    options |= {"name": name, "on": chip_for(devices, options.get("on"))}
    requests = _requests(strategies, devices, meshes, vary, options, said, keep_going)
    # Hardware that is not attached can't run a step.
    if target_of(devices) is not None:
        how = replace(how, run=False)
    return TrialRunner(step, candidates(requests), how)(args, dict(kwargs or {}))


def choose(
    step: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mesh | str | None = None,
    among: str | Sequence[str] = SEARCHED_STRATEGIES,
    meshes: str | Sequence[str] | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    budget: float | None = BUDGET,
    plan_only: bool = False,
    run: bool = True,
    check: bool = True,
    repeat: int | None = None,
    on: str | None = None,
    name: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    show: Callable[[Comparison], None] = lambda _: None,
    prepare: Callable[[ShardedStep], None] = lambda _: None,
    take: Callable[[ShardedStep], None] = lambda _: None,
    **options: Any,
) -> Choice:
    """Search for the strategy under which `step(*args, **kwargs)` is fastest on these devices, among strategies that
    fit.

    Every strategy is planned on every mesh of the devices. Products, bytes sent and bytes held give a lower bound of
    the step time on the chip. The candidate with the best bound is compiled, then the next, until no candidate left can
    be faster. A candidate that does not fit is tried with microbatches and remat. On an attached accelerator,
    candidates that fit are run on copies of the arguments, and measured times decide; otherwise the times predicted for
    the compiled programs decide.

    Args:
        step: Any train step.
        args, kwargs: Arguments of the step: arrays, or their shapes if nothing runs.
        among: Strategies to search, in a sequence or in text with commas. Among strategies whose predicted times differ
            by no more than predictions err, the simplest is chosen; dp, then fsdp, then sums, then pipelines.
        meshes: "all", the default, or the axes of each mesh to search: `["data=8", "data=4 model=2"]`.
        vary: Values by option of `shard`; microbatches and remat are tried if memory is short, other options with every
            strategy.
        budget: Seconds after which nothing more is tried; None for no limit.
        plan_only: Whether to compile nothing and choose by the lower bounds of the plans.
        run: Whether to run on an attached accelerator; False uses predictions there, too.
        take: Takes the compiled step of the choice, for further use.
        on: Chip to predict for if devices are simulated; a TPU v5e by default.
        mesh, check, repeat, name, say, show, prepare, options: As for `compare`.

    Returns:
        A `Choice` with the `chosen` candidate, and the reason against each other candidate.

    Raises:
        ShardError: Too many candidates, or a budget that ends before any candidate has compiled. Exceptions of the step
            itself pass through.

    >>> import jax, jax.numpy as jnp
    >>> def train_step(weights, x):
    ...     return weights - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
    >>> shapes = jax.ShapeDtypeStruct((512, 64), "float32"), jax.ShapeDtypeStruct((16, 512), "float32")
    >>> found = choose(train_step, shapes, mesh="cpu:8 data=8", among="dp,fsdp", plan_only=True)
    >>> found.source, len(found.candidates)
    ('planned', 2)
    """
    devices = _devices(mesh)
    hardware = hardware_for(devices, on)
    said = fixed_options_line(options | {"name": name, "on": on})
    options |= {"name": name, "on": hardware.on}
    how = TrialOptions(name or static_attribute(step, "__name__", "step"), run, check, repeat, say, show, prepare)
    requests = _requests(among, devices, meshes, vary, options, said)
    searching = StrategySearch(step, requests, how, hardware, budget=budget, compile=not plan_only)
    choice = searching(args, dict(kwargs or {}))
    if (chosen := searching.step) is not None:
        take(chosen)
    return choice


def _requests(
    strategies: str | Sequence[str],
    mesh: Mesh,
    meshes: str | Sequence[str] | None,
    vary: Mapping[str, Sequence[Any]] | None,
    options: Mapping[str, Any],
    said: str,
    keep_going: bool = False,
) -> Requests:
    placed = {name: options[name] for name in FIXED_OPTIONS if name in options}
    common = {name: value for name, value in options.items() if name not in FIXED_OPTIONS and value is not None}
    return Requests(_words(strategies), mesh, meshes, vary or {}, common, placed, keep_going, said)


def _words(strategies: str | Sequence[str]) -> Sequence[str]:
    if isinstance(strategies, str):
        return [word.strip() for word in strategies.split(",") if word.strip()]
    return strategies


def _devices(mesh: Mesh | str | None) -> Mesh:
    """Return the mesh with the devices of all candidates."""
    return with_auto_axes(given_or(mesh, lambda: default_mesh("dp").mesh))
