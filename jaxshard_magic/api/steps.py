"""One step under one strategy, and how arrays lie that are there."""

from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from ..analysis.placed import placed
from ..config.options import FLAGS
from ..config.request import Rules, SpecLike, make_request, step_options
from ..errors import ShardError
from ..report import Report
from ..report.written import Shown
from ..step import ShardedStep
from .meshes import default_mesh, given_or


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
    from ..views.show import show_now

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
    attention: str | None = None,
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
        attention: of "sp": how attention gets at positions that other devices hold. "gather" brings keys and values to
            every device; "heads" divides heads in the place of positions; "ring" sends keys and values round; "auto"
            chooses by bytes and memory, and says why. "gather" unless said.
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
    parameters = locals()  # read before any other name is bound; its options are the rows of `config.options`
    if not callable(step):
        raise ShardError(f"shard() takes a function as the step, not {type(step).__name__}")
    options = {name: parameters[name] for name in FLAGS}
    step_options(strategy, options)  # refused before devices are simulated for it
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
