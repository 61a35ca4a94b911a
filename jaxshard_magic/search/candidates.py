"""Candidates of a comparison: strategies on suitable meshes, with each combination of the varied options."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from ..config.flags import quoted_value
from ..config.mesh import Axes
from ..config.options import FLAGS
from ..config.request import Request, make_request
from ..config.strategies import COMPARED
from ..config.strategy_text import StrategyPart, parse_strategy
from ..errors import ShardError, list_names, parse_count
from ..specs import format_spec
from .meshes import ALL_MESHES, reshaped, suitable_axes, text_of

MOST = 64  # candidates of one comparison
VARIABLE_OPTIONS = tuple(flag.parameter for flag in FLAGS.values() if flag.varies)
FIXED_OPTIONS = ("specs", "rules", "donate", "on", "name", "data")  # options that are the same for all candidates


@dataclass(frozen=True)
class Requests:
    """Request for several candidates.

    Attributes:
        strategies: Strategies, as `make_request` takes them.
        mesh: Devices of all candidates. A strategy uses the mesh unchanged if each part has an axis and no axis is
            spare, else another mesh of the same devices.
        meshes: "all" to divide the devices over the axes of each strategy in all ways; or the axes of each mesh,
            `"data=4 model=2"`. None for one mesh per strategy.
        vary: Values by option; None among them leaves the option out.
        options: Options of all candidates, by name. Strategies without a pipeline, or without sharded positions, skip
            options of these.
        fixed: Further arguments of `make_request`: specs, rules, donate, on, name, data.
        keep_going: Whether an unknown strategy is refused alone; else an unknown strategy is an error.
        fixed_line: Options on the line of each candidate for `fixed`, as written by `fixed_options_line`.
    """

    strategies: Sequence[str]
    mesh: Mesh
    meshes: str | Sequence[str] | None = None
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    keep_going: bool = False
    fixed_line: str = ""


@dataclass(frozen=True)
class Candidate:
    """One request among several.

    Attributes:
        request: Checked request.
        options: Varied and common options, by name.
        line: Arguments of `%%shard` that run the candidate alone.
    """

    request: Request
    options: Mapping[str, Any]
    line: str

    @property
    def label(self) -> str:
        """Line without the options fixed for all candidates."""
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
class RefusedCandidate:
    """Candidate that can't be tried.

    Attributes:
        strategy: Strategy as written.
        axes: Sizes of the mesh axes, by name.
        options: Varied and common options, by name.
        line: Arguments of `%%shard`.
        why: Reason.
        fix: Line that would help; None if unknown.
    """

    strategy: str
    axes: Mapping[str, int]
    options: Mapping[str, Any]
    line: str
    why: str
    fix: str | None = None


def candidates(requests: Requests, most: int = MOST) -> list[Candidate | RefusedCandidate]:
    """Return all candidates once each, in the order given. Nothing is traced.

    Args:
        requests: Request for the candidates.
        most: Largest number of candidates allowed.

    Raises:
        ShardError: Unknown strategy, value refused by an option, no candidates, or more than `most`.
    """
    for name in requests.vary:
        if name not in VARIABLE_OPTIONS:
            raise ShardError(f"--vary {name}=...: what varies is one of {list_names(VARIABLE_OPTIONS)}")
    tried: list[Candidate | RefusedCandidate] = []
    for strategy in requests.strategies:
        try:
            parts = parse_strategy(strategy)
        except ShardError as error:
            if not requests.keep_going:
                more = " --keep-going compares the others" if len(requests.strategies) > 1 else ""
                end = "" if str(error).endswith((".", "?")) else "."
                raise ShardError(f"{error}{end}{more}", fix=error.fix) from None
            tried.append(RefusedCandidate(strategy, {}, {}, strategy, str(error), error.fix))
            continue
        tried += _of(strategy, parts, requests)
    # Meshes written differently can give the same candidate.
    unique = {each.line: each for each in tried}
    if not unique:
        raise ShardError(f"nothing to compare: name strategies, as in {','.join(COMPARED)}")
    if len(unique) > most:
        raise ShardError(
            f"{len(unique)} candidates ({_counted(requests)}), and at most {most} are compared; name "
            "fewer strategies or meshes, or vary fewer values"
        )
    return list(unique.values())


def _of(strategy: str, parts: Sequence[StrategyPart], requests: Requests) -> Iterator[Candidate | RefusedCandidate]:
    """Yield the candidates of one strategy."""
    has = {part.name for part in parts}
    others = {flag.parameter for flag in FLAGS.values() if flag.strategy and flag.strategy not in has}
    names = [name for name in requests.vary if name not in others]
    shared = {name: value for name, value in requests.options.items() if name not in others}
    for values in product(*(requests.vary[name] for name in names)):
        varied = zip(names, values, strict=True)
        options = {name: value for name, value in (shared | dict(varied)).items() if value is not None}
        for axes in suitable_axes(parts, requests.mesh, requests.meshes, options.get("stages")):
            yield candidate_of(strategy, requests, axes, options)


def candidate_of(
    strategy: str, requests: Requests, axes: Axes, options: Mapping[str, Any]
) -> Candidate | RefusedCandidate:
    """Return one candidate.

    Args:
        strategy: Strategy.
        requests: Request with devices and fixed options.
        axes: Axes of the mesh, on the devices of `requests.mesh`.
        options: Varied and common options.
    """
    mesh = requests.mesh
    line = line_of(strategy, text_of(mesh, axes), options, requests.fixed_line)
    try:
        if prod(size for _, size in axes) != mesh.size:
            raise ShardError(f"--stages {options['stages']}: {mesh.size} devices make no such stages of one size")
        own = mesh if axes == tuple(mesh.shape.items()) else reshaped(mesh, axes)
        request = make_request(strategy, own, **requests.fixed, **options)
    except ShardError as error:
        return RefusedCandidate(strategy, dict(axes), options, line, str(error), error.fix)
    return Candidate(request, options, line)


def line_of(strategy: str, mesh: str, options: Mapping[str, Any], said: str = "") -> str:
    """Return the arguments of `%%shard` that run one candidate.

    Args:
        strategy: Strategy.
        mesh: Mesh text.
        options: Varied and common options, by name.
        said: Options fixed for all candidates, as text.

    >>> line_of("fsdp", "data=8", {"reduce_dtype": "bf16", "pad": True}, "--on v5e")
    'fsdp --mesh "data=8" --reduce-dtype bf16 --pad --on v5e'
    """
    words = [strategy, f'--mesh "{mesh}"']
    for name, value in options.items():
        words.append(FLAGS[name].typed(value))
    return " ".join([*words, said] if said else words)


def fixed_options_line(given: Mapping[str, Any]) -> str:
    """Return the options that a user fixed for all candidates as text: options of `FIXED_OPTIONS`, and `step`.

    >>> fixed_options_line({"rules": {"bias$": "P()"}, "on": "v5e", "donate": False})
    '--rule "bias$=P()" --no-donate --on v5e'
    """
    words = []
    for name in ("step", *FIXED_OPTIONS):
        value = given.get(name)
        if name == "donate" and value is not None:
            words.append("--donate" if value else "--no-donate")
        elif name in ("specs", "rules"):
            pairs = value.items() if isinstance(value, Mapping) else value or ()
            each = (f"{key}={format_spec(spec) if isinstance(spec, PartitionSpec) else spec}" for key, spec in pairs)
            words += [f"--{name.removesuffix('s')} {quoted_value(text)}" for text in each]
        # The default of `data` is not worth writing.
        elif value is not None and (name, value) != ("data", "whole"):
            words.append(f"--{name} {quoted_value(value)}")
    return " ".join(words)


def _counted(requests: Requests) -> str:
    """Return the numbers of strategies, meshes and values, as text."""
    meshes, counts = requests.meshes, [_number(len(requests.strategies), "strategy", "strategies")]
    if meshes is not None:
        written = [meshes] if isinstance(meshes, str) else meshes
        counts.append("every mesh of them" if meshes == ALL_MESHES else _number(len(written), "mesh", "meshes"))
    return " x ".join([*counts, *(f"{len(values)} of {name}" for name, values in requests.vary.items())])


def _number(n: int, one: str, several: str) -> str:
    return f"{n} {one if n == 1 else several}"


def parse_vary(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of `--vary microbatches=1,4,16`, by parameter of `api.shard`; `none` leaves an option out.

    Raises:
        ShardError: Text of another form, or a number that is none.

    >>> parse_vary(["microbatches=1,4", "remat=none,full"])
    {'microbatches': [1, 4], 'remat': [None, 'full']}
    """
    values_of: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        given = [value.strip() for value in values.split(",") if value.strip()]
        if not given:
            raise ShardError(f"--vary {text}: write an option and its values, as in --vary microbatches=1,4,16")
        values_of[name] = [None if value == "none" else _value(name, value) for value in given]
    return values_of


def _value(name: str, value: str) -> Any:
    if name not in FLAGS or not FLAGS[name].is_count:
        return value
    found = parse_count(value)
    if found is None:
        raise ShardError(f"--vary {name}={value}: {name} takes whole numbers from 1 on, a million at most")
    return found
