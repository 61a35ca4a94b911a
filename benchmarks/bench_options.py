"""What each option of the gradients changes: `python benchmarks/bench_options.py [cpu] [v5e]`.

A decoder of 8 layers under fsdp, compiled and not run, on 8 simulated devices and for v5e:2x4 by the chip's own
compiler: peak and temporaries of a device, FLOPs of a device with those done again, bytes sent, each also as a multiple
of the step without options. Exits with 1 where 8 microbatches leave more than a fifth of the temporaries.
"""

import argparse
import os
import sys

os.environ.setdefault("NPROC", "32")
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

import jaxshard_magic

WIDTH, HEADS, LAYERS, VOCABULARY, EXAMPLES, TIME = 512, 8, 8, 4096, 128, 256
MESHES = {"cpu": "cpu:8 data=8", "v5e": "v5e:2x4 data=8"}
OPTIONS = (
    {},
    {"microbatches": 4},
    {"microbatches": 8},
    {"microbatches": 8, "reduce": "once"},
    {"microbatches": 8, "reduce": "once-gathered"},
    {"remat": "full"},
    {"remat": "dots"},
    {"remat": 4},
    {"remat": "attention"},
    {"precision": "bf16"},
    {"microbatches": 8, "remat": "full", "precision": "bf16"},
)
LEFT = 0.2  # of the temporaries, with 8 microbatches
MIB = 2**20


def norm(x, g):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g


def attention(x, layer):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, layer[n]) for n in "qkv")
    return jnp.einsum("bthk,hkd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), layer["o"])


def mlp(x, layer):
    return jax.nn.gelu(x @ layer["up"]) @ layer["down"]


def block(x, layer):
    x = x + attention(norm(x, layer["g"]), layer)
    return x + mlp(norm(x, layer["h"]), layer), None


def loss_fn(params, tokens):
    x, _ = jax.lax.scan(block, params["embed"][tokens[:, :-1]], params["layers"])
    logits = jax.nn.log_softmax(x @ params["embed"].T)
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()


def train_step(params, moments, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda p, m: p - 1e-3 * m, params, moments), moments, loss


def shapes():
    def arr(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    head = WIDTH // HEADS
    layers = {n: arr(LAYERS, WIDTH, HEADS, head) for n in "qkv"} | {n: arr(LAYERS, WIDTH) for n in "gh"}
    layers |= {"o": arr(LAYERS, HEADS, head, WIDTH), "up": arr(LAYERS, WIDTH, 4 * WIDTH)}
    params = {"embed": arr(VOCABULARY, WIDTH), "layers": layers | {"down": arr(LAYERS, 4 * WIDTH, WIDTH)}}
    return params, params, jax.ShapeDtypeStruct((EXAMPLES, TIME + 1), jnp.int32)


def figures(mesh: str, options: dict) -> dict[str, float]:
    step = jaxshard_magic.shard(train_step, "fsdp", mesh=mesh, **options)
    step.prepare(*shapes())
    report = step.report()
    assert report.memory is not None and report.timing is not None
    device = max(report.memory.per_device, key=lambda d: d.peak or 0)
    return {
        "peak MiB": (device.peak or 0) / MIB,
        "temporaries MiB": (device.temporaries or 0) / MIB,
        "GFLOP": (report.timing.device_flops or 0) / 1e9,
        "sent MiB": sum(c.wire_bytes for c in report.collectives or ()) / MIB,
    }


def main(targets: list[str]) -> int:
    failed = False
    for target in targets:
        print(f"\n{MESHES[target]}")
        plain: dict[str, float] = {}
        for options in OPTIONS:
            found = figures(MESHES[target], options)
            plain = plain or found
            name = " ".join(f"--{k} {v}" for k, v in options.items()) or "without options"
            told = "  ".join(f"{k} {v:9.1f} ({v / plain[k]:5.2f})" for k, v in found.items())
            print(f"{name:48} {told}", flush=True)
            if options == {"microbatches": 8}:
                failed |= found["temporaries MiB"] > LEFT * plain["temporaries MiB"]
    print(f"\nlimit: 8 microbatches leave {LEFT} of the temporaries: {'missed' if failed else 'held'}")
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(MESHES), help=f"of {', '.join(MESHES)}")
    sys.exit(main(parser.parse_args().targets))
