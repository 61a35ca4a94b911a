"""Rules that map names of arrays in a weight file to names in a state, in both directions."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from ..errors import ShardError, did_you_mean

Order = tuple[int, ...]


@dataclass(frozen=True)
class NameRule:
    """Rule `FILE=STATE` or `FILE=STATE:ORDER`.

    Names with the prefix FILE in the file have the prefix STATE in the state. A prefix ends at a dot or with the name;
    a slash counts as a dot; `*` is any text. A `*` that STATE lacks is a number: arrays of the file are stacked by
    number into one, in its first dimensions.

    Attributes:
        file_prefix: FILE.
        state_prefix: STATE.
        order: "T" to swap two dimensions, or the dimensions of the file's array in the state's order as digits; "" to
            keep them.
    """

    file_prefix: str
    state_prefix: str
    order: str = ""

    def __str__(self) -> str:
        return f"{self.file_prefix}={self.state_prefix}{self.order and ':'}{self.order}"

    @property
    def stacked(self) -> int:
        """Number of dimensions by which arrays are stacked."""
        return self.file_prefix.count("*") - self.state_prefix.count("*")

    def dims(self, name: str, ndim: int) -> Order | None:
        """Return the dimensions of a file's array in the state's order; None to keep them.

        Args:
            name: Name of the array in messages.
            ndim: Number of dimensions of the file's array.

        Raises:
            ShardError: The rule has no order for so many dimensions.
        """
        if self.order == "T":
            if ndim > 2:
                raise ShardError(
                    f"{self}: {name} has {ndim} dimensions and T swaps two; say the file's in your order, "
                    f"such as :{''.join(map(str, reversed(range(ndim))))}"
                )
            return (1, 0) if ndim == 2 else None
        if self.order and len(self.order) != ndim:
            raise ShardError(f"{self}: {name} has {ndim} dimensions, and :{self.order} is of {len(self.order)}")
        return tuple(map(int, self.order)) or None

    def match_file_name(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """Return the state's name for a file's name and the texts of the numbers to stack by; None for other names."""
        # The leading dot lets an empty prefix match like any other.
        found = self._there.fullmatch(f".{dotted(name)}")
        if found is None:
            return None
        *stars, rest = found.groups(default="")
        kept = len(stars) - self.stacked
        return dotted(_filled(self.state_prefix, stars[:kept], rest)), tuple(stars[kept:])

    def matches_state_name(self, name: str) -> bool:
        """Return whether the rule gives a file's name for this array of the state."""
        return self._here.fullmatch(f".{dotted(name)}") is not None

    def file_name_of(self, name: str, numbers: Sequence[int] = ()) -> str:
        """Return the file's name for an array of the state.

        Args:
            name: Name in the state; the rule must match.
            numbers: Position in the stack, if the rule stacks.

        Raises:
            ValueError: The rule does not match.
        """
        found = self._here.fullmatch(f".{dotted(name)}")
        if found is None:
            raise ValueError(f"{self} is not of {name}")
        *stars, rest = found.groups(default="")
        return _filled(self.file_prefix, [*stars, *map(str, numbers)], rest)

    @cached_property
    def _there(self) -> "re.Pattern[str]":
        return _pattern(dotted(self.file_prefix))

    @cached_property
    def _here(self) -> "re.Pattern[str]":
        return _pattern(dotted(self.state_prefix))


@dataclass(frozen=True)
class NamePair:
    """Name of an array in a file, paired with the name in a state.

    Attributes:
        file_name: Name in the file.
        state_name: Name in the state.
        stack_index: Position in the stack; empty if nothing is stacked.
        rule: Rule that paired the names; None without one.
    """

    file_name: str
    state_name: str
    stack_index: tuple[int, ...] = ()
    rule: NameRule | None = None


def parse_rules(given: "Mapping[str, str] | Iterable[str]") -> tuple[NameRule, ...]:
    """Parse rules from lines `FILE=STATE`, or from a mapping of FILE to STATE. Raises ShardError for other text.

    >>> [str(rule) for rule in parse_rules({"model.layers.*.up.weight": "layers.*.up:T"})]
    ['model.layers.*.up.weight=layers.*.up:T']
    """
    lines = [f"{a}={b}" for a, b in given.items()] if isinstance(given, Mapping) else [*given]
    return tuple(map(_rule, lines))


def pair_file_names(rules: Sequence[NameRule], names: Iterable[str], where: str) -> list[NamePair]:
    """Pair a file's names with names in a state, each by the first rule that matches.

    Args:
        rules: Rules in order of precedence; names without a rule are kept.
        names: Names in the file.
        where: Name of the file in messages.

    Returns:
        One pair a name, without names for which a rule gives none.

    Raises:
        ShardError: A rule matches no name, two arrays get one name, or a `*` to stack by is no number.

    >>> [stacked] = pair_file_names(parse_rules(["h.*.w=w"]), ["h.7.w"], "m.npz")
    >>> stacked.state_name, stacked.stack_index
    ('w', (7,))
    """
    names, found, used = [*names], dict[tuple[str, tuple[int, ...]], NamePair](), set[NameRule]()
    for name in names:
        named = NamePair(name, dotted(name))
        for rule in rules:
            if (match := rule.match_file_name(name)) is not None:
                used.add(rule)
                named = NamePair(name, match[0], _numbers(rule, match[1], name), rule)
                break
        duplicate = found.get((named.state_name, named.stack_index))
        if duplicate is not None and named.state_name:
            raise ShardError(
                f"{where}: {duplicate.file_name} and {name} are both {named.state_name} here: rename one of them"
            )
        found[named.state_name, named.stack_index] = named
    _all_used(rules, used, names, where, lambda rule: rule.file_prefix, NameRule.match_file_name)
    return [named for named in found.values() if named.state_name]


