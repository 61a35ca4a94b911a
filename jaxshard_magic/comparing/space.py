"""What an automatic choice searches: strategies on every mesh of the devices, and the options that save memory."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from jax.sharding import Mesh

from ..errors import ShardError
from ..hardware import Chip, chip, chip_of
from ..strategies import parse_strategy
from ..targets import target_of
from .candidates import Candidate, Refused, candidates, line_of
from .meshes import EVERY, text_of

AMONG = (
    *("dp", "fsdp", "tp", "dp+fsdp", "dp+tp", "fsdp+tp", "dp+sp", "fsdp+sp", "fsdp+tp+sp"),
    *("pp", "pp+dp", "pp+fsdp", "pp+fsdp+tp"),
)
STAND_IN = "v5e"  # the chip that a search predicts for where simulated devices are of none
MOST = 256  # strategies on meshes of one search
STAGES = 32  # of a pipeline at most: few models have more layers than two to a stage
SAVING: dict[str, tuple[Any, ...]] = {
    "microbatches": (None, 2, 4, 8, 16),
    "remat": (None, "dots", "full"),
}


def space(
    mesh: Mesh,
    strategies: Sequence[str],
    *,
    meshes: str | Sequence[str] | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    common: Mapping[str, Any] | None = None,
    most: int = MOST,
) -> list[Candidate | Refused]:
    """Every strategy on every mesh of these devices, with no option that saves memory unless `common` has it.

    `vary`: options other than `SAVING` are searched like strategies. Arguments as `candidates` takes them. Raises
    `ShardError` for what that refuses, and for more than `most`, with what makes it less.
    """
    for strategy in strategies:
        parse_strategy(strategy)
    others = {name: values for name, values in (vary or {}).items() if name not in SAVING}
    found = candidates(
        strategies, mesh, meshes=meshes or EVERY, vary=others, common=common, keep_going=False, most=10**6
    )
    found = [each for each in found if not _long(each)]
    if len(found) > most:
        named = ",".join(strategies[:3])
        raise ShardError(
            f"{len(found)} candidates to search ({len(strategies)} strategies on every mesh of {mesh.size} devices"
            f"{''.join(f', {len(v)} of {k}' for k, v in others.items())}), and at most {most} are; name fewer "
            f'strategies (--among {named}), or meshes (--meshes "{text_of(mesh)}")'
        )
    return found


def chip_for(mesh: Mesh, on: str | None) -> tuple[Chip, bool]:
    """The chip whose figures a search goes by, and whether it is the one that runs the step."""
    if on is not None:
        return chip(on), True
    if (target := target_of(mesh)) is not None:
        return target.chip, True
    device = mesh.devices.flat[0]
    found = chip_of(device.device_kind)
    return found or chip("h100" if device.platform == "gpu" else STAND_IN), found is not None


def is_pipeline(candidate: Candidate | Refused) -> bool:
    return any(part.name == "pp" for part in parse_strategy(candidate.strategy))


def _long(each: Candidate | Refused) -> bool:
    axes = each.axes if isinstance(each, Refused) else each.mesh.shape
    return axes.get("pipe", 1) > STAGES


def saving(
    of: Candidate,
    own: float,
    sent: float,
    vary: Mapping[str, Sequence[Any]],
    common: Mapping[str, Any],
) -> Iterator[Candidate]:
    """The same strategy and mesh with the options that take less memory, those first that are likely to cost least of a
    step that takes `own` seconds in products and `sent` on the links.

    `vary` says their values, and what `common` has stays. A pipeline takes its microbatches as it does.
    """
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
        options = {**of.options, **{name: value for name, value in rung.items() if value is not None}}
        if options != dict(of.options):
            line = line_of(of.strategy, text_of(of.mesh), options)
            yield Candidate(of.strategy, of.mesh, options, line)
