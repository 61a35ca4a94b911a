"""HLO texts of compiled programs, each requested from the compiler and parsed once."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..compilation.compiled_step import CompiledStep
from .hlo import Module, parse_module
from .origin import HloOrigins


class ParsedProgram(NamedTuple):
    """Compiled program, parsed from text.

    Attributes:
        module: The HLO module.
        origins: Source lines of its instructions.
    """

    module: Module
    origins: HloOrigins


class ProgramTexts:
    """Cache of the texts of one entry's programs.

    Args:
        home: Files to search first for a source line.
    """

    def __init__(self, home: Sequence[str]):
        self._home = tuple(home)
        # By `id`, which Python gives to another object once a program is freed: the program is stored as well.
        self._known: dict[int, tuple[Any, ParsedProgram | None]] = {}
        self._parsed: dict[tuple[str, tuple[int, ...]], ParsedProgram] = {}

    def parsed(self, compiled: Any, inputs: Sequence[int] = ()) -> ParsedProgram | None:
        """Return the parsed text of a program; None where the compiler gives none.

        Args:
            compiled: The compiled program.
            inputs: Leaf of the step read by each parameter. Only the first call for a program uses this argument.
        """
        if id(compiled) not in self._known:
            text = compiled.as_text()
            self._known[id(compiled)] = compiled, self._read(text, tuple(inputs)) if text else None
        return self._known[id(compiled)][1]

    def _read(self, text: str, inputs: tuple[int, ...]) -> ParsedProgram:
        """Parse a text, once for all copies of a program loaded for other devices."""
        if (text, inputs) not in self._parsed:
            module = parse_module(text)
            self._parsed[text, inputs] = ParsedProgram(module, HloOrigins(module, self._home, inputs))
        return self._parsed[text, inputs]


_kept: "WeakKeyDictionary[CompiledStep, ProgramTexts]" = WeakKeyDictionary()


def program_texts(entry: CompiledStep) -> ProgramTexts:
    """Return the texts of an entry's programs, cached for the latest entry."""
    texts = _kept.get(entry)
    if texts is None:
        texts = ProgramTexts(home_files(entry))
        # The texts of a very large program are some hundred megabytes: those of other entries are dropped.
        _kept.clear()
        _kept[entry] = texts
    return texts


def home_files(entry: CompiledStep | None) -> list[str]:
    """Return the file with the step's definition as a list; [] where unknown."""
    return [entry.source_file] if entry is not None and entry.source_file else []


def read_inputs(entry: CompiledStep) -> list[int]:
    """Return, for a step of one program, the input read by each parameter."""
    # JAX drops parameters that the program does not read.
    return [i for i, is_read in zip(entry.order, entry.used_arguments, strict=True) if is_read]
