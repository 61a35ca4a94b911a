"""`mesh()`, `shard()`, `compare()`, `doctor()`: the jobs of the magics, for scripts. The magics call nothing else."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from .comparing import (
    AMONG,
    BUDGET,
    PLACED,
    USUAL,
    How,
    Requests,
    Searching,
    Trying,
    candidates,
    hardware_for,
)
from .doctor import Doctor, examine
from .errors import ShardError
from .mesh import BuiltMesh, MeshSpec, build, default_spec
from .report.choice import Choice
from .report.comparison import Comparison
from .request import automatic, jobs_of, make_request, parse_strategy, step_options
from .request.request import Rules, SpecLike
from .step import ShardedStep
from .targets import compiler_of, target_of


def mesh(text: str, *, namespaces: Sequence[MutableMapping[str, Any]] = ()) -> Mesh:
    """Build the mesh that `text` describes: `"data=4 model=2"`, `"data=-1"`, `"cpu:8 data=8"`, `"v5e:4x4 data=16"`.

    On CPU, devices are simulated when there are too few; arrays in `namespaces` are moved along. Of a TPU slice or
    of GPUs that are not attached, the mesh compiles and does not run (`ShardedStep.prepare`).
    Raises `ShardError` for text that is no mesh, or one that these devices cannot make.

    >>> mesh("cpu:8 data=4 model=2").shape["model"]
    2
    """
    return build_mesh(text, namespaces=namespaces).mesh


def build_mesh(text: str, *, namespaces: Sequence[MutableMapping[str, Any]] = ()) -> BuiltMesh:
    """As `mesh`, with where its devices come from and notes to show: what was simulated, what was moved."""
    return build(MeshSpec.parse(text), namespaces)


def get_ready(mesh: Mesh) -> None:
    """Start the compiler of a mesh whose devices are not attached, while there is something else to do."""
    if (target := target_of(mesh)) is not None:
        compiler_of(target).ready(target.topology())


def default_mesh(
    strategy: str, *, stages: int | None = None, namespaces: Sequence[MutableMapping[str, Any]] = ()
) -> BuiltMesh:
    """The mesh that `strategy` gets when none was named: all devices, or 8 simulated ones on a lone CPU.

    `stages`: those of its pipeline. Raises `ShardError` for more of them than there are devices.
    """
    jobs = jobs_of(parse_strategy(strategy)) or ("data",)
    count, platform = jax.device_count(), jax.default_backend()
    if stages is not None and stages > count and (platform, count) != ("cpu", 1):
        line = f"%mesh cpu:{stages} {default_spec(jobs, stages, platform, stages)}"
        raise ShardError(
            f"--stages {stages}: a stage takes at least one device, and there {'is' if count == 1 else 'are'} {count}. "
            f"Use --stages {count}{' or fewer' if count > 1 else ''}, or simulated devices: {line}",
            fix=line,
        )
    return build(default_spec(jobs, count, platform, stages), namespaces)


def doctor(mesh: Mesh | str | None = None) -> Doctor:
    """Examine this machine: versions, devices, compilers, variables, and the mesh axis by axis, each failure with its
    remedy.

    `mesh`: a `jax.sharding.Mesh`, mesh text, or None for a mesh of all devices. Raises `ShardError` for text that is
    no mesh, or one that these devices cannot make.
    """
    try:
        mesh = _mesh(mesh, _all_devices)
    except RuntimeError:  # a backend does not start, which `examine` tells
        mesh = None
    return examine(mesh)


def _all_devices() -> Mesh:
    devices = jax.devices()
    return jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)


def _mesh(given: Mesh | str | None, default: Callable[[], Mesh]) -> Mesh:
    """The mesh that was given, or that its text describes; `default()` where none was."""
    if given is None:
        return default()
    return build_mesh(given).mesh if isinstance(given, str) else given


def shard(
    step: Callable[..., Any],
    strategy: str,
    *,
    mesh: Mesh | str | None = None,
    specs: Mapping[str, SpecLike] | None = None,
    rules: Rules | None = None,
    microbatches: int | None = None,
    reduce: str = "each",
    remat: int | str | None = None,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    pad: bool = False,
    stages: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    balance: str | None = None,
    cut: str | None = None,
    donate: bool | None = None,
    check: bool = False,
    on: str | None = None,
    name: str | None = None,
) -> ShardedStep:
    """Wrap `step`, any train step, so that it runs sharded over `mesh` under `strategy`, with the same numbers.

    `strategy`: `dp`, `fsdp`, `tp`, `sp`, `pp`, `pmap`, `spmd` or a sum such as `fsdp+tp`; `fsdp@data` names the mesh
    axis. `mesh`: a `jax.sharding.Mesh`, mesh text, or None for all devices. `specs`: PartitionSpec by argument name
    (`{"batch": "P('data')"}`). `rules`: PartitionSpec by regular expression on a leaf's path.
    `microbatches`: take the batch in so many parts, one after the other, with the gradients of the whole; `reduce`:
    sum them over devices for "each", "once", or "once-gathered". `remat`: compute again what the backward pass needs:
    a number of segments, a policy ("full", "dots", "offload"), or a regular expression for blocks and named values.
    `precision`: products in "bf16", "fp16" or "f32"; parameters keep their type. `reduce_dtype`: the type in which
    devices add gradients up, one of these, by default float32 where `precision` is narrower. `pad`: add rows to a batch
    that does not divide over the devices, or into its microbatches; numbers stay those of the real ones.
    With `pp`, `microbatches` are those of the pipeline, by default up to 4 for each stage. `stages`: how many it has,
    by default as many as the mesh's pipeline axis; `schedule`: the order in which they work, by default "1f1b"
    (`jaxshard_magic.schedule.NAMES`); `chunks`: parts of the model for each stage's devices, where the schedule takes
    any number; `balance`: stages of equal "flops" or "measured" time; `cut`: a regular expression for the modules and
    scopes that stages begin at.
    `donate`: True gives the step's own state of the previous call to the next, False never does, None does what the
    step's own jit says.
    `check`: compare the first call against the plain step. `on`: predict the step's time for this chip ("v5e", "h100").

    Raises `ShardError` at once for a strategy, spec or mesh that cannot be; what depends on shapes is raised by the
    first call, before anything runs.
    """
    if not callable(step):
        raise ShardError(f"shard() takes a function as the step, not {type(step).__name__}")
    options: dict[str, Any] = {
        "microbatches": microbatches,
        "reduce": reduce,
        "remat": remat,
        "precision": precision,
        "reduce_dtype": reduce_dtype,
        "pad": pad,
        "stages": stages,
        "schedule": schedule,
        "chunks": chunks,
        "balance": balance,
        "cut": cut,
    }
    step_options(strategy, options)  # refused before devices are simulated for it
    request = make_request(
        strategy,
        _mesh(mesh, lambda: default_mesh(strategy, stages=stages).mesh),
        specs=specs,
        rules=rules,
        on=on,
        donate=donate,
        check=check,
        name=name,
        **options,
    )
    return ShardedStep(step, request)


def compare(
    step: Callable[..., Any],
    strategies: str | Sequence[str] = USUAL,
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
    shapes.

    Args:
        step: any train step.
        strategies: as `shard` takes them; one text, with commas between them.
        mesh: its devices are those that all take; a strategy takes the mesh as it is where that has an axis for each of
            its parts and none to spare.
        meshes: "all", or the axes of each mesh to try every strategy on, such as `["data=8", "data=4 model=2"]`.
        vary: values by the name of an option of `shard`: `{"microbatches": [1, 4], "remat": [None, "full"]}`.
        run: False compiles only.
        check: compare each with the plain step, which runs once.
        repeat: timed calls of each candidate; None for three, or fewer where they take more than a second together.
        keep_going: refuse strategies that are none alone, and try the others.
        name: of the step, in what is shown.
        say, show: are told what is being done, and given the comparison so far.
        prepare: is given each step before it is compiled.
        options: of `shard`, for all candidates; those of a pipeline for those that are one.

    Raises `ShardError` at once for what no candidate could be, and what the step itself raises under all of them.
    """
    devices = _devices(mesh)
    how = How(name or getattr(step, "__name__", "step"), run, check, repeat, say, show, prepare)
    requests = _requests(strategies, devices, meshes, vary, {"name": name} | options, keep_going)
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
        among: the strategies to search; one text, with commas between them.
        meshes: "all", which is also the default, or the axes of each mesh to search: `["data=8", "data=4 model=2"]`.
        vary: values by the name of an option of `shard`; microbatches and remat are tried where memory is short,
            others with every strategy.
        budget: seconds after which nothing more is tried; None for no limit.
        plan_only: compile nothing, and choose by what the plans take at least.
        run: False predicts on an attached accelerator, too.
        take: is given the step of the choice, as it was compiled, to go on with.
        on: the chip to predict for where the devices are simulated ones; a TPU v5e unless said.
        mesh, check, repeat, name, say, show, prepare, options: as `compare` takes them.

    Raises `ShardError` for a search of too many candidates and a budget that ends before anything has compiled; and
    what the step itself raises.
    """
    devices = _devices(mesh)
    hardware = hardware_for(devices, on)
    options |= {"name": name, "on": hardware.on}
    how = How(name or getattr(step, "__name__", "step"), run, check, repeat, say, show, prepare)
    requests = _requests(among, devices, meshes, vary, options)
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
    keep_going: bool = False,
) -> Requests:
    placed = {name: options[name] for name in PLACED if name in options}
    common = {name: value for name, value in options.items() if name not in PLACED and value is not None}
    return Requests(_words(strategies), mesh, meshes, vary or {}, common, placed, keep_going)


def _words(strategies: str | Sequence[str]) -> Sequence[str]:
    if isinstance(strategies, str):
        return [word.strip() for word in strategies.split(",") if word.strip()]
    return strategies


def _devices(mesh: Mesh | str | None) -> Mesh:
    """The mesh whose devices all candidates are on."""
    return automatic(_mesh(mesh, lambda: default_mesh("dp").mesh))
