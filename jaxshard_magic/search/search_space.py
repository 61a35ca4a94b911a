"""Search space of the automatic choice: strategies on every mesh of the devices, and options that save memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from jax.sharding import Mesh

from ..analysis.mesh_info import detect_mesh_info, with_node_size
from ..config.strategy_text import parse_strategy
from ..errors import ShardError
from ..hardware import Chip, chip, chip_of
from ..targets import target_of
from ..targets.device_memory import usable_bytes
from .candidates import Candidate, RefusedCandidate, Requests, candidate_of, candidates, line_of
from .meshes import ALL_MESHES, text_of

STAND_IN = "v5e"  # chip of the predictions for simulated devices
MOST = 256  # strategies times meshes of one search
STAGES = 32  # stages of a pipeline: few models have more than 64 layers, two for each stage
ATTENTION = ("heads", "ring")  # forms of attention over sharded positions, besides the default
MEMORY_OPTIONS: dict[str, tuple[Any, ...]] = {"microbatches": (None, 2, 4, 8, 16), "remat": (None, "dots", "full")}


def strategy_space(requests: Requests, most: int = MOST) -> list[Candidate | RefusedCandidate]:
    """Return every strategy on every mesh of the devices, without memory-saving options unless `options` has some.

    Varied options other than `MEMORY_OPTIONS` are searched like strategies.

    Args:
        requests: Request for all candidates.
        most: Largest number of candidates allowed.

    Raises:
        ShardError: As for `candidates`; or more than `most`, with ways to have fewer.
    """
    strategies, mesh = requests.strategies, requests.mesh
    for strategy in strategies:
        parse_strategy(strategy)
    others = {name: values for name, values in requests.vary.items() if name not in MEMORY_OPTIONS}
    every = replace(requests, meshes=requests.meshes or ALL_MESHES, vary=others, keep_going=False)
    # The limit is checked below, without long pipelines.
    families = [each for each in candidates(every, most=10**6) if not _long(each)]
    if len(families) > most:
        named = ",".join(strategies[:3])
        raise ShardError(
            f"{len(families)} candidates to search ({len(strategies)} strategies on every mesh of {mesh.size} devices"
            f"{''.join(f', {len(v)} of {k}' for k, v in others.items())}), and at most {most} are; name fewer "
            f'strategies (--among {named}), or meshes (--meshes "{text_of(mesh)}")'
        )
    return families


@dataclass(frozen=True)
class Hardware:
    """Hardware to predict for.

    Attributes:
        chip: Chip whose figures bound the step's time.
        known: Whether the chip is the one that runs the step.
        limit: Usable bytes of a device; None if unknown.
        runs: Whether the hardware is attached, so that times can be measured.
        on: Key of the chip if the mesh does not name a chip; None otherwise.
    """

    chip: Chip
    known: bool
    limit: int | None
    runs: bool
    on: str | None = None


def chip_for(mesh: Mesh, on: str | None) -> str | None:
    """Return the chip to predict for: `on`; `STAND_IN` for simulated devices, which measure no chip; else None."""
    simulated = target_of(mesh) is None and mesh.devices.flat[0].platform == "cpu"
    return STAND_IN if on is None and simulated else on


def hardware_for(mesh: Mesh, on: str | None) -> Hardware:
    """Return the hardware to predict for on a mesh.

    Args:
        mesh: Mesh with the devices.
        on: Chip in place of simulated devices; None for `STAND_IN`.

    Raises:
        ShardError: Unknown chip, or a chip given for a mesh with its own.
    """
    target, device = target_of(mesh), mesh.devices.flat[0]
    if target is None and device.platform == "cpu":
        stand_in = with_node_size(chip(on or STAND_IN), detect_mesh_info(mesh))
        return Hardware(stand_in, True, usable_bytes(mesh, stand_in), runs=False, on=stand_in.key)
    if on is not None:
        named = device.device_kind if target is None else target.name
        raise ShardError(f"on={on!r}: the mesh names the chip, {named}. Leave on out")
    if target is not None:
        return Hardware(target.chip, True, usable_bytes(mesh, target.chip), runs=False)
    # Figures of another chip only order the candidates of unknown hardware; they rule none out.
    attached = chip_of(device.device_kind)
    like = with_node_size(attached or chip("h100" if device.platform == "gpu" else STAND_IN), detect_mesh_info(mesh))
    return Hardware(like, attached is not None, usable_bytes(mesh, None), runs=True)


def is_pipeline(candidate: Candidate | RefusedCandidate) -> bool:
    """Return whether a candidate's strategy has a pipeline."""
    return any(part.name == "pp" for part in parse_strategy(candidate.strategy))


def _long(each: Candidate | RefusedCandidate) -> bool:
    """Return whether a candidate has more than `STAGES` stages."""
    return each.axes.get("pipe", 1) > STAGES


def attention_variants(of: Candidate, requests: Requests) -> Iterator[Candidate | RefusedCandidate]:
    """Yield the candidate with the other forms of attention over sharded positions.

    Nothing is yielded if the user named a form, or if tensor parallelism has the axes: heads are sharded then.

    Args:
        of: Candidate.
        requests: Request for all candidates.
    """
    axes = of.request.axes
    said = "attention" in requests.vary or of.options.get("attention") is not None
    if said or {*axes.get("sp", ())} <= {*axes.get("tp", ())}:
        return
    for form in ATTENTION:
        yield candidate_of(of.strategy, requests, tuple(of.mesh.shape.items()), {**of.options, "attention": form})


def memory_variants(
    of: Candidate, own: float, sent: float, requests: Requests
) -> Iterator[Candidate | RefusedCandidate]:
    """Yield the candidate with options that take less memory, the likely cheapest first.

    Values come from `requests.vary`, else from `MEMORY_OPTIONS`; options of all candidates stay. A pipeline keeps its
    microbatches unless varied.

    Args:
        of: Candidate.
        own: Seconds of a step in products.
        sent: Seconds of a step on the links.
        requests: Request for all candidates.
    """
    vary, common = requests.vary, requests.options
    values = {
        name: (common[name],) if common.get(name) is not None else tuple(vary.get(name, usual))
        for name, usual in MEMORY_OPTIONS.items()
        if not (is_pipeline(of) and name == "microbatches" and name not in vary)
    }

    def cost(rung: Mapping[str, Any]) -> float:
        """Return the predicted seconds of a step with the options."""
        # Full remat repeats the forward pass, a third of a step; each microbatch gathers weights and sums gradients
        # anew.
        again = {None: 0.0, "dots": 0.05}.get(rung.get("remat"), 0.33)
        return own * (1 + again) + sent * (1 + 0.7 * ((rung.get("microbatches") or 1) - 1))

    rungs = [dict(zip(values, row, strict=True)) for row in product(*values.values())]
    for rung in sorted(rungs, key=cost):
        more = {name: value for name, value in rung.items() if value is not None}
        options = {**of.options, **more}
        if options == dict(of.options):
            continue
        line = line_of(of.strategy, text_of(of.mesh), options, requests.fixed_line)
        try:
            yield Candidate(of.request.changed(**more), options, line)
        except ShardError as error:
            yield RefusedCandidate(of.strategy, of.axes, options, line, str(error), error.fix)
