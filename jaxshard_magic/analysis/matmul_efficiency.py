"""Estimate the share of a chip's published peak reached by a matrix product, from the product's shape."""

from math import ceil

from ..hardware import Chip
from ..plan import DeviceWork

# Share of the peak reached by large products.
# TPU: 95.6 ms computed, 96 ms measured on v2 (https://jax-ml.github.io/scaling-book/profiling/), and the share left by
# published runs, each predicted without itself (docs/predictions.md).
# GPU: 0.859 on A100 and 0.801 on H100, the best of all shapes ("Maximum Achievable Matmul FLOPS",
# https://github.com/stas00/ml-engineering/tree/master/compute/accelerator).
PEAK_SHARE = {"tpu": 0.95, "gpu": 0.80}
SLOWEST_PEAK_SHARE = {"tpu": 0.85, "gpu": 0.70}  # TPU: the slowest of those runs; GPU: lower by as much
# Rows and columns of a TPU's matrix unit; `USUAL_UNIT` for chips not listed.
UNIT = {"v6e": 256, "tpu7x": 256}
USUAL_UNIT = 128
ROWS = 8  # rows that enter the unit together, one per sublane
# Share of the published bandwidth reached by links: 560 us computed and 680 us measured
# (https://jax-ml.github.io/scaling-book/sharding/), 1.1 ms and 1.13 ms
# (https://jax-ml.github.io/scaling-book/profiling/).
LINK_SHARE = 0.9


def efficiency(chip: Chip, product: DeviceWork) -> float:
    """Return the share of a chip's peak reached by a product, 0 to 1.

    A TPU keeps a square of one operand in the matrix unit while rows of the other pass through. Dimensions are padded
    to full squares (https://jax-ml.github.io/scaling-book/tpus/, "How does a TPU work?"). The compiler chooses the
    stationary operand: the better choice is assumed.

    >>> from jaxshard_magic.hardware import chip
    >>> dims = [(512, 512, k) for k in (64, 128, 192)]
    >>> products = [DeviceWork(1, 1, "bfloat16", matrix_dims=d) for d in dims]
    >>> [round(efficiency(chip("v5e"), product) / 0.95, 3) for product in products]
    [0.5, 1.0, 0.75]
    """
    reached = PEAK_SHARE[chip.kind]
    if chip.kind == "tpu" and product.matrix_dims is not None and all(product.matrix_dims):
        unit = UNIT.get(chip.key, USUAL_UNIT)
        rows, columns, summed = product.matrix_dims
        held = max(_filled(rows, ROWS) * _filled(columns, unit), _filled(columns, ROWS) * _filled(rows, unit))
        reached *= held * _filled(summed, unit)
    return reached


def matmul_seconds(chip: Chip, product: DeviceWork) -> float | None:
    """Return the seconds of a product at the published peak; None without a published figure.

    A TPU computes a float32 product in several bfloat16 passes and takes as many times as long.
    """
    rate = chip.peak(product.dtype)
    passes = product.passes if chip.kind == "tpu" else 1
    return passes * product.flops / rate if rate else None


def _filled(size: int, unit: int) -> float:
    return size / (ceil(size / unit) * unit)
