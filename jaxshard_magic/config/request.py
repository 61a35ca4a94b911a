"""`Request`: a strategy on a mesh with options, checked against each other.

A line of the magics, or options alone, also change a request (`apply_line`): `--microbatches 8`, `%%shard fsdp
--attention heads`, `%mesh v5e:8x8 data=64`.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from .. import hardware
from ..errors import ShardError, did_you_mean, list_names
from ..specs import compile_rule, format_spec, parse_assignment, parse_rule, parse_spec
from ..targets import target_of
from .mesh import MeshSpec
from .options import DATA, GradientOptions, PipelineOptions, PositionOptions
from .pipeline_microbatches import pipeline_options
from .strategies import STRATEGIES
from .strategy_text import StrategyPart, batch_axes, parse_strategy, part_axes

SpecLike = PartitionSpec | str
Rules = Mapping[str, SpecLike] | Sequence[tuple[str, SpecLike]]
_LINES = ("%%shard ", "%mesh ", "--")


@dataclass(frozen=True)
class Request:
    """Checked request for a sharded step; made by `make_request`.

    Attributes:
        strategy: Text such as `fsdp+tp@model`.
        mesh: Mesh of Auto axes: attached, simulated or of a target.
        specs: PartitionSpec by argument name.
        rules: (regular expression, PartitionSpec) by leaf path; the first match counts.
        gradients: Microbatches, reduction, remat, precision, padding.
        pipeline: Stages and schedule; None if the strategy has no `pp`.
        donate: Whether the step's own state is donated to the next call; None for the choice of the step's own jit.
        check: Whether the first call is compared with the plain step.
        chip: Key of the chip to predict the time for; None for the mesh's own.
        name: Name of the step for display; None for the function's.
        attention: Form in which attention reads positions of other devices: "gather", "heads", "ring" or "auto"; None
            for the usual form, "gather".
        data: On a mesh over several hosts "whole" if every host passes the whole batch, "per-host" if each passes only
            the host's rows.
    """

    strategy: str
    mesh: Mesh
    specs: Mapping[str, PartitionSpec] = field(default_factory=dict)
    rules: tuple[tuple[str, PartitionSpec], ...] = ()
    gradients: GradientOptions = field(default_factory=GradientOptions)
    pipeline: PipelineOptions | None = None
    donate: bool | None = None
    check: bool = False
    chip: str | None = None
    name: str | None = None
    attention: str | None = None
    data: str = "whole"

    @cached_property
    def parts(self) -> tuple[StrategyPart, ...]:
        """Strategies of the sum."""
        return parse_strategy(self.strategy)

    @cached_property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """Mesh axes of each part, by name."""
        return part_axes(self.parts, self.mesh, None if self.pipeline is None else self.pipeline.stages)

    @property
    def compiler_decides(self) -> bool:
        """True for `spmd`: the compiler propagates shardings from the user's arrays."""
        return self.parts[0].name == "spmd"

    @property
    def per_device(self) -> bool:
        """True for `pmap`: the step is written for one device."""
        return self.parts[0].name == "pmap"

    @cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes that examples are sharded over; empty if the compiler decides."""
        return () if self.compiler_decides else batch_axes(self.axes, self.mesh)

    @property
    def rings(self) -> bool:
        """True if attention runs as a ring: positions are sharded, over axes that shard no heads."""
        of_heads = self.axes.get("tp", ())
        return self.attention == "ring" and not {*self.axes.get("sp", ())} & {*of_heads}

    @property
    def shards(self) -> int:
        """Number of shards of the batch; 1 for a step written for one device, which receives a shard."""
        return 1 if self.per_device else prod(self.mesh.shape[axis] for axis in self.batch_axes)

    @property
    def stage_axis(self) -> str:
        """Mesh axis of the pipeline's stages."""
        assert self.pipeline is not None, f"{self.strategy} is no pipeline"
        return self.axes["pp"][0]

    @property
    def options(self) -> dict[str, Any]:
        """Options different from the defaults, by name, as plain data for a report."""
        placed: dict[str, Any] = {
            "specs": {name: format_spec(spec) for name, spec in self.specs.items()},
            "rules": {pattern: format_spec(spec) for pattern, spec in self.rules},
            "donate": self.donate,
            "attention": self.attention,
            "check": self.check or None,
            "on": self.chip,
            "data": None if self.data == "whole" else self.data,
        }
        placed = {name: value for name, value in placed.items() if value not in (None, {})}
        return placed | self.gradients.given | (self.pipeline.given if self.pipeline else {})

    def on_rank(self, mesh: Mesh) -> "Request":
        """Return the request for one rank of the pipeline: the whole step on the rank's `mesh`, with the batch in one
        part."""
        assert self.pipeline is not None
        whole = replace(self.gradients, microbatches=1)
        return replace(self, mesh=mesh, gradients=whole, pipeline=replace(self.pipeline, stages=None))

    def changed(
        self,
        strategy: str | None = None,
        mesh: Mesh | None = None,
        *,
        donate: bool | None = None,
        attention: str | None = None,
        **options: Any,
    ) -> "Request":
        """Return the request with some changes.

        Options of a pipeline and of sharded positions stay if the strategy still has them.

        Args:
            strategy: New strategy; None to keep.
            mesh: New mesh; None to keep.
            donate: New donation; None to keep.
            attention: New form of attention; None to keep.
            options: Gradient and pipeline options by name.

        Raises:
            ShardError: As for `make_request`.
        """
        strategy = strategy or self.strategy
        names = [part.name for part in parse_strategy(strategy)]
        piped = self.pipeline is not None and "pp" in names
        attention = attention or (self.attention if "sp" in names else None)
        _check_attention(names, attention)
        kept = self.gradients.given | (self.pipeline.given if self.pipeline and piped else {})
        gradients, pipeline = step_options(strategy, kept | options)
        other = replace(
            self,
            strategy=strategy,
            mesh=self.mesh if mesh is None else with_auto_axes(mesh),
            gradients=gradients,
            pipeline=pipeline,
            donate=self.donate if donate is None else donate,
            attention=attention,
        )
        _ = other.axes  # refuses a mesh without the axes of the strategy
        _stages_have_programs(other)
        return other


