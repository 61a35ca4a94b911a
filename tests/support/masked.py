"""Train steps whose attention is written in different ways, under different masks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from support.attentions import added, by_hand, causal, divided_later, of_jax

WIDTH, TIME, EXAMPLES, HEADS, WORDS = 32, 64, 4, 8, 97


def _repeated(q, k, v, mask):
    """Of fewer heads of keys and values."""
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))
    return by_hand(q, k, v, mask)


FORMS: dict[str, Callable[..., Any]] = {
    "softmax": by_hand,
    "by hand": divided_later,
    "added": added,
    "of jax": of_jax,
    "repeated": _repeated,
}
MASKS = ("full", "causal", "segments")


def mask_of(kind: str, segments: Any) -> Any:
    """What may be seen of (examples or 1, 1, queries, keys); segments see the past of their own."""
    past = causal(TIME)[None, None]
    if kind == "full":
        return jnp.ones_like(past)
    return past if kind == "causal" else past & (segments[:, :, None] == segments[:, None])[:, None]


def attention_step(
    form: str, mask: str = "causal", *, heads: int = HEADS, keys: int | None = None, dtype: Any = jnp.float32
) -> tuple[Callable[..., Any], Any, Any]:
    """A step of a model of one layer, its parameters and its batch; `keys`: heads of keys and values."""
    keys, head = keys or heads, WIDTH // heads

    def loss(params, batch):
        p = jax.tree.map(lambda a: a.astype(dtype), params)
        x = p["embed"][batch["token"]]
        q, k, v = ((x @ p[n]).reshape(*x.shape[:2], h, head) for n, h in (("q", heads), ("k", keys), ("v", keys)))
        mixed = FORMS[form](q, k, v, mask_of(mask, batch["segment"]))
        x = x + mixed.reshape(x.shape) @ p["out"]
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        logits = (x @ p["embed"].T).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["token"][..., None], -1).mean()

    def train_step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), value

    shapes = {
        "embed": (WORDS, WIDTH),
        "q": (WIDTH, WIDTH),
        "k": (WIDTH, keys * head),
        "v": (WIDTH, keys * head),
    }
    shapes |= {"out": (WIDTH, WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    drawn = zip(jax.random.split(jax.random.key(0), len(shapes)), shapes.items(), strict=True)
    params = {name: jax.random.normal(key, shape) * shape[-1] ** -0.5 for key, (name, shape) in drawn}
    token, segment = jax.random.randint(jax.random.key(1), (2, EXAMPLES, TIME), 0, WORDS)
    return train_step, params, {"token": token, "segment": jnp.sort(segment // 32, 1)}
