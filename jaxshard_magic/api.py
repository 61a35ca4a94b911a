"""`mesh`, `shard`, `compare`, `choose`, `layout`, `show`, `doctor`: the jobs of the magics, for scripts. The magics
call nothing else."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, Mesh

from .analysis.placed import placed
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
    chip_for,
    hardware_for,
    said_of,
)
from .compiler_log import captured
from .doctor import Doctor, examine
from .errors import ShardError
from .mesh import BuiltMesh, MeshSpec, build, default_spec
from .mesh_text import axes_text
from .report import Report
from .report.choice import Choice
from .report.comparison import Comparison
from .report.written import Shown
from .request import automatic, jobs_of, make_request, parse_strategy, step_options
from .request.request import Rules, SpecLike
from .step import ShardedStep
from .targets import compiler_of, target_of

if TYPE_CHECKING:
    from .hosts.cluster import Cluster


def mesh(text: str, *, namespaces: Sequence[MutableMapping[str, Any]] = ()) -> Any:
    """Build the mesh that a text describes: devices in a grid whose axes have names.

    Args:
        text: what `%mesh` takes: `"data=4 model=2"`; `"data=-1"` for as many devices as are left; `"cpu:8 data=8"` for
            simulated ones; `"v5e:4x4 data=16"` for a TPU slice, or `"h100:8 data=8"` for GPUs, that are not attached.
            Sizes are numbers of devices. A mesh of what is not attached compiles and does not run
            (`ShardedStep.prepare`). `"hosts:2 data=8"`, `"ssh:node1,node2 data=16"` and the like start hosts, with
            ipyparallel: 5 to 10 s.
        namespaces: dicts whose arrays are moved along where devices have to be simulated, which restarts the CPU
            backend: a second or so, and once.

    Returns:
        A `jax.sharding.Mesh`; of hosts a `jaxshard_magic.hosts.cluster.Cluster`, whose `run(text)` runs Python on all
        of them and `close()` ends them. In a notebook `%mesh` has every cell run there.

    Raises:
        ShardError: for text that is no mesh, and for one that these devices cannot make.

    >>> mesh("cpu:8 data=4 model=2").shape["model"]
    2
    """
    spec = MeshSpec.parse(text)
    if spec.hosts is None:
        return build_mesh(text, namespaces=namespaces).mesh
    from .hosts.starting import opened

    return opened(spec.hosts, axes_text(spec.axes), spec.size)


def build_mesh(text: str, *, namespaces: Sequence[MutableMapping[str, Any]] = ()) -> BuiltMesh:
    """As `mesh`, with where its devices come from and notes to show: what was simulated, what was moved."""
    return build(MeshSpec.parse(text), namespaces)


def get_ready(mesh: Mesh) -> None:
    """Start the compiler of a mesh whose devices are not attached, while there is something else to do."""
    if (target := target_of(mesh)) is not None:
        compiler_of(target).ready(target.topology())


@captured()
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


def doctor(mesh: "Mesh | Cluster | str | None" = None) -> Doctor:
    """Examine this machine: versions, devices, compilers, variables, and the mesh axis by axis, each failure with its
    remedy.

    It takes seconds: a small all-reduce runs along each axis of the mesh, with a time limit. Of several hosts it tells
    also which answer, whether their versions and devices are alike, whether each reaches every other one, and what an
    all-reduce over all of them takes. Under `jax.distributed` all processes call it together.

    Args:
        mesh: a `jax.sharding.Mesh`, mesh text, the hosts that `mesh("hosts:2 data=8")` gave, or None for a mesh of all
            devices.

    Returns:
        A `Doctor`: `ok`, and its `findings`.

    Raises:
        ShardError: for text that is no mesh, and for one that these devices cannot make.

    >>> doctor("cpu:8 data=8").findings[0].name
    'python'
    """
    if mesh is not None and not isinstance(mesh, (Mesh, str)):
        from .hosts.health import examined

        return examine(None, hosts=examined(mesh))
    try:
        mesh = _mesh(mesh, _all_devices)
    except RuntimeError:  # a backend does not start, which `examine` tells
        mesh = None
    return examine(mesh)


@captured()
def _all_devices() -> Mesh:
    devices = jax.devices()
    return jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)


def _mesh(given: Mesh | str | None, default: Callable[[], Mesh]) -> Mesh:
    """The mesh that was given, or that its text describes; `default()` where none was."""
    if given is None:
        return default()
    return build_mesh(given).mesh if isinstance(given, str) else given


def layout(x: Any, *, name: str = "") -> Report:
    """How the arrays in `x` lie on their devices, whatever laid them out, as a Report of layouts alone.

    Nothing is moved, copied or read. On a mesh of D devices it costs some microseconds for each array and device.

    Args:
        x: a `jax.Array`, any pytree of them, or an NNX object; `jax.ShapeDtypeStruct` with a sharding counts as well.
        name: what the paths begin with.

    Raises `ShardError` where no array in it lies on a device.

    >>> import jax.numpy as jnp
    >>> layout({"w": jnp.ones((4, 2))}).leaves[0].bytes_per_device
    32
    """
    return placed(x, name)


def show(x: Any, *, name: str = "") -> None:
    """Show how the arrays in `x` lie on their devices: in a notebook as the widget, elsewhere as text.

    Args:
        x: as for `layout`; or a Report, a Comparison and the like, which are shown as they show themselves.
        name: what the paths begin with.

    Raises `ShardError` where no array in it lies on a device.

    >>> import jax.numpy as jnp
    >>> show({"w": jnp.ones((4, 2))})  # doctest: +ELLIPSIS
    arrays   device=...
    """
    from .views.show import show_now

    show_now(x if isinstance(x, Shown) else layout(x, name=name))


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
    data: str = "whole",
) -> ShardedStep:
    """Wrap a train step so that it runs sharded over a mesh under a strategy, with the same numbers.

    Wrapping is cheap. The first call for new shapes traces the step, plans and compiles; later ones place what is not
    in place, and run.

    Args:
        step: any train step: a plain, jitted or pmapped function of pytrees of arrays, of any shapes and dtypes, or a
            method.
        strategy: "dp", "fsdp", "tp", "sp", "ep", "pp", "pmap", "spmd", or a sum such as "fsdp+tp"; "fsdp@data" names
            the mesh axis.
        mesh: a `jax.sharding.Mesh`, mesh text as `mesh` takes it, or None for all devices.
        specs: PartitionSpec by argument name, as an object or as text: `{"batch": "P('data')"}`.
        rules: PartitionSpec by regular expression on a leaf's path: `{".*kernel": "P(None, 'model')"}`; beats what the
            strategy infers.
        microbatches: take the batch in so many parts, one after the other, with the gradients of the whole: activations
            take that share of the memory. Of a pipeline: those that its stages work on, up to 4 for each stage unless
            said.
        reduce: when devices add up the gradients of microbatches: "each", "once" a step, or "once-gathered", which
            gathers weights once as well. The later, the less is sent and the more is held.
        remat: compute again what the backward pass needs, for less memory and more FLOPs: a number of segments, a
            policy ("full", "dots", "offload"), or a regular expression for blocks and named values.
        precision: products in "bf16", "fp16" or "f32"; parameters keep their dtype.
        reduce_dtype: the dtype in which devices add gradients up, one of the same three; float32 unless said where
            `precision` is narrower.
        pad: add rows to a batch that does not divide over the devices, or into its microbatches; numbers stay those of
            the real ones.
        stages: of "pp": how many; as many as the mesh's pipeline axis unless said.
        schedule: of "pp": the order in which stages work, one of `jaxshard_magic.schedule.NAMES`; "1f1b" unless said.
        chunks: of "pp": parts of the model for each stage's devices, where the schedule takes any number.
        balance: of "pp": stages of equal "flops", or of equal "measured" time, which runs each part once.
        cut: of "pp": a regular expression for the modules and scopes that stages begin at.
        donate: True gives the step's own state of the previous call to the next, which saves its memory; False never
            does; None does what the step's own jit says. Arrays of the caller's are never donated.
        check: compare the first call with the plain step, which runs once on the same inputs; the outcome is in the
            report.
        on: predict the step's time for this chip, "v5e" or "h100", and hold its memory against the chip's.
        name: of the step in its reports; the function's own unless said.
        data: on a mesh over several hosts "whole": each gives the whole batch, which they compare, and places its own
            rows; or "per-host": each gives its own rows.

    Returns:
        A `ShardedStep`, which is called as the step.

    Raises:
        ShardError: at once for a strategy, spec, option or mesh that cannot be. What depends on shapes is raised by the
            first call, before anything runs.

    >>> import jax.numpy as jnp
    >>> def train_step(weights, x):
    ...     loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
    ...     return weights - 0.1 * grads, loss
    >>> step = shard(train_step, "fsdp", mesh="cpu:8 data=8", check=True)
    >>> weights, loss = step(jnp.ones((512, 64)), jnp.ones((16, 512)))
    >>> tuple(weights.sharding.spec)
    ('data', None)
    >>> step.report().check.passed
    True
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
        data=data,
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

    >>> import jax.numpy as jnp
    >>> def train_step(weights, x):
    ...     return weights - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
    >>> shapes = jax.ShapeDtypeStruct((512, 64), "float32"), jax.ShapeDtypeStruct((16, 512), "float32")
    >>> found = compare(train_step, "dp,fsdp", shapes, mesh="cpu:8 data=8", on="v5e", run=False)
    >>> found.smallest.strategy
    'fsdp'
    """
    devices = _devices(mesh)
    how = How(name or getattr(step, "__name__", "step"), run, check, repeat, say, show, prepare)
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

    >>> import jax.numpy as jnp
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
    how = How(name or getattr(step, "__name__", "step"), run, check, repeat, say, show, prepare)
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
    return automatic(_mesh(mesh, lambda: default_mesh("dp").mesh))
