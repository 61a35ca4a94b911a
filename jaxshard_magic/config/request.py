"""`Request`: a strategy on a mesh with its options, checked against each other."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from .. import hardware
from ..errors import ShardError, did_you_mean, one_of
from ..specs import find, parse_spec
from ..targets import target_of
from .options import DATA, GradientOptions, PipelineOptions, PositionOptions
from .pipeline_microbatches import pipeline_options
from .strategies import STRATEGIES
from .strategy_text import Part, batch_axes, parse_strategy, part_axes

SpecLike = PartitionSpec | str
Rules = Mapping[str, SpecLike] | Sequence[tuple[str, SpecLike]]


@dataclass(frozen=True)
class Request:
    """What is asked of a step. Made by `make_request`, which checks that its parts go together.

    Args:
        strategy: text such as `fsdp+tp@model`.
        mesh: of Auto axes, attached, simulated or of a target.
        specs: PartitionSpec by argument name.
        rules: (regular expression, PartitionSpec) by leaf path, the first that matches counts.
        gradients: microbatches, reduction, remat, precision, padding.
        pipeline: stages and schedule; None where the strategy has no `pp`.
        donate: give the step's own state to its next call; None for what the step's own jit says.
        check: compare the first call with the plain step.
        chip: key of the chip whose time is predicted; None for the mesh's own.
        name: the step's name in what is shown; None for the function's.
        attention: how attention gets at positions that other devices hold, one of `ATTENTION`; None for what is usual,
            "gather".
        data: on a mesh over several hosts "whole": all give the whole batch, or "per-host": each its own rows of it.
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
    def parts(self) -> tuple[Part, ...]:
        """The strategies of the sum."""
        return parse_strategy(self.strategy)

    @cached_property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes of each part, by its name."""
        return part_axes(self.parts, self.mesh, None if self.pipeline is None else self.pipeline.stages)

    @property
    def compiler_decides(self) -> bool:
        """Whether the strategy is `spmd`: the compiler propagates what the user placed."""
        return self.parts[0].name == "spmd"

    @property
    def per_device(self) -> bool:
        """Whether the strategy is `pmap`: the step is written for one device."""
        return self.parts[0].name == "pmap"

    @cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that examples are divided over; none where the compiler decides."""
        return () if self.compiler_decides else batch_axes(self.axes, self.mesh)

    @property
    def rings(self) -> bool:
        """Whether attention is to run as a ring: it has positions that are divided, over axes that do not divide its
        heads."""
        of_heads = self.axes.get("tp", ())
        return self.attention == "ring" and not {*self.axes.get("sp", ())} & {*of_heads}

    @property
    def shards(self) -> int:
        """In how many parts devices have the batch; 1 for a step written for one device, which has its part."""
        return 1 if self.per_device else prod(self.mesh.shape[axis] for axis in self.batch_axes)

    @property
    def stage_axis(self) -> str:
        """The mesh axis of the pipeline's stages."""
        assert self.pipeline is not None, f"{self.strategy} is no pipeline"
        return self.axes["pp"][0]

    @property
    def options(self) -> dict[str, Any]:
        """The options that differ from the defaults, by name, as plain data for a report."""
        placed: dict[str, Any] = {
            "specs": {name: _text(spec) for name, spec in self.specs.items()},
            "rules": {pattern: _text(spec) for pattern, spec in self.rules},
            "donate": self.donate,
            "attention": self.attention,
            "check": self.check or None,
            "on": self.chip,
            "data": None if self.data == "whole" else self.data,
        }
        placed = {name: value for name, value in placed.items() if value not in (None, {})}
        return placed | self.gradients.given | (self.pipeline.given if self.pipeline else {})

    def on_rank(self, mesh: Mesh) -> "Request":
        """What a rank of the pipeline is asked: the whole step, on the rank's own `mesh`, its batch in one part."""
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
        """The same request with another strategy, mesh, donation, attention or options of gradients, by name; the
        options of a pipeline, and that of divided positions, stay where the strategy still has them. Raises
        `ShardError` as `make_request` does."""
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
            mesh=self.mesh if mesh is None else automatic(mesh),
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
    """Check and put together what is asked of a step; the mesh's axes become Auto ones.

    Args:
        specs, rules: PartitionSpecs or their text.
        on: a chip by any of its names.
        options: the other fields of `Request`, of `GradientOptions` and of `PipelineOptions`, by name; None where
            nothing is said.

    Raises `ShardError` for a strategy, a spec's text or an option's value that is none, for options that do not go
    together, and for a mesh without the axes that the strategy needs.
    """
    gradients, pipeline = step_options(strategy, options)
    if on is not None and (target := target_of(mesh)) is not None:
        raise ShardError(f"on={on!r}: the mesh names the chip, {target.name}. Leave on out")
    in_groups = {*GradientOptions.names(), *PipelineOptions.names()}
    pairs = rules.items() if isinstance(rules, Mapping) else rules or ()
    request = Request(
        strategy,
        automatic(mesh),
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
    """Refuse a word for the data that is none, and over several hosts what works on one alone."""
    if request.data not in DATA:
        raise ShardError(
            f"--data takes {one_of(DATA)}, not {request.data!r}.{did_you_mean(request.data, DATA)}"
        )
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
    """Refuse a pipeline whose stages are parts of a slice that its compiler takes no programs for."""
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
    """The options of the gradients and of the pipeline among `options`, by name; None where nothing is said.

    Raises `ShardError` for a strategy or values that are none, and for options that do not go together.
    """
    names = [part.name for part in parse_strategy(strategy)]
    _check_attention(names, options.get("attention"))
    of_gradients = {
        name: value for name in GradientOptions.names() if (value := options.get(name)) is not None
    }
    if "remat" in of_gradients:
        of_gradients["remat"] = str(of_gradients["remat"])
    gradients = GradientOptions(**of_gradients)
    given = {name: options.get(name) for name in PipelineOptions.names()}
    return gradients, pipeline_options(names, given, gradients, options.get("microbatches"))


def _check_attention(names: Sequence[str], attention: str | None) -> None:
    """Refuse a form of attention that is none, and any where the strategy, the sum of `names`, divides no positions."""
    PositionOptions(attention)
    if attention is not None and "sp" not in names:
        strategy = "+".join((*(name for name in names if not STRATEGIES[name].alone), "sp"))
        raise ShardError(
            f"--attention {attention} says how attention reads divided positions, and {'+'.join(names)} divides none; "
            f"leave it out, or write %%shard {strategy} --attention {attention}",
            fix=f"%%shard {strategy} --attention {attention}",
        )


def automatic(mesh: Mesh) -> Mesh:
    """The same devices with axes that the compiler may use: Explicit ones, which `jax.make_mesh` may give by default,
    fail on steps without annotations."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return mesh if mesh.axis_types == types else Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def _spec(given: SpecLike) -> PartitionSpec:
    return parse_spec(given) if isinstance(given, str) else given


def _rule(pattern: str, spec: SpecLike) -> tuple[str, PartitionSpec]:
    find(pattern)  # refuses what is no regular expression
    return pattern, _spec(spec)


def _text(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"
