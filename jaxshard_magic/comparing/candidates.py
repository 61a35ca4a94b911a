"""What a comparison tries: strategies on the meshes that suit them, with each combination of the options that vary."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from ..config.flags import quoted_value
from ..config.mesh_text import Axes
from ..config.options import FLAGS, STEP_FLAGS
from ..config.request import Request, make_request
from ..config.strategies import COMPARED
from ..config.strategy_text import Part, parse_strategy
from ..errors import ShardError, one_of, whole_number
from ..specs import format_spec
from .meshes import EVERY, reshaped, suited, text_of

MOST = 64  # candidates of one comparison
VARIED = tuple(flag.parameter for flag in STEP_FLAGS if flag.varies)
PLACED = ("specs", "rules", "donate", "on", "name", "data")  # options that tell no candidate from another


@dataclass(frozen=True)
class Requests:
    """What is asked of several candidates together.

    Args:
        strategies: as `make_request` takes them.
        mesh: the devices of all. A strategy takes it as it is where it has an axis for every part and none to spare;
            else a mesh of the same devices that has.
        meshes: "all" for every way to divide the devices over the axes of each strategy; or the axes of each mesh,
            `"data=4 model=2"`.
        vary: values by the name of an option; None among them leaves it out.
        options: options that all have, by name; those of a pipeline, and of divided positions, are for strategies that
            have them.
        placed: what else `make_request` takes: specs, rules, donate, on, name, data.
        said: what the line of each has for that, as `said_of` writes it.
        keep_going: a strategy that is none is refused alone, and the others are tried.
    """

    strategies: Sequence[str]
    mesh: Mesh
    meshes: str | Sequence[str] | None = None
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    placed: Mapping[str, Any] = field(default_factory=dict)
    keep_going: bool = False
    said: str = ""


@dataclass(frozen=True)
class Candidate:
    """One request among several. `options`: what it varies or has in common, by name. `line`: what runs it alone, as it
    stands after `%%shard`."""

    request: Request
    options: Mapping[str, Any]
    line: str

    @property
    def label(self) -> str:
        """Its line without what the lines of all have."""
        return line_of(self.strategy, text_of(self.mesh), self.options)

    @property
    def strategy(self) -> str:
        return self.request.strategy

    @property
    def mesh(self) -> Mesh:
        return self.request.mesh

    @property
    def axes(self) -> Mapping[str, int]:
        return self.mesh.shape


@dataclass(frozen=True)
class Refused:
    """One that can't be tried: why, and what would change that."""

    strategy: str
    axes: Mapping[str, int]
    options: Mapping[str, Any]
    line: str
    why: str
    fix: str | None = None


def candidates(requests: Requests, most: int = MOST) -> list[Candidate | Refused]:
    """Everything to try, each once, in the order given.

    Raises ShardError for a strategy that is none, for values that an option does not take, where there is nothing to
    try, and for more than `most` candidates, before anything is traced.
    """
    for name in requests.vary:
        if name not in VARIED:
            raise ShardError(f"--vary {name}=...: what varies is one of {one_of(VARIED)}")
    tried: list[Candidate | Refused] = []
    for strategy in requests.strategies:
        try:
            parts = parse_strategy(strategy)
        except ShardError as error:
            if not requests.keep_going:
                more = " --keep-going compares the others" if len(requests.strategies) > 1 else ""
                end = "" if str(error).endswith((".", "?")) else "."
                raise ShardError(f"{error}{end}{more}", fix=error.fix) from None
            tried.append(Refused(strategy, {}, {}, strategy, str(error), error.fix))
            continue
        tried += _of(strategy, parts, requests)
    alone = {each.line: each for each in tried}
    if not alone:
        raise ShardError(f"nothing to compare: name strategies, as in {','.join(COMPARED)}")
    if len(alone) > most:
        raise ShardError(
            f"{len(alone)} candidates ({_counted(requests)}), and at most {most} are compared; name "
            "fewer strategies or meshes, or vary fewer values"
        )
    return list(alone.values())