def make_request(
    strategy: str,
    mesh: Mesh,
    *,
    specs: Mapping[str, SpecLike] | None = None,
    rules: Rules | None = None,
    on: str | None = None,
    **options: Any,
) -> Request:
    """Check and combine the options of a sharded step; the mesh's axes become Auto axes.

    Args:
        strategy: Text such as `fsdp+tp@model`.
        mesh: Mesh with the devices.
        specs: PartitionSpecs, or their text, by argument name.
        rules: PartitionSpecs, or their text, by regular expression.
        on: Chip to predict for, by any name.
        options: Other fields of `Request`, `GradientOptions` and `PipelineOptions` by name; None if not given.

    Raises:
        ShardError: Unknown strategy, invalid spec or value, options that exclude each other, or a mesh without the axes
            of the strategy.
    """
    gradients, pipeline = step_options(strategy, options)
    if on is not None and (target := target_of(mesh)) is not None:
        raise ShardError(f"on={on!r}: the mesh names the chip, {target.name}. Leave on out")
    in_groups = {*GradientOptions.names(), *PipelineOptions.names()}
    pairs = rules.items() if isinstance(rules, Mapping) else rules or ()
    request = Request(
        strategy,
        with_auto_axes(mesh),
        {name: _spec(spec) for name, spec in (specs or {}).items()},
        tuple(_rule(pattern, spec) for pattern, spec in pairs),
        gradients,
        pipeline,
        chip=None if on is None else hardware.chip(on).key,
        **{name: value for name, value in options.items() if name not in in_groups},
    )
    _over_hosts(request)
    _ = request.axes  # refuses a mesh without the axes of the strategy
    _stages_have_programs(request)
    return request


def _over_hosts(request: Request) -> None:
    """Raise ShardError for an unknown word for the data, and for options that don't work over several hosts."""
    if request.data not in DATA:
        raise ShardError(f"--data takes {list_names(DATA)}, not {request.data!r}.{did_you_mean(request.data, DATA)}")
    if target_of(request.mesh) is not None:
        return
    each = Counter(device.process_index for device in request.mesh.devices.flat)
    if len(each) == 1:
        return
    if len(each) < jax.process_count() or len(set(each.values())) > 1:
        has = [each[p] for p in range(jax.process_count())]
        raise ShardError(
            f"a mesh over hosts takes as many devices of each; this one takes {', '.join(map(str, has))} of the "
            f"{jax.process_count()} hosts. Use jaxshard_magic.mesh, or jax.make_mesh of all devices"
        )
    if request.pipeline is not None:
        raise ShardError(
            f"pp on {len(each)} hosts: a pipeline's stages work on the devices of one host. Over hosts dp, fsdp, tp, "
            "sp and their sums work"
        )


