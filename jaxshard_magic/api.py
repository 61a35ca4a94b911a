"""Functions of the magics for scripts: `mesh`, `shard`, `compare`, `choose`, `layout`, `show`, `doctor`.

The magics call nothing else.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, Mesh

from .analysis.array_report import report_arrays
from .compiler_log import capture_messages
from .config.mesh import BuiltMesh, MeshSpec, axes_text, build, default_spec
from .config.options import FLAGS
from .config.request import Rules, SpecLike, make_request, step_options, with_auto_axes
from .config.strategies import COMPARED, SEARCHED_STRATEGIES
from .config.strategy_text import jobs_of, parse_strategy
from .doctor import Doctor, examine
from .errors import ShardError
from .introspect import static_attribute
from .report import Report
from .report.choice import Choice
from .report.comparison import Comparison
from .report.records import Displayable
from .search import (
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
from .step import ShardedStep
from .targets import compiler_of, target_of
from .temporary import run_in_context

if TYPE_CHECKING:
    from .hosts.cluster import Cluster


def mesh(text: str, *, namespaces: Sequence[MutableMapping[str, Any]] = ()) -> Any:
    """Build a mesh from text: devices in a grid with named axes.

    Args:
        text: Text as `%mesh` takes it: `"data=4 model=2"`; `"data=-1"` for all devices left; `"cpu:8 data=8"` for
            simulated devices; `"v5e:4x4 data=16"` for a TPU slice, or `"h100:8 data=8"` for GPUs, not attached. Sizes
            are numbers of devices. Programs for hardware that is not attached compile and do not run
            (`ShardedStep.prepare`). `"hosts:2 data=8"`, `"ssh:node1,node2 data=16"` and the like start hosts with
            ipyparallel, in 5 to 10 s.
        namespaces: Dicts whose arrays are moved when devices have to be simulated. Simulation restarts the CPU backend,
            once, in about a second.

    Returns:
        A `jax.sharding.Mesh`; for hosts a `jaxshard_magic.hosts.cluster.Cluster`: `run(text)` runs Python on all hosts
        and `close()` ends them. In a notebook, `%mesh` makes every cell run there.

    Raises:
        ShardError: The text is no mesh, or the devices can't form it.

    >>> mesh("cpu:8 data=4 model=2").shape["model"]
    2
    """
    spec = MeshSpec.parse(text)
    if spec.hosts is None:
        return build_mesh(text, namespaces=namespaces).mesh
    from .hosts.starting import start_with_mesh

    return start_with_mesh(spec.hosts, axes_text(spec.axes), spec.size)


def build_mesh(text: str, *, namespaces: Sequence[MutableMapping[str, Any]] = ()) -> BuiltMesh:
    """Build a mesh as `mesh` does, with the source of the devices and notes on simulated devices and moved arrays.

    Args:
        text: Mesh text without hosts.
        namespaces: Dicts whose arrays are moved.
    """
    return build(MeshSpec.parse(text), namespaces)


def get_ready(mesh: Mesh) -> None:
    """Start the compiler of a mesh whose devices are not attached, in the background."""
    if (target := target_of(mesh)) is not None:
        compiler_of(target).preload(target.topology())


@run_in_context(capture_messages)
def default_mesh(
    strategy: str, *, stages: int | None = None, namespaces: Sequence[MutableMapping[str, Any]] = ()
) -> BuiltMesh:
    """Build the default mesh of a strategy: all devices, or 8 simulated devices on a lone CPU.

    Args:
        strategy: Strategy.
        stages: Number of pipeline stages; None if open.
        namespaces: Dicts whose arrays are moved if devices are simulated.

    Raises:
        ShardError: More stages than devices.
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
    """Examine this machine: versions, devices, compilers, variables, and each mesh axis; each failure has a remedy.

    A small all-reduce with a time limit runs along each axis, in some seconds. With several hosts, the doctor also
    tells the hosts that answer, differences in versions and devices, hosts that can't reach each other, and the time of
    an all-reduce over all hosts. Under `jax.distributed` all processes must call this function.

    Args:
        mesh: A `jax.sharding.Mesh`, mesh text, the result of `mesh("hosts:2 data=8")`, or None for a mesh of all
            devices.

    Returns:
        A `Doctor` with `ok` and `findings`.

    Raises:
        ShardError: The text is no mesh, or the devices can't form it.

    >>> doctor("cpu:8 data=8").findings[0].name
    'python'
    """
    if mesh is not None and not isinstance(mesh, (Mesh, str)):
        from .hosts.health import examine_hosts

        return examine(None, host_findings=examine_hosts(mesh))
    try:
        mesh = _given_or(mesh, _all_devices)
    except RuntimeError:  # a backend does not start, as `examine` reports
        mesh = None
    return examine(mesh)


@run_in_context(capture_messages)
def _all_devices() -> Mesh:
    devices = jax.devices()
    return jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)


def _given_or(given: Mesh | str | None, default: Callable[[], Mesh]) -> Mesh:
    """Return the given mesh, or the mesh of a text; `default()` if None is given."""
    if given is None:
        return default()
    return build_mesh(given).mesh if isinstance(given, str) else given