def _of(strategy: str, parts: Sequence[Part], requests: Requests) -> Iterator[Candidate | Refused]:
    has = {part.name for part in parts}
    others = {flag.parameter for flag in STEP_FLAGS if flag.strategy and flag.strategy not in has}
    names = [name for name in requests.vary if name not in others]
    shared = {name: value for name, value in requests.options.items() if name not in others}
    for values in product(*(requests.vary[name] for name in names)):
        varied = zip(names, values, strict=True)
        options = {name: value for name, value in (shared | dict(varied)).items() if value is not None}
        for axes in suited(parts, requests.mesh, requests.meshes, options.get("stages")):
            yield candidate_of(strategy, requests, axes, options)


def candidate_of(
    strategy: str, requests: Requests, axes: Axes, options: Mapping[str, Any]
) -> Candidate | Refused:
    """One of them alone, on a mesh of the same devices with these axes."""
    mesh = requests.mesh
    line = line_of(strategy, text_of(mesh, axes), options, requests.said)
    try:
        if prod(size for _, size in axes) != mesh.size:
            raise ShardError(
                f"--stages {options['stages']}: {mesh.size} devices make no such stages of one size"
            )
        own = mesh if axes == tuple(mesh.shape.items()) else reshaped(mesh, axes)
        request = make_request(strategy, own, **requests.placed, **options)
    except ShardError as error:
        return Refused(strategy, dict(axes), options, line, str(error), error.fix)
    return Candidate(request, options, line)


def line_of(strategy: str, mesh: str, options: Mapping[str, Any], said: str = "") -> str:
    """What stands after `%%shard` to run one; `said`: what the lines of all have.

    >>> line_of("fsdp", "data=8", {"reduce_dtype": "bf16", "pad": True}, "--on v5e")
    'fsdp --mesh "data=8" --reduce-dtype bf16 --pad --on v5e'
    """
    words = [strategy, f'--mesh "{mesh}"']
    for name, value in options.items():
        words.append(FLAGS[name].typed(value))
    return " ".join([*words, said] if said else words)


def said_of(given: Mapping[str, Any]) -> str:
    """The options that a user has given for all, as they are typed: those of `PLACED`, and `step`.

    >>> said_of({"rules": {"bias$": "P()"}, "on": "v5e", "donate": False})
    '--rule "bias$=P()" --no-donate --on v5e'
    """
    words = []
    for name in ("step", *PLACED):
        value = given.get(name)
        if name == "donate" and value is not None:
            words.append("--donate" if value else "--no-donate")
        elif name in ("specs", "rules"):
            pairs = value.items() if isinstance(value, Mapping) else value or ()
            each = (
                f"{key}={format_spec(spec) if isinstance(spec, PartitionSpec) else spec}"
                for key, spec in pairs
            )
            words += [f"--{name.removesuffix('s')} {quoted_value(text)}" for text in each]
        elif value is not None and (name, value) != ("data", "whole"):
            words.append(f"--{name} {quoted_value(value)}")
    return " ".join(words)


def _counted(requests: Requests) -> str:
    meshes, counts = requests.meshes, [f"{len(requests.strategies)} strategies"]
    if meshes is not None:
        counts.append("every mesh of them" if meshes == EVERY else f"{len(meshes)} meshes")
    return " x ".join([*counts, *(f"{len(values)} of {name}" for name, values in requests.vary.items())])


def varied(texts: Sequence[str]) -> dict[str, list[Any]]:
    """What `--vary microbatches=1,4,16` says, by the names of `api.shard`; `none` leaves an option out.

    >>> varied(["microbatches=1,4", "remat=none,full"])
    {'microbatches': [1, 4], 'remat': [None, 'full']}

    Raises ShardError for text of another form, and for numbers that are none.
    """
    values_of: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        given = [value.strip() for value in values.split(",") if value.strip()]
        if not given:
            raise ShardError(
                f"--vary {text}: write an option and its values, as in --vary microbatches=1,4,16"
            )
        values_of[name] = [None if value == "none" else _value(name, value) for value in given]
    return values_of


def _value(name: str, value: str) -> Any:
    if name not in FLAGS or not FLAGS[name].is_count:
        return value
    found = whole_number(value)
    if found is None:
        raise ShardError(f"--vary {name}={value}: {name} takes whole numbers from 1 on, a million at most")
    return found
