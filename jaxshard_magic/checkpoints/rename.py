"""What a file calls an array and what the state calls it: a table of rules, read in both directions."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from ..errors import ShardError, did_you_mean

Order = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """`there=here`: names that begin so in the file begin so in the state, up to a dot or their end; `*` is any text,
    and a slash counts as a dot.

    A `*` that the state's side lacks is a number by which arrays of the file are stacked into one, in its first
    dimensions. `order`: "T", or the dimensions of the file's array in the state's order, as digits.
    """

    there: str
    here: str
    order: str = ""

    def __str__(self) -> str:
        return f"{self.there}={self.here}{self.order and ':'}{self.order}"

    @property
    def stacked(self) -> int:
        """How many dimensions it stacks by."""
        return self.there.count("*") - self.here.count("*")

    def dims(self, name: str, ndim: int) -> Order | None:
        """The file's dimensions of an array of so many in the state's order; None as they are. Raises ShardError for a
        number of them that it says nothing of."""
        if self.order == "T":
            if ndim > 2:
                raise ShardError(
                    f"{self}: {name} has {ndim} dimensions and T swaps two; say the file's in your order, "
                    f"such as :{''.join(map(str, reversed(range(ndim))))}"
                )
            return (1, 0) if ndim == 2 else None
        if self.order and len(self.order) != ndim:
            raise ShardError(
                f"{self}: {name} has {ndim} dimensions, and :{self.order} is of {len(self.order)}"
            )
        return tuple(map(int, self.order)) or None

    def to_here(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """The state's name of the file's, and what its numbers are by which it is stacked; None for other names."""
        found = self._there.fullmatch(f".{dotted(name)}")
        if found is None:
            return None
        *stars, rest = found.groups(default="")
        kept = len(stars) - self.stacked
        return dotted(_filled(self.here, stars[:kept], rest)), tuple(stars[kept:])

    def fits_here(self, name: str) -> bool:
        """Does it say what the file calls this array of the state?"""
        return self._here.fullmatch(f".{dotted(name)}") is not None

    def to_there(self, name: str, numbers: Sequence[int] = ()) -> str:
        """The file's name of one of the state's that fits, with the numbers of one array of those that are stacked."""
        found = self._here.fullmatch(f".{dotted(name)}")
        if found is None:
            raise ValueError(f"{self} is not of {name}")
        *stars, rest = found.groups(default="")
        return _filled(self.there, [*stars, *map(str, numbers)], rest)

    @cached_property
    def _there(self) -> "re.Pattern[str]":
        return _pattern(dotted(self.there))

    @cached_property
    def _here(self) -> "re.Pattern[str]":
        return _pattern(dotted(self.here))


@dataclass(frozen=True)
class Named:
    """An array of a file under the state's name: `numbers` are those by which it is stacked."""

    there: str
    here: str
    numbers: tuple[int, ...] = ()
    rule: Rule | None = None


def rules_of(given: "Mapping[str, str] | Iterable[str]") -> tuple[Rule, ...]:
    """The rules of lines `there=here`, or of a mapping from there to here. Raises ShardError for other text.

    >>> [str(rule) for rule in rules_of({"model.layers.*.up.weight": "layers.*.up:T"})]
    ['model.layers.*.up.weight=layers.*.up:T']
    """
    lines = [f"{a}={b}" for a, b in given.items()] if isinstance(given, Mapping) else [*given]
    return tuple(map(_rule, lines))


def to_here(rules: Sequence[Rule], names: Iterable[str], where: str) -> list[Named]:
    """A file's names as the state's, each by the first rule that has it; those that a rule gives no name are left out.

    Raises ShardError for a rule that has none of them, for two arrays under one name, and for what can't be stacked.

    >>> [stacked] = to_here(rules_of(["h.*.w=w"]), ["h.7.w"], "m.npz")
    >>> stacked.here, stacked.numbers
    ('w', (7,))
    """
    names, found, used = [*names], dict[tuple[str, tuple[int, ...]], Named](), set[Rule]()
    for name in names:
        named = Named(name, dotted(name))
        for rule in rules:
            if (match := rule.to_here(name)) is not None:
                used.add(rule)
                named = Named(name, match[0], _numbers(rule, match[1], name), rule)
                break
        twice = found.get((named.here, named.numbers))
        if twice is not None and named.here:
            raise ShardError(
                f"{where}: {twice.there} and {name} are both {named.here} here: rename one of them"
            )
        found[named.here, named.numbers] = named
    _all_used(rules, used, names, where, lambda rule: rule.there, Rule.to_here)
    return [named for named in found.values() if named.here]


