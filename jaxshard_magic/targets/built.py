"""What a compiler that runs elsewhere says of a program: plain data, that goes between processes and to disk."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class MemoryStats:
    """XLA's `CompiledMemoryStats` of one device, in bytes, under its own names."""

    argument_size_in_bytes: int = 0
    output_size_in_bytes: int = 0
    alias_size_in_bytes: int = 0
    temp_size_in_bytes: int = 0
    generated_code_size_in_bytes: int = 0
    peak_memory_in_bytes: int = 0


@dataclass(frozen=True)
class Built:
    """A program that was compiled and can't run here.

    `stats` is None where the compiler gave no figures. `proto` is XLA's `HloProto`, with the module and where each of
    its arrays lies, as it is serialized; empty where the compiler wrote none. `refused`: what the target's compiler
    said when it had no room; then the rest comes from the compiler of `stand_in`, or is empty where that is None.
    `failed`: how the compiler came to an end without an answer; all else is empty then.
    `log`: what the compiler complained of. `seconds` is the compiler's time.
    """

    text: str = field(default="", repr=False)
    stats: MemoryStats | None = None
    proto: bytes = field(default=b"", repr=False)
    log: tuple[str, ...] = ()
    seconds: float = 0.0
    refused: str | None = None
    stand_in: str | None = None
    failed: str | None = None

    def as_text(self) -> str:
        """The compiled program as HLO text, as `jax.stages.Compiled` has it."""
        return self.text

    def memory_analysis(self) -> MemoryStats | None:
        return self.stats
