"""What an automatic choice searches: strategies on every mesh of the devices, and the options that save memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from jax.sharding import Mesh

from ..analysis.memory import room
from ..analysis.mesh_info import in_nodes, info_of
from ..config.strategy_text import parse_strategy
from ..errors import ShardError
from ..hardware import Chip, chip, chip_of
from ..targets import target_of
from .candidates import Candidate, Refused, Requests, candidate_of, candidates, line_of
from .meshes import EVERY, text_of

AMONG = (
    *("dp", "fsdp", "tp", "dp+fsdp", "dp+tp", "fsdp+tp", "dp+sp", "fsdp+sp", "fsdp+tp+sp"),
    *("pp", "pp+dp", "pp+fsdp", "pp+fsdp+tp"),
)
OF_EXPERTS = ("ep", "ep+dp", "ep+fsdp", "ep+tp", "ep+fsdp+tp")  # searched as well where a step has experts
STAND_IN = "v5e"  # the chip that is predicted for where simulated devices are of none
MOST = 256  # strategies on meshes of one search
STAGES = 32  # of a pipeline at most: few models have more layers than two to a stage
ATTENTION = ("heads", "ring")  # forms of it over divided positions, beside the usual one
SAVING: dict[str, tuple[Any, ...]] = {
    "microbatches": (None, 2, 4, 8, 16),
    "remat": (None, "dots", "full"),
}


def space(requests: Requests, most: int = MOST) -> list[Candidate | Refused]:
    """Every strategy on every mesh of these devices, with no option that saves memory unless `options` has it; what
    varies beside `SAVING` is searched like strategies.

    Raises `ShardError` for what `candidates` refuses, and for more than `most`, with what makes it less.
    """
    strategies, mesh = requests.strategies, requests.mesh
    for strategy in strategies:
        parse_strategy(strategy)
    others = {name: values for name, values in requests.vary.items() if name not in SAVING}
    every = replace(requests, meshes=requests.meshes or EVERY, vary=others, keep_going=False)
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
    """What a search predicts for.

    Args:
        chip: whose figures tell what a step takes at least.
        known: whether it is the one that runs the step.
        limit: bytes that a device has room for; None where that is not known.
        runs: whether it is attached, so that times can be measured.
        on: the chip's key, where the mesh does not name it.
    """

    chip: Chip
    known: bool
    limit: int | None
    runs: bool
    on: str | None = None


def chip_for(mesh: Mesh, on: str | None) -> str | None:
    """The chip in the place of this mesh's devices: `on`, else `STAND_IN` for simulated ones, which measure none."""
    simulated = target_of(mesh) is None and mesh.devices.flat[0].platform == "cpu"
    return STAND_IN if on is None and simulated else on


def hardware_for(mesh: Mesh, on: str | None) -> Hardware:
    """What a search on this mesh predicts for; `on`: the chip in the place of simulated devices, else `STAND_IN`.

    Raises ShardError for a chip that is none, and for one beside a mesh that has its own.
    """
    target, device = target_of(mesh), mesh.devices.flat[0]
    if target is None and device.platform == "cpu":
        stand_in = in_nodes(chip(on or STAND_IN), info_of(mesh))
        return Hardware(stand_in, True, room(mesh, stand_in), runs=False, on=stand_in.key)
    if on is not None:
        named = device.device_kind if target is None else target.name
        raise ShardError(f"on={on!r}: the mesh names the chip, {named}. Leave on out")
    if target is not None:
        return Hardware(target.chip, True, room(mesh, target.chip), runs=False)
    attached = chip_of(device.device_kind)
    like = in_nodes(attached or chip("h100" if device.platform == "gpu" else STAND_IN), info_of(mesh))
    return Hardware(like, attached is not None, room(mesh, None), runs=True)


def is_pipeline(candidate: Candidate | Refused) -> bool:
    return any(part.name == "pp" for part in parse_strategy(candidate.strategy))


def _long(each: Candidate | Refused) -> bool:
    return each.axes.get("pipe", 1) > STAGES


def attending(of: Candidate, requests: Requests) -> Iterator[Candidate | Refused]:
    """The same with the other forms of attention over divided positions, where nobody has said which; none over the
    axes of tensor parallelism, where heads are divided as they are."""
    axes = of.request.axes
    said = "attention" in requests.vary or of.options.get("attention") is not None
    if said or {*axes.get("sp", ())} <= {*axes.get("tp", ())}:
        return
    for form in ATTENTION:
        yield candidate_of(
            of.strategy, requests, tuple(of.mesh.shape.items()), {**of.options, "attention": form}
        )


def saving(of: Candidate, own: float, sent: float, requests: Requests) -> Iterator[Candidate | Refused]:
    """The same strategy and mesh with the options that take less memory, those first that are likely to cost least of a
    step that takes `own` seconds in products and `sent` on the links.

    What varies says their values, and what all have stays. A pipeline takes its microbatches as it does.
    """
    vary, common = requests.vary, requests.options
    values = {
        name: (common[name],) if common.get(name) is not None else tuple(vary.get(name, usual))
        for name, usual in SAVING.items()
        if not (is_pipeline(of) and name == "microbatches" and name not in vary)
    }

    def cost(rung: Mapping[str, Any]) -> float:
        """Each microbatch gathers weights and adds up gradients anew; a forward pass is a third of a step."""
        again = {None: 0.0, "dots": 0.05}.get(rung.get("remat"), 0.33)
        return own * (1 + again) + sent * (1 + 0.7 * ((rung.get("microbatches") or 1) - 1))

    rungs = [dict(zip(values, row, strict=True)) for row in product(*values.values())]
    for rung in sorted(rungs, key=cost):
        more = {name: value for name, value in rung.items() if value is not None}
        options = {**of.options, **more}
        if options == dict(of.options):
            continue
        line = line_of(of.strategy, text_of(of.mesh), options, requests.said)
        try:
            yield Candidate(of.request.changed(**more), options, line)
        except ShardError as error:
            yield Refused(of.strategy, of.axes, options, line, str(error), error.fix)
