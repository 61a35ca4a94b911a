"""What a comparison tries: strategies on the meshes that suit them, with each combination of the options that vary."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from jax.sharding import Mesh

from ..errors import ShardError, one_of
from ..mesh import Axes
from ..pipeline.options import asked_of
from ..strategies import Part, parse_strategy, part_axes
from .meshes import EVERY, reshaped, suited, text_of

USUAL = ("dp", "fsdp", "tp", "fsdp+tp", "pp")  # what is compared where no strategy is named
MOST = 64  # candidates of one comparison
VARIED = (
    "microbatches",
    "remat",
    "precision",
    "reduce",
    "reduce_dtype",
    "stages",
    "schedule",
    "chunks",
    "balance",
)
_PIPELINE = ("stages", "schedule", "chunks", "balance", "cut")
_COUNTS = ("microbatches", "stages", "chunks")


@dataclass(frozen=True)
class Candidate:
    """A strategy on a mesh. `options`: those of `api.shard` by name. `line`: what runs it alone, as it stands after
    `%%shard`."""

    strategy: str
    mesh: Mesh
    options: Mapping[str, Any]
    line: str


@dataclass(frozen=True)
class Refused:
    """One that can't be tried: why, and what would change that."""

    strategy: str
    axes: Mapping[str, int]
    options: Mapping[str, Any]
    line: str
    why: str
    fix: str | None = None


def candidates(
    strategies: Sequence[str],
    mesh: Mesh,
    *,
    meshes: str | Sequence[str] | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    common: Mapping[str, Any] | None = None,
    keep_going: bool = False,
    most: int = MOST,
) -> list[Candidate | Refused]:
    """Everything to try on the devices of `mesh`, each once, in the order given.

    Args:
        strategies: as `api.shard` takes them.
        mesh: each strategy takes it as it is where it has an axis for every part and none to spare; else a mesh of the
            same devices that has.
        meshes: "all" for every way to divide the devices over the axes of each strategy; or the axes of each mesh,
            `"data=4 model=2"`.
        vary: values by the name of an option; None among them leaves it out.
        common: options that all have; those of a pipeline are for strategies that have one.
        keep_going: a strategy that is none is refused alone, and the others are tried.

    Raises ShardError for a strategy that is none, for values that an option does not take, where there is nothing to
    try, and for more than `most` candidates, before anything is traced.
    """
    vary, common = dict(vary or {}), {k: v for k, v in (common or {}).items() if v is not None}
    for name in vary:
        if name not in VARIED:
            raise ShardError(f"--vary {name}=...: what varies is one of {one_of(VARIED)}")
    found: list[Candidate | Refused] = []
    for strategy in strategies:
        try:
            parts = parse_strategy(strategy)
        except ShardError as error:
            if not keep_going:
                more = " --keep-going compares the others" if len(strategies) > 1 else ""
                said = str(error)
                raise ShardError(
                    f"{said}{'' if said.endswith(('.', '?')) else '.'}{more}", fix=error.fix
                ) from None
            found.append(Refused(strategy, {}, {}, strategy, str(error), error.fix))
            continue
        found += _of(strategy, parts, mesh, meshes, vary, common)
    alone = {each.line: each for each in found}
    if not alone:
        raise ShardError(f"nothing to compare: name strategies, as in {','.join(USUAL)}")
    if len(alone) > most:
        raise ShardError(
            f"{len(alone)} candidates ({_counted(strategies, meshes, vary)}), and at most {most} are compared; name "
            "fewer strategies or meshes, or vary fewer values"
        )
    return list(alone.values())


def _of(
    strategy: str,
    parts: Sequence[Part],
    mesh: Mesh,
    meshes: str | Sequence[str] | None,
    vary: Mapping[str, Sequence[Any]],
    common: Mapping[str, Any],
) -> Iterator[Candidate | Refused]:
    piped = any(part.name == "pp" for part in parts)
    names = [name for name in vary if piped or name not in _PIPELINE]
    shared = {name: value for name, value in common.items() if piped or name not in _PIPELINE}
    for values in product(*(vary[name] for name in names)):
        varied = zip(names, values, strict=True)
        options = {name: value for name, value in (shared | dict(varied)).items() if value is not None}
        for axes in suited(parts, mesh, meshes, options.get("stages")):
            yield _candidate(strategy, parts, mesh, axes, options)


def _candidate(
    strategy: str, parts: Sequence[Part], mesh: Mesh, axes: Axes, options: Mapping[str, Any]
) -> Candidate | Refused:
    line = line_of(strategy, text_of(mesh, axes), options)
    try:
        asked_of([part.name for part in parts], **options)
        built = mesh if axes == tuple(mesh.shape.items()) else reshaped(mesh, axes)
        part_axes(tuple(parts), built, options.get("stages"))
    except ShardError as error:
        return Refused(strategy, dict(axes), options, line, str(error), error.fix)
    return Candidate(strategy, built, options, line)


def line_of(strategy: str, mesh: str, options: Mapping[str, Any]) -> str:
    """What stands after `%%shard` to run one.

    >>> line_of("fsdp", "data=8", {"reduce_dtype": "bf16", "pad": True})
    'fsdp --mesh "data=8" --reduce-dtype bf16 --pad'
    """
    words = [strategy, f'--mesh "{mesh}"']
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        words.append(option if value is True else f"{option} {value}")
    return " ".join(words)


def _counted(
    strategies: Sequence[str], meshes: str | Sequence[str] | None, vary: Mapping[str, Sequence[Any]]
) -> str:
    told = [f"{len(strategies)} strategies"]
    if meshes is not None:
        told.append("every mesh of them" if meshes == EVERY else f"{len(meshes)} meshes")
    return " x ".join([*told, *(f"{len(values)} of {name}" for name, values in vary.items())])


def varied(texts: Sequence[str]) -> dict[str, list[Any]]:
    """What `--vary microbatches=1,4,16` says, by the names of `api.shard`; `none` leaves an option out.

    >>> varied(["microbatches=1,4", "remat=none,full"])
    {'microbatches': [1, 4], 'remat': [None, 'full']}

    Raises ShardError for text of another form, and for numbers that are none.
    """
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        given = [value.strip() for value in values.split(",") if value.strip()]
        if not given:
            raise ShardError(
                f"--vary {text}: write an option and its values, as in --vary microbatches=1,4,16"
            )
        found[name] = [None if value == "none" else _value(name, value) for value in given]
    return found


def _value(name: str, value: str) -> Any:
    if name not in _COUNTS:
        return value
    if not value.isdecimal() or int(value) < 1:
        raise ShardError(f"--vary {name}={value}: {name} takes whole numbers from 1 on")
    return int(value)
