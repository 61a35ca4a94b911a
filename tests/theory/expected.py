"""What each of the steps must communicate under each strategy, and which of its lines causes it, derived by hand.

All arrays are float32; n is the devices along an axis. Sizes are bytes on one device of the unreduced or gathered
array. On CPU the reduction of an fsdp gradient shows as an all-reduce (of which each device keeps its part), but for
that of a lookup, which is scattered by hand.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from jaxshard_magic.report import Collective

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
AR, AG, RS = "all-reduce", "all-gather", "reduce-scatter"


@dataclass(frozen=True)
class Weight:
    """`count` parameters of `size` bytes, used on `line`. `gathers`: how often fsdp gathers one of them per step, None
    where it is too small to be cut. `cut`: tensor parallelism divides it. `lookup`: its gradient is a scatter-add."""

    line: str
    size: int
    count: float
    gathers: float | None
    cut: bool = True
    lookup: bool = False


@dataclass(frozen=True)
class Sum:
    """`count` all-reduces over the tensor axis, of `size` bytes for one example, caused by `line`."""

    line: str
    size: int
    count: int


@dataclass(frozen=True)
class Moves:
    weights: tuple[Weight, ...]
    sums: tuple[Sum, ...]  # with tensor parallelism only
    loss: str  # the line that takes the mean over the examples
    loss_is_cut: bool = False  # the loss sums over a dimension that tensor parallelism divides


def expected(step: str, strategy: str, mesh: Mapping[str, int] | None = None) -> Counter:
    """`{(kind, axes, bytes, line): count}` for one step; a line is told by a part of its text."""
    moves, mesh = STEPS[step], MESHES[strategy] if mesh is None else mesh
    batch = tuple(a for a in mesh if a != "model")
    store = ("fsdp",) if "fsdp" in mesh else batch if "fsdp" in strategy else ()
    rest = tuple(a for a in batch if a not in store)
    found: Counter = Counter()
    for w in moves.weights:
        size = w.size // mesh.get("model", 1) if w.cut else w.size
        if not store or w.gathers is None:
            found[AR, batch, size, w.line] += w.count
            continue
        found[AG, store, size, w.line] += w.count * w.gathers
        found[RS if w.lookup else AR, store, size, w.line] += w.count
        if rest:
            found[AR, rest, size // mesh[store[0]], w.line] += w.count
    found[AR, batch, F32, moves.loss] += 1
    if "model" in mesh:
        examples = EXAMPLES // prod(mesh[a] for a in batch)
        for s in moves.sums:
            found[AR, ("model",), examples * s.size, s.line] += s.count
        if moves.loss_is_cut:
            found[AR, ("model",), F32, moves.loss] += 1
    return found


def told(collectives: Iterable[Collective], wanted: Counter) -> Counter:
    """A report's collectives in the same form: their lines as the texts of `wanted` that they have in them, others as
    they are."""
    found: Counter = Counter()
    texts = {key[-1] for key in wanted}
    for c in collectives:
        line = next((t for t in texts if t in (c.source or "")), f"{c.file}:{c.line} {c.source}")
        found[c.kind, c.axes, c.bytes, line] += c.count
    return found


def _mlp(gates: int) -> Moves:
    """Every weight is gathered in the forward pass, and again where the backward pass needs the gradient of its input:
    not in the first block, whose input is data, but for its down projection. The very last weight is still there."""
    into = Weight("hidden = ", WIDTH * HIDDEN * F32, gates, LAYERS + LAYERS - 1)
    out = Weight('hidden @ p["down"]', WIDTH * HIDDEN * F32, 1, LAYERS + LAYERS - 1)
    reduced = [Weight(w.line, w.size, w.count * LAYERS, w.gathers / LAYERS) for w in (into, out)]  # type: ignore[operator]
    sums = (  # down forward; the input of up (and gate) backward, not in the first block
        Sum('hidden @ p["down"]', WIDTH * F32, LAYERS),
        Sum("hidden = ", WIDTH * F32, LAYERS - 1),
    )
    return Moves(tuple(reduced), sums, loss="(x - batch")


def _cnn() -> Moves:
    """conv0 column parallel (output channels), conv1 row parallel, dense column parallel: one sum forward, after
    conv1, and one backward, the input of dense. conv0 is too small for fsdp; dense is still there when its backward
    pass reads it."""
    a, b, c = CHANNELS
    weights = (
        Weight('params["conv0"]', 9 * a * b * F32, 1, None),
        Weight('params["conv1"]', 9 * b * c * F32, 1, 2),
        Weight('params["dense"]', c * CLASSES * F32, 1, 1),
    )
    sums = (Sum('params["conv1"]', SIDE * SIDE * c * F32, 1), Sum('params["dense"]', c * F32, 1))
    return Moves(weights, sums, loss='params["dense"]', loss_is_cut=True)


def _transformer(*, fused: bool = False, tied: bool = False, scanned: bool = False, remat: bool = False) -> Moves:
    """A block sums twice forward (out, down) and twice backward (the inputs of q, k, v and of up); rematerialised, it
    sums after out once more. The vocabulary is cut: a lookup sums once, the head's input gradient once, and the
    cross entropy four numbers a token (the maximum, the sum, the picked logit; the sum of the gradient).

    Each block weight is gathered forward and backward. The head is still there when its backward pass begins; the
    gradient of a lookup needs no table. A tied table is both: its gradient comes in two parts. With the blocks in a
    loop nothing else is gathered in between, and the looked up table is still there for the head.
    """
    mlp, out, into = 'p["up"]) @ p["down"]', '@ p["out"]', '@ p["qkv"]' if fused else "(y @ p[n])"
    look, head, softmax = 'params["embed"][', "logits = x @", "log_softmax"
    block = [Weight(mlp, WIDTH * HIDDEN * F32, 2 * LAYERS, 2), Weight(out, WIDTH * WIDTH * F32, LAYERS, 2)]
    qkv = (3, LAYERS) if fused else (1, 3 * LAYERS)
    block.append(Weight(into, WIDTH * WIDTH * F32 * qkv[0], qkv[1], 2))
    norms = Weight("lax.rsqrt", WIDTH * F32, 2 * LAYERS, None, cut=False)
    table = VOCAB * WIDTH * F32
    ends = [Weight(look, table, 1, 1, lookup=True), Weight(head, table, 1, 0 if tied and scanned else 1)]
    token = TIME * WIDTH * F32
    sums = (
        Sum(out, token, LAYERS * (2 if remat else 1)),
        Sum(mlp, token, LAYERS * 2),
        Sum(into, token, LAYERS),
        Sum(look, token, 1),
        Sum(head, token, 1),
        Sum(softmax, TIME * F32, 4),
    )
    return Moves((*block, norms, *ends), sums, loss="-jnp.mean(picked)")


STEPS = {
    "mlp": _mlp(gates=1),
    "gated mlp": _mlp(gates=2),
    "cnn": _cnn(),
    "transformer": _transformer(),
    "transformer, fused qkv": _transformer(fused=True),
    "transformer, tied": _transformer(tied=True),
    "transformer, scanned": _transformer(),
    "transformer, fused qkv, scanned": _transformer(fused=True),
    "transformer, tied, scanned": _transformer(tied=True, scanned=True),
    "transformer, remat": _transformer(remat=True),
}
