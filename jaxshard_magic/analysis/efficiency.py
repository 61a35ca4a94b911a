"""How near a product comes to a chip's published peak, by its shape."""

from math import ceil

from ..hardware import Chip
from ..plan import Share

# Of the peak, in large products. TPU: 95.6 ms computed, 96 ms measured on v2 (https://jax-ml.github.io/scaling-book/
# profiling/), and what published runs leave of it: docs/predictions.md, where each is predicted without itself. GPU:
# 0.859 on A100 and 0.801 on H100, the best of all shapes ("Maximum Achievable Matmul FLOPS", https://github.com/stas00/
# ml-engineering/tree/master/compute/accelerator).
SUSTAINED = {"tpu": 0.95, "gpu": 0.80}
SLOWEST = {"tpu": 0.85, "gpu": 0.70}  # TPU: what the slowest of those runs leaves; GPU: as much less
UNIT = {"v6e": 256, "tpu7x": 256}  # rows and columns of a TPU's matrix unit; of all others:
USUAL_UNIT = 128
ROWS = 8  # that go into the unit together, a sublane each
LINKS = 0.9  # of their bandwidth: 560 us computed and 680 measured (../sharding/), 1.1 ms and 1.13 (../profiling/)


def efficiency(chip: Chip, share: Share) -> float:
    """The share of a chip's peak that a product reaches, 0 to 1.

    A TPU holds a square of one operand in its matrix unit while rows of the other go through; a dimension that does not
    fill the square, or the last of several squares, is padded (https://jax-ml.github.io/scaling-book/tpus/, "How does a
    TPU work?"). Which operand is held is the compiler's choice: the better one is taken.

    >>> from jaxshard_magic.hardware import chip
    >>> [round(efficiency(chip("v5e"), Share(1, 1, "bfloat16", dims=(512, 512, k))) / 0.95, 3) for k in (64, 128, 192)]
    [0.5, 1.0, 0.75]
    """
    reached = SUSTAINED[chip.kind]
    if chip.kind == "tpu" and share.dims is not None and all(share.dims):
        unit = UNIT.get(chip.key, USUAL_UNIT)
        rows, columns, summed = share.dims
        held = max(_filled(rows, ROWS) * _filled(columns, unit), _filled(columns, ROWS) * _filled(rows, unit))
        reached *= held * _filled(summed, unit)
    return reached


def seconds_of(chip: Chip, share: Share) -> float | None:
    """What a product takes to multiply at the peak; None where none is published. A product of float32 in several
    passes of bfloat16 takes as many times as long on a TPU."""
    rate = chip.peak(share.dtype)
    passes = share.passes if chip.kind == "tpu" else 1
    return passes * share.flops / rate if rate else None


def _filled(size: int, unit: int) -> float:
    return size / (ceil(size / unit) * unit)