def _stages_have_programs(request: Request) -> None:
    """Raise ShardError for a pipeline on a slice whose compiler takes no programs for a part of the chips."""
    target = None if request.pipeline is None else target_of(request.mesh)
    if target is None or target.chip.whole_above is None or prod(target.extent) <= target.chip.whole_above:
        return
    each = request.mesh.size // request.mesh.shape[request.stage_axis]
    if 1 < each < request.mesh.size:
        raise ShardError(
            f"pp on {target.name}: a stage would have {each} of its {request.mesh.size} devices, and on more than "
            f"{target.chip.whole_above} chips the compiler of {target.chip.name} takes programs for all of them or for "
            f"one; use {target.chip.key}:{target.chip.whole_above} or fewer chips, or a strategy without pp"
        )


def step_options(strategy: str, options: Mapping[str, Any]) -> tuple[GradientOptions, PipelineOptions | None]:
    """Return the gradient options and the pipeline options among `options`.

    Args:
        strategy: Text such as `fsdp+tp@model`.
        options: Values by name; None if not given.

    Raises:
        ShardError: Unknown strategy, invalid value, or options that exclude each other.
    """
    names = [part.name for part in parse_strategy(strategy)]
    _check_attention(names, options.get("attention"))
    of_gradients = {name: value for name in GradientOptions.names() if (value := options.get(name)) is not None}
    # A number of segments is an int in Python and text on a line.
    if "remat" in of_gradients:
        of_gradients["remat"] = str(of_gradients["remat"])
    gradients = GradientOptions(**of_gradients)
    given = {name: options.get(name) for name in PipelineOptions.names()}
    return gradients, pipeline_options(names, given, gradients, options.get("microbatches"))


def _check_attention(names: Sequence[str], attention: str | None) -> None:
    """Raise ShardError for an unknown form of attention, and for any form if the strategy shards no positions."""
    PositionOptions(attention)
    if attention is not None and "sp" not in names:
        strategy = "+".join((*(name for name in names if not STRATEGIES[name].alone), "sp"))
        raise ShardError(
            f"--attention {attention} says how attention reads divided positions, and {'+'.join(names)} divides none; "
            f"leave it out, or write %%shard {strategy} --attention {attention}",
            fix=f"%%shard {strategy} --attention {attention}",
        )


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Return the mesh with Auto axes."""
    # Explicit axes, which `jax.make_mesh` may give by default, fail on steps without annotations.
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return mesh if mesh.axis_types == types else Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def _spec(given: SpecLike) -> PartitionSpec:
    return parse_spec(given) if isinstance(given, str) else given


def _rule(pattern: str, spec: SpecLike) -> tuple[str, PartitionSpec]:
    compile_rule(pattern)  # raises for an invalid regular expression
    return pattern, _spec(spec)


def is_line(text: str) -> bool:
    """Return whether a text is a line of the magics, or options for one; else the text is code."""
    return text.startswith(_LINES) and "\n" not in text


def apply_line(line: str, request: Request, mesh_of: Callable[[str], Mesh] | None = None) -> Request:
    """Return `request` with the changes of a line.

    Args:
        line: Options, a `%%shard` line with options, or a `%mesh` line.
        request: Request so far.
        mesh_of: Makes a mesh from mesh text; by default of the same devices, or of the first of them if fewer are
            needed.

    Raises:
        ShardError: The strategy or the mesh doesn't allow the change.
    """
    make_mesh = mesh_of or (lambda text: _on_same_devices(request.mesh, text))
    if line.startswith("%mesh "):
        return request.changed(mesh=make_mesh(line.removeprefix("%mesh ")))
    words, given = shlex.split(line.removeprefix("%%shard ")), dict[str, Any]()
    strategy = words.pop(0) if words and not words[0].startswith("--") else None
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        text = words.pop(0) if words and not words[0].startswith("--") else True
        given[name] = int(text) if isinstance(text, str) and text.isdecimal() else text
    if "mesh" in given:
        given["mesh"] = make_mesh(given["mesh"])
    specs, rules = request.specs, request.rules
    if "spec" in given:
        name, spec = parse_assignment(given.pop("spec"))
        specs = {**specs, name: spec}
    if "rule" in given:
        rule = parse_rule(given.pop("rule"))
        rules = rules if rule in rules else (rule, *rules)
    return replace(request, specs=specs, rules=rules).changed(strategy, **given)


def _on_same_devices(mesh: Mesh, text: str) -> Mesh:
    """Return a mesh of the first devices of `mesh`, with the axes of a text."""
    axes = MeshSpec.parse(text).resolve(mesh.size)
    names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    if prod(sizes) > mesh.size:
        raise ShardError(f"mesh {text} takes {prod(sizes)} devices, and there are {mesh.size}")
    devices = mesh.devices.reshape(-1)[: prod(sizes)].reshape(sizes)
    return Mesh(devices, names, axis_types=(mesh.axis_types[0],) * len(names))
