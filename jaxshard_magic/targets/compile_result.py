"""Result of a compiler in another process: plain data to send between processes and to store on disk."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class MemoryStats:
    """XLA's `CompiledMemoryStats` of one device, in bytes, with XLA's names."""

    argument_size_in_bytes: int = 0
    output_size_in_bytes: int = 0
    alias_size_in_bytes: int = 0
    temp_size_in_bytes: int = 0
    generated_code_size_in_bytes: int = 0
    peak_memory_in_bytes: int = 0


@dataclass(frozen=True)
class CompileResult:
    """Compiled program that can't run here.

    Attributes:
        text: HLO of the compiled program.
        stats: Memory; None if the compiler gives no figures.
        proto: XLA's `HloProto`, serialized, with module and buffer assignment; empty if the compiler wrote none.
        log: Complaints of the compiler.
        seconds: Time of the compiler.
        refused: Message of the target's compiler if memory did not suffice; all else is then from the compiler of
            `stand_in`.
        stand_in: Key of a chip with more memory; None without one, and all else is then empty if `refused` is set.
        failed: Reason why the compiler ended without an answer; all else is then empty.
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
        """Return the compiled program as HLO text, like `jax.stages.Compiled`."""
        return self.text

    def memory_analysis(self) -> MemoryStats | None:
        """Return the memory of one device, like `jax.stages.Compiled`; None without figures."""
        return self.stats