def to_there(rules: Sequence[Rule], leaves: Mapping[str, tuple[int, ...]], where: str) -> list[Named]:
    """What a file calls the arrays of a state, of these names and shapes: the table read the other way. Raises
    ShardError as `to_here` does."""
    found, used = dict[str, Named](), set[Rule]()
    for name, shape in leaves.items():
        rule = next((rule for rule in rules if rule.fits_here(name)), None)
        if rule is not None:
            used.add(rule)
        stacked = 0 if rule is None else rule.stacked
        if len(shape) < stacked:
            raise ShardError(f"{rule}: {name} has {len(shape)} dimensions, fewer than * stand for numbers")
        for numbers in product(*map(range, shape[:stacked])):
            there = name if rule is None else rule.to_there(name, numbers)
            twice = found.get(dotted(there))
            if not there or twice is not None:
                both = f"{name} has no name" if twice is None else f"{twice.here} and {name} are both {there}"
                raise ShardError(f"{both} in {where}: rename one of them")
            found[dotted(there)] = Named(there, name, numbers, rule)
    _all_used(rules, used, [*leaves], "the state", lambda rule: rule.here, Rule.fits_here)
    return [*found.values()]


def dotted(name: str) -> str:
    """A name as names are compared: `mlp.up.kernel` of `mlp/up/kernel`."""
    return name.replace("/", ".")


def _rule(line: str) -> Rule:
    there, equals, rest = (part.strip() for part in line.partition("="))
    here, _, order = (part.strip() for part in rest.partition(":"))
    said = f"--rename {line!r}"
    if not equals:
        raise ShardError(f'{said} has no =: it is the file\'s name and yours, --rename "a.b=c.d"')
    rule = Rule(there.strip("./"), here.strip("./"), order)
    if rule.stacked < 0:
        raise ShardError(f"{said} has more * on your side than on the file's, which says what they are")
    if order not in ("", "T") and sorted(order) != [str(i) for i in range(len(order))]:
        raise ShardError(
            f"{said}: :{order} is no order of dimensions; :T swaps two, :2310 is the order of four"
        )
    return rule


def _numbers(rule: Rule, stars: Sequence[str], name: str) -> tuple[int, ...]:
    for star in stars:
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", star):
            raise ShardError(
                f"{rule} stacks by number, and * is {star!r} in {name}: give your side a * where it stays a name"
            )
    return tuple(map(int, stars))


def _all_used(
    rules: Sequence[Rule],
    used: set[Rule],
    names: Sequence[str],
    where: str,
    side: Callable[[Rule], str],
    fits: Callable[[Rule, str], object],
) -> None:
    for rule in rules:
        if rule in used:
            continue
        if any(fits(rule, name) for name in names):
            raise ShardError(
                f"--rename {str(rule)!r}: rules before it have all of its arrays; put it before them"
            )
        begins = {dotted(name).rsplit(".", i)[0]: None for name in names for i in range(name.count(".") + 1)}
        near = did_you_mean(side(rule), begins) or " Leave it out"
        raise ShardError(f"--rename {str(rule)!r} is of no array of {where}.{near}")


def _pattern(side: str) -> "re.Pattern[str]":
    """Of a name with a dot before it: groups for each `*`, and one for what follows the side."""
    text = "(.+?)".join(map(re.escape, side.split("*")))
    return re.compile((rf"\.{text}" if side else "") + r"(\..+)?", re.DOTALL)


def _filled(side: str, stars: Sequence[str], rest: str) -> str:
    first, *others = side.split("*")
    text = first + "".join(star + part for star, part in zip(stars, others, strict=True))
    return (text + rest).strip("./")
