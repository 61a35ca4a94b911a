"""The collectives of a GPT-2-sized step, line by line of its cell, sent and timed as worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from jaxshard_magic.analysis.roofline import waits_by_axes
from jaxshard_magic.report import Collective, SourceExcerpt, TimeSpread, Timing

KIB, MIB = 2**10, 2**20
GPT = {"data": 4, "model": 2}

CELL = """\
%%shard fsdp+tp --check
import jax, jax.numpy as jnp, optax
from gpt2 import State, block, norm

tx = optax.adamw(3e-4, weight_decay=0.1)

def loss_fn(params, batch):
    tokens, targets = batch["tokens"], batch["targets"]
    x = params["wte"][tokens] + params["wpe"]
    x = x.astype(jnp.bfloat16)
    # twelve blocks, stacked on dim 0
    x, _ = jax.lax.scan(block, x, params["blocks"])
    x = norm(x, params["ln_f"])
    logits = (x @ params["wte"].T).astype(jnp.float32)
    return cross_entropy(logits, targets).mean()

def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    updates, opt = tx.update(grads, state.opt, state.params)
    params = optax.apply_updates(state.params, updates)
    return State(params, opt, state.step + 1), loss

state, loss = train_step(state, batch)
""".splitlines()

# gpt2.py from its 28th line on: the body of the scan.
MODULE = """\
def block(x, p):
    h = norm(x, p["ln_1"])
    # three times twelve heads
    qkv = h @ p["attn"]["qkv"]["kernel"]
    q, k, v = jnp.split(qkv, 3, axis=-1)
    q, k, v = (heads(each, 12) for each in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / 8
    scores = jnp.where(causal(scores), scores, -jnp.inf)
    mixed = jax.nn.softmax(scores) @ v

    x = x + joined(mixed) @ p["attn"]["out"]["kernel"]
    return x + mlp(norm(x, p["ln_2"]), p["mlp"]), None


def mlp(h, p):
    # four times as wide
    h = h @ p["up"]["kernel"]
    h = jax.nn.gelu(h)
    return h @ p["down"]["kernel"]
""".splitlines()
AT = 28

GPT_LINKS = {"data": 34e9, "model": 45e9}  # bytes a second


def source(name: str, text: Sequence[str], home: bool = False, numbers: tuple[int, ...] | None = None) -> SourceExcerpt:
    """A source whose lines count up from 1, or are `numbers` of a file that has more."""
    return SourceExcerpt(name, numbers or tuple(range(1, len(text) + 1)), tuple(text), home)


def moved(
    kind: str,
    axis: str,
    count: int,
    size: int,
    what: str | None,
    at: tuple[int, int | None],
    phase: str | None,
) -> Collective:
    """A collective of the GPT step, over one axis or both ("data+model"), with what it sends on a ring and how long
    that takes; `at` is the line of the cell, and that of gpt2.py which it called."""
    axes = tuple(axis.split("+"))
    n = prod(GPT[a] for a in axes)
    ring = {"all-reduce": 2 * (n - 1), "collective-permute": n}.get(kind, n - 1)
    wire = count * size * ring // n
    line, deeper = at
    seconds = wire / min(GPT_LINKS[a] for a in axes)
    name, number, called = ("cell [7]", line, None) if deeper is None else ("gpt2.py", deeper, f"cell [7]:{line}")
    text = (CELL[line - 1] if deeper is None else MODULE[deeper - AT]).strip()
    return Collective(
        *(kind, axes, n, count, size, wire, seconds, phase, number, text, name),
        what=what,
        exposed=seconds,
        called=called,
    )


_KERNELS = (
    ("blocks.mlp.up.kernel", 4608 * KIB, 44),
    ("blocks.mlp.down.kernel", 4608 * KIB, 46),
    ("blocks.attn.qkv.kernel", 3456 * KIB, 31),
    ("blocks.attn.out.kernel", 1152 * KIB, 38),
)
_WTE = 50257 * 768 * 4

# On a line of the cell: 24 gathers of 13.5 MiB over data (243 MiB sent), their gradients, 48 sums of activations, ...
GPT_COLLECTIVES = (
    *(
        moved("all-gather", "data", 12, size, f"params.{name}", (12, at), phase)
        for name, size, at in _KERNELS
        for phase in ("forward", "backward")
    ),
    moved("reduce-scatter", "data", 48, 3456 * KIB, "gradient of params.blocks.mlp.up.kernel and 3 more",
          (12, 31), "backward"),
    moved("all-reduce", "model", 24, 6 * MIB, "activation bf16[8,1024,768]", (12, 38), "forward"),
    moved("all-reduce", "model", 24, 6 * MIB, "gradient of an activation bf16[8,1024,768]",
          (12, 31), "backward"),
    moved("all-gather", "data", 1, _WTE, "params.wte.embedding", (14, None), "forward"),
    moved("all-gather", "data", 1, _WTE, "params.wte.embedding", (14, None), "backward"),
    moved("reduce-scatter", "data", 1, _WTE, "gradient of params.wte.embedding", (14, None), "backward"),
    moved("all-to-all", "data", 1, 12 * MIB, "activation bf16[8,1024,768]", (9, None), "forward"),
    moved("all-reduce", "data+model", 1, 4, "a number, f32[]", (15, None), "forward"),
)  # fmt: skip

GPT_STEP = TimeSpread(0.0468, 0.0473, 0.0491)
GPT_SOURCES = (
    source("cell [7]", CELL, home=True),
    source("gpt2.py", MODULE, numbers=tuple(range(AT, AT + len(MODULE)))),
)


def untimed(collectives: tuple[Collective, ...] | None) -> tuple[Collective, ...]:
    """The same where no chip is named, so that no time is predicted."""
    return tuple(replace(c, seconds=None, exposed=None) for c in collectives or ())


def predicted_timing(collectives: tuple[Collective, ...], step_s: TimeSpread | None, calls: int) -> Timing:
    """What a device does itself, 17.6 ms, and then what of its communication nothing hides."""
    waits = waits_by_axes(collectives)
    spent = sum(wait.seconds for wait in waits)
    known = {
        "compute_s": 0.0176,
        "communication_s": sum(c.seconds or 0 for c in collectives),
        "links": GPT_LINKS,
    }
    known |= {"exposed_s": spent, "overlap": "by rule", "waits": waits}
    return Timing(6.8, calls, calls, step_s, 0.0176 + spent, "communication", on="TPU v5e", **known)
