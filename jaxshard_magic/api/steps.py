"""Shard a step under one strategy, and show the layout of existing arrays."""

from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from ..analysis.array_report import report_arrays
from ..config.options import FLAGS
from ..config.request import Rules, SpecLike, make_request, step_options
from ..errors import ShardError
from ..report import Report
from ..report.records import Displayable
from ..step import ShardedStep
from .meshes import default_mesh, given_or


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
    from ..views.show import show_now

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
        given_or(mesh, lambda: default_mesh(strategy, stages=stages).mesh),
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
