"""A step under several strategies: those that are named, side by side, or the fastest of all that fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from ..comparing import (
    AMONG,
    BUDGET,
    PLACED,
    How,
    Requests,
    Searching,
    Trying,
    candidates,
    chip_for,
    hardware_for,
    said_of,
)
from ..config.request import automatic
from ..config.strategies import COMPARED
from ..introspect import static_attribute
from ..report.choice import Choice
from ..report.comparison import Comparison
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
    """Try `step(*args, **kwargs)` under several strategies on the same devices, and tell them side by side.

    Each candidate is compiled, run on copies of the arguments and checked against the plain step; nothing of the
    caller's is changed. One that can't be compiled or run is a row that says why. An interrupt ends it with what is
    done. On hardware that is not attached, and with `run=False`, candidates are compiled only, and arguments may be
    shapes. Simulated devices measure no chip: what a step takes there is compared as predicted for `on`, a TPU v5e
    unless said.

    Args:
        step: any train step.
        strategies: as `shard` takes them; one text, with commas between them.
        args, kwargs: what the step is called with: arrays, or their shapes where nothing runs.
        mesh: a `jax.sharding.Mesh`, mesh text, or None for all devices. Its devices are those that all take; a strategy
            takes the mesh as it is where that has an axis for each of its parts and none to spare.
        meshes: "all", or the axes of each mesh to try every strategy on, such as `["data=8", "data=4 model=2"]`.
        vary: values by the name of an option of `shard`: `{"microbatches": [1, 4], "remat": [None, "full"]}`.
        run: False compiles only: a compile for each candidate, several at a time.
        check: compare each with the plain step, which runs once.
        repeat: timed calls of each candidate; None for three, or fewer where they take more than a second together.
        keep_going: refuse strategies that are none alone, and try the others.
        name: of the step, in what is shown.
        say, show: are told what is being done, and given the comparison so far.
        prepare: is given each step before it is compiled.
        options: of `shard`, for all candidates; those of a pipeline for those that are one.

    Returns:
        A `Comparison`: a `Trial` for each candidate.

    Raises:
        ShardError: at once for what no candidate could be; and what the step itself raises under all of them.

    >>> import jax, jax.numpy as jnp
    >>> def train_step(weights, x):
    ...     return weights - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
    >>> shapes = jax.ShapeDtypeStruct((512, 64), "float32"), jax.ShapeDtypeStruct((16, 512), "float32")
    >>> found = compare(train_step, "dp,fsdp", shapes, mesh="cpu:8 data=8", on="v5e", run=False)
    >>> found.smallest.strategy
    'fsdp'
    """
    devices = _devices(mesh)
    how = How(name or static_attribute(step, "__name__", "step"), run, check, repeat, say, show, prepare)
    said = said_of(options | {"name": name})
    options |= {"name": name, "on": chip_for(devices, options.get("on"))}
    requests = _requests(strategies, devices, meshes, vary, options, said, keep_going)
    if target_of(devices) is not None:
        how = replace(how, run=False)
    return Trying(step, candidates(requests), how)(args, dict(kwargs or {}))


def choose(
    step: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mesh | str | None = None,
    among: str | Sequence[str] = AMONG,
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
    """Search for the strategy under which `step(*args, **kwargs)` is fastest on these devices, of those that fit.

    Every strategy is planned on every mesh of the devices. What each multiplies, must send and holds tells what it
    takes at least on the chip; the best of them is compiled, then the next, until none that is left can be faster. One
    that does not fit is tried with microbatches and remat. On an accelerator that is attached, those that fit are run
    on copies of the arguments, and the measured times decide; else those that are predicted of the compiled programs.

    Args:
        step: any train step.
        args, kwargs: what the step is called with: arrays, or their shapes where nothing runs.
        among: the strategies to search; one text, with commas between them. Of those that predictions
            can't tell apart the one with the fewest moving parts is chosen: dp, then fsdp, then sums, then pipelines.
        meshes: "all", which is also the default, or the axes of each mesh to search: `["data=8", "data=4 model=2"]`.
        vary: values by the name of an option of `shard`; microbatches and remat are tried where memory is short,
            others with every strategy.
        budget: seconds after which nothing more is tried; None for no limit.
        plan_only: compile nothing, and choose by what the plans take at least.
        run: False predicts on an attached accelerator, too.
        take: is given the step of the choice, as it was compiled, to go on with.
        on: the chip to predict for where the devices are simulated ones; a TPU v5e unless said.
        mesh, check, repeat, name, say, show, prepare, options: as `compare` takes them.

    Returns:
        A `Choice`: the candidate `chosen`, and why each of the others was not.

    Raises:
        ShardError: for a search of too many candidates, and for a budget that ends before anything has compiled; and
            what the step itself raises.

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
    said = said_of(options | {"name": name, "on": on})
    options |= {"name": name, "on": hardware.on}
    how = How(name or static_attribute(step, "__name__", "step"), run, check, repeat, say, show, prepare)
    requests = _requests(among, devices, meshes, vary, options, said)
    searching = Searching(step, requests, how, hardware, budget=budget, compile=not plan_only)
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
    placed = {name: options[name] for name in PLACED if name in options}
    common = {name: value for name, value in options.items() if name not in PLACED and value is not None}
    return Requests(_words(strategies), mesh, meshes, vary or {}, common, placed, keep_going, said)


def _words(strategies: str | Sequence[str]) -> Sequence[str]:
    if isinstance(strategies, str):
        return [word.strip() for word in strategies.split(",") if word.strip()]
    return strategies


def _devices(mesh: Mesh | str | None) -> Mesh:
    """The mesh whose devices all candidates are on."""
    return automatic(given_or(mesh, lambda: default_mesh("dp").mesh))
