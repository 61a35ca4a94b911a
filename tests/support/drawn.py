"""A slow cell, and what its progress line has drawn."""

from .cells import LOOP


class Drawn(list[str]):
    """The lines that a front end is given, and the shares with them."""

    def __init__(self) -> None:
        self.shares: list[float | None] = []

    def __call__(self, line: str, share: float | None = None) -> None:
        self.append(line)
        self.shares.append(share)


SLOWLY = LOOP.replace("range(3)", "range(20)") + "    time.sleep(0.02)\n"