def layout(x: Any, *, name: str = "") -> Report:
    """Report the layout of the arrays in `x` over their devices, whatever placed them.

    Nothing is moved, copied or read. On a mesh of D devices the cost is some microseconds for each array and device.

    Args:
        x: A `jax.Array`, any pytree of arrays, or an NNX object; `jax.ShapeDtypeStruct` with a sharding counts as well.
        name: Prefix of the paths.

    Raises:
        ShardError: No array in `x` is on a device.

    >>> import jax.numpy as jnp
    >>> layout({"w": jnp.ones((4, 2))}).leaves[0].bytes_per_device
    32
    """
    return report_arrays(x, name)


def show(x: Any, *, name: str = "") -> None:
    """Show the layout of the arrays in `x` over their devices: as the widget in a notebook, else as text.

    Args:
        x: As for `layout`; or a Report, a Comparison and the like, shown in their own form.
        name: Prefix of the paths.

    Raises:
        ShardError: No array in `x` is on a device.

    >>> import jax.numpy as jnp
    >>> show({"w": jnp.ones((4, 2))})  # doctest: +ELLIPSIS
    arrays   device=...
    """
    from .views.show import show_now

    show_now(x if isinstance(x, Displayable) else layout(x, name=name))


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
    attention: str | None = None,
    donate: bool | None = None,
    check: bool = False,
    on: str | None = None,
    name: str | None = None,
    data: str = "whole",
) -> ShardedStep:
    """Wrap a train step so that it runs sharded over a mesh under a strategy, with the same numbers.

    Wrapping is cheap. The first call for new shapes traces, plans and compiles the step; later calls place arrays that
    are not in place, and run.

    Args:
        step: Any train step: a plain, jitted or pmapped function of pytrees of arrays, of any shapes and dtypes, or a
            method.
        strategy: "dp", "fsdp", "tp", "sp", "ep", "pp", "pmap", "spmd", or a sum such as "fsdp+tp"; "fsdp@data" names
            the mesh axis.
        mesh: A `jax.sharding.Mesh`, mesh text as `mesh` takes it, or None for all devices.
        specs: PartitionSpec by argument name, as an object or as text: `{"batch": "P('data')"}`.
        rules: PartitionSpec by regular expression on a leaf's path: `{".*kernel": "P(None, 'model')"}`; takes
            precedence over the strategy.
        microbatches: Number of parts of the batch, taken one after the other with the gradients of the whole;
            activations take that share of the memory. Under "pp", the number of microbatches that stages work on, by
            default up to 4 per stage.
        reduce: Time of the sum over devices of the gradients of microbatches: "each" microbatch, "once" a step, or
            "once-gathered", with weights gathered once as well. Later sums send less and hold more.
        remat: Recomputation in the backward pass, for less memory and more FLOPs: a number of segments, a policy
            ("full", "dots", "offload"), or a regular expression for blocks and named values.
        precision: Dtype of products, "bf16", "fp16" or "f32"; parameters keep their dtype.
        reduce_dtype: Dtype in which devices sum gradients, "bf16", "fp16" or "f32"; by default float32 if `precision`
            is narrower.
        pad: Whether to add rows to a batch that does not divide over the devices, or into microbatches; numbers stay
            those of the real rows.
        stages: Under "pp", the number of stages; by default the size of the mesh's pipeline axis.
        schedule: Under "pp", the order in which stages work, a name in `jaxshard_magic.schedule.NAMES`; by default
            "1f1b".
        chunks: Under "pp", parts of the model for each stage's devices, if the schedule takes any number.
        balance: Under "pp", the quantity equal for all stages: "flops", or "measured" time, which runs each part once.
        cut: Under "pp", a regular expression for modules and scopes at which stages begin.
        attention: Under "sp", the form in which attention reads positions of other devices. "gather" gathers keys and
            values on every device; "heads" shards heads in place of positions; "ring" sends keys and values around;
            "auto" chooses by bytes and memory, and reports the reason. By default "gather".
        donate: Whether the step's own state of the previous call is donated to the next, which saves its memory; None
            for the choice of the step's own jit. Arrays of the caller are never donated.
        check: Whether to compare the first call with the plain step, which runs once on the same inputs; the report has
            the outcome.
        on: Chip to predict the step's time for, "v5e" or "h100"; memory is compared with the chip's.
        name: Name of the step in reports; by default the function's.
        data: On a mesh over several hosts: "whole" if every host passes the whole batch, which the hosts compare, and
            places its own rows; "per-host" if every host passes its own rows.

    Returns:
        A `ShardedStep`, called like the step.

    Raises:
        ShardError: At once for an impossible strategy, spec, option or mesh. Errors that depend on shapes are raised by
            the first call, before anything runs.

    >>> import jax, jax.numpy as jnp
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
    # Before other names are bound. The options among them are the rows of `config.options`.
    parameters = locals()
    if not callable(step):
        raise ShardError(f"shard() takes a function as the step, not {type(step).__name__}")
    options = {name: parameters[name] for name in FLAGS}
    # Before devices are simulated, which restarts the CPU backend.
    step_options(strategy, options)
    request = make_request(
        strategy,
        _given_or(mesh, lambda: default_mesh(strategy, stages=stages).mesh),
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
    return with_auto_axes(_given_or(mesh, lambda: default_mesh("dp").mesh))