def pair_state_names(rules: Sequence[NameRule], leaves: Mapping[str, tuple[int, ...]], where: str) -> list[NamePair]:
    """Pair a state's arrays with names in a file, by the same rules read backwards.

    Args:
        rules: Rules in order of precedence; names without a rule are kept.
        leaves: Shape of each array by name.
        where: Name of the file in messages.

    Returns:
        One pair for each array of the file: several for an array of the state that is stacked.

    Raises:
        ShardError: As `pair_file_names` does, and for an array with fewer dimensions than a rule stacks by.
    """
    found, used = dict[str, NamePair](), set[NameRule]()
    for name, shape in leaves.items():
        rule = next((rule for rule in rules if rule.matches_state_name(name)), None)
        if rule is not None:
            used.add(rule)
        stacked = 0 if rule is None else rule.stacked
        if len(shape) < stacked:
            raise ShardError(f"{rule}: {name} has {len(shape)} dimensions, fewer than * stand for numbers")
        for numbers in product(*map(range, shape[:stacked])):
            there = name if rule is None else rule.file_name_of(name, numbers)
            duplicate = found.get(dotted(there))
            if not there or duplicate is not None:
                both = (
                    f"{name} has no name"
                    if duplicate is None
                    else f"{duplicate.state_name} and {name} are both {there}"
                )
                raise ShardError(f"{both} in {where}: rename one of them")
            found[dotted(there)] = NamePair(there, name, numbers, rule)
    _all_used(rules, used, [*leaves], "the state", lambda rule: rule.state_prefix, NameRule.matches_state_name)
    return [*found.values()]


def dotted(name: str) -> str:
    """Return a name in the form for comparisons: `mlp.up.kernel` for `mlp/up/kernel`."""
    return name.replace("/", ".")


def _rule(line: str) -> NameRule:
    """Parse one line. Raises ShardError."""
    there, equals, rest = (part.strip() for part in line.partition("="))
    here, _, order = (part.strip() for part in rest.partition(":"))
    said = f"--rename {line!r}"
    if not equals:
        raise ShardError(f'{said} has no =: it is the file\'s name and yours, --rename "a.b=c.d"')
    rule = NameRule(there.strip("./"), here.strip("./"), order)
    if rule.stacked < 0:
        raise ShardError(f"{said} has more * on your side than on the file's, which says what they are")
    if order not in ("", "T") and sorted(order) != [str(i) for i in range(len(order))]:
        raise ShardError(f"{said}: :{order} is no order of dimensions; :T swaps two, :2310 is the order of four")
    return rule


def _numbers(rule: NameRule, stars: Sequence[str], name: str) -> tuple[int, ...]:
    """Return the position in the stack from the texts of `*`. Raises ShardError for anything but a number below
    10**9."""
    for star in stars:
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", star):
            raise ShardError(
                f"{rule} stacks by number, and * is {star!r} in {name}: give your side a * where it stays a name"
            )
    return tuple(map(int, stars))


def _all_used(
    rules: Sequence[NameRule],
    used: set[NameRule],
    names: Sequence[str],
    where: str,
    side: Callable[[NameRule], str],
    fits: Callable[[NameRule, str], object],
) -> None:
    """Raise ShardError for a rule that renames nothing, be it that no name matches or that earlier rules match all of
    them."""
    for rule in rules:
        if rule in used:
            continue
        if any(fits(rule, name) for name in names):
            raise ShardError(f"--rename {str(rule)!r}: rules before it have all of its arrays; put it before them")
        begins = {dotted(name).rsplit(".", i)[0]: None for name in names for i in range(name.count(".") + 1)}
        near = did_you_mean(side(rule), begins) or " Leave it out"
        raise ShardError(f"--rename {str(rule)!r} is of no array of {where}.{near}")


def _pattern(side: str) -> "re.Pattern[str]":
    """Return a pattern for a name after a dot: a group for each `*`, and one for the text after the prefix."""
    # DOTALL, as names in a file may have line breaks.
    text = "(.+?)".join(map(re.escape, side.split("*")))
    return re.compile((rf"\.{text}" if side else "") + r"(\..+)?", re.DOTALL)


def _filled(side: str, stars: Sequence[str], rest: str) -> str:
    """Return a prefix with texts in place of each `*`, followed by `rest`."""
    # `str.replace` would also replace a `*` within the inserted texts.
    first, *others = side.split("*")
    text = first + "".join(star + part for star, part in zip(stars, others, strict=True))
    return (text + rest).strip("./")
