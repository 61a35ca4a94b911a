"""What each of the steps must communicate under each strategy, derived by hand.

All arrays are float32; n is the devices along an axis. Sizes are bytes on one device of the unreduced or gathered
array. On CPU the reduction of an fsdp gradient shows as an all-reduce (of which each device keeps its part).
"""

from collections import Counter
from dataclasses import dataclass

from .steps import CHANNELS, CLASSES, EXAMPLES, HIDDEN, LAYERS, SIDE, TIME, VOCAB, WIDTH

F32 = 4
MESHES = {
    "dp": {"data": 8},
    "fsdp": {"data": 8},
    "tp": {"data": 4, "model": 2},
    "fsdp+tp": {"data": 4, "model": 2},
    "dp+fsdp": {"data": 2, "fsdp": 4},
    "dp+fsdp+tp": {"data": 2, "fsdp": 2, "model": 2},
}
AR, AG = "all-reduce", "all-gather"


@dataclass(frozen=True)
class Weight:
    """`count` parameters of `size` bytes. `gathers`: how often fsdp gathers one of them per step, None where it is too
    small to be cut. `cut`: tensor parallelism divides it. `lookup`: its gradient is a scatter-add."""

    size: int
    count: float
    gathers: float | None
    cut: bool = True
    lookup: bool = False


@dataclass(frozen=True)
class Sum:
    """`count` all-reduces over the tensor axis, of `size` bytes for one example."""

    size: int
    count: int


@dataclass(frozen=True)
class Moves:
    weights: tuple[Weight, ...]
    sums: tuple[Sum, ...]  # with tensor parallelism only
    loss_is_cut: bool = False  # the loss sums over a dimension that tensor parallelism divides


def expected(step: str, strategy: str) -> Counter:
    """`{(kind, axes, bytes): count}` for one step."""
    moves, mesh = STEPS[step], MESHES[strategy]
    batch = tuple(a for a in mesh if a != "model")
    store = ("fsdp",) if "fsdp" in mesh else batch if "fsdp" in strategy else ()
    rest = tuple(a for a in batch if a not in store)
    found: Counter = Counter()
    for w in moves.weights:
        size = w.size // mesh.get("model", 1) if w.cut else w.size
        if not store or w.gathers is None:
            found[AR, batch, size] += w.count
            continue
        found[AG, store, size] += w.count * w.gathers
        if w.lookup and rest:
            found[AR, batch, size] += w.count
        else:
            found[AR, store, size] += w.count
            if rest:
                found[AR, rest, size // mesh[store[0]]] += w.count
    found[AR, batch, F32] += 1  # the loss
    if "model" in mesh:
        examples = EXAMPLES * mesh["model"] // 8
        for s in moves.sums:
            found[AR, ("model",), examples * s.size] += s.count
        if moves.loss_is_cut:
            found[AR, ("model",), F32] += 1
    return found


def _mlp(gates: int) -> Moves:
    """Every weight is gathered in the forward pass, and again where the backward pass needs the gradient of its input:
    not in the first block, whose input is data, but for its down projection. The very last weight is still there."""
    into = Weight(WIDTH * HIDDEN * F32, gates, LAYERS + LAYERS - 1)
    out = Weight(WIDTH * HIDDEN * F32, 1, LAYERS + LAYERS - 1)
    reduced = [Weight(w.size, w.count * LAYERS, w.gathers / LAYERS) for w in (into, out)]  # type: ignore[operator]
    sums = LAYERS + LAYERS - 1  # down forward; the input of up (and gate) backward, not in the first block
    return Moves(tuple(reduced), (Sum(WIDTH * F32, sums),))


def _cnn() -> Moves:
    """conv0 column parallel (output channels), conv1 row parallel, dense column parallel: one sum forward, after
    conv1, and one backward, the input of dense. conv0 is too small for fsdp; dense is still there when its backward
    pass reads it."""
    a, b, c = CHANNELS
    weights = (
        Weight(9 * a * b * F32, 1, None),
        Weight(9 * b * c * F32, 1, 2),
        Weight(c * CLASSES * F32, 1, 1),
    )
    return Moves(weights, (Sum(SIDE * SIDE * c * F32, 1), Sum(c * F32, 1)), loss_is_cut=True)


def _transformer(*, fused: bool = False, tied: bool = False, remat: bool = False) -> Moves:
    """A block sums twice forward (out, down) and twice backward (the inputs of q, k, v and of up); rematerialised, it
    sums after out once more. The vocabulary is cut: a lookup sums once, the head's input gradient once, and the
    cross entropy four numbers a token (the maximum, the sum, the picked logit; the sum of the gradient).

    Each block weight is gathered forward and backward. The head is still there when its backward pass begins; the
    gradient of a lookup needs no table. A tied table is both: its gradient comes in two parts.
    """
    block = [Weight(WIDTH * HIDDEN * F32, 2 * LAYERS, 2), Weight(WIDTH * WIDTH * F32, LAYERS, 2)]
    qkv = (3, LAYERS) if fused else (1, 3 * LAYERS)
    block.append(Weight(WIDTH * WIDTH * F32 * qkv[0], qkv[1], 2))
    norms = Weight(WIDTH * F32, 2 * LAYERS, None, cut=False)
    table = VOCAB * WIDTH * F32
    ends = [Weight(table, 1, 1, lookup=True), Weight(table, 1, 1)]
    token = TIME * WIDTH * F32
    sums = (Sum(token, LAYERS * (5 if remat else 4) + 2), Sum(TIME * F32, 4))
    return Moves((*block, norms, *ends), sums)


STEPS = {
    "mlp": _mlp(gates=1),
    "gated mlp": _mlp(gates=2),
    "cnn": _cnn(),
    "transformer": _transformer(),
    "transformer, fused qkv": _transformer(fused=True),
    "transformer, tied": _transformer(tied=True),
    "transformer, scanned": _transformer(),
    "transformer, remat": _transformer(remat=True),
}
