"""Large steps compiled for hardware that isn't attached: `python benchmarks/bench_targets.py [CASE ...]`.

Prints the compiler's seconds; those on top of them from `prepare` to the report, which are ours less what jax takes to
trace and lower the plain step; and the peaks of host memory of this process and of the compiler's. Each case has a
process and a cache of its own; the model is shapes from the start. Exits with 1 above a limit.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import NamedTuple

os.environ.setdefault("NPROC", "32")
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxshard_magic
from jaxshard_magic.api import get_ready
from jaxshard_magic.targets import compiler_of, target_of

SHARE = 0.10  # of the compiler's time, ours
GIB, LIMIT_GIB = 2**30, 4.0  # host memory of this process
VOCAB = 32_000


class Size(NamedTuple):
    width: int
    heads: int
    hidden: int
    layers: int


class Case(NamedTuple):
    size: Size
    mesh: str
    strategy: str
    examples: int
    time: int


ONE_B, SEVEN_B = Size(2048, 16, 8192, 18), Size(4096, 32, 16384, 33)
CASES = {
    "1b-v5e": Case(ONE_B, "v5e:16x16 data=32 model=8", "fsdp+tp", 256, 2048),
    "1b-h100": Case(ONE_B, "h100:8 data=8", "fsdp", 64, 2048),
    "7b-v5p": Case(SEVEN_B, "v5p:8x8x8 data=64 model=8", "fsdp+tp", 512, 4096),
}


class Block(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        norm = partial(nnx.RMSNorm, size.width, dtype=jnp.bfloat16, rngs=rngs)
        self.norm1, self.norm2 = norm(), norm()
        self.q, self.k, self.v = (linear(size.width, size.width) for _ in range(3))
        self.out = linear(size.width, size.width)
        self.up, self.down = linear(size.width, size.hidden), linear(size.hidden, size.width)
        self.heads = size.heads

    def __call__(self, x):
        y = self.norm1(x)
        q, k, v = (f(y).reshape(*x.shape[:2], self.heads, -1) for f in (self.q, self.k, self.v))
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Decoder(nnx.Module):
    """The layers are made by vmap, run by scan and computed again in the backward pass."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=size.layers)
        @nnx.vmap
        def stack(rngs: nnx.Rngs):
            return Block(size, rngs)

        self.embed = nnx.Embed(VOCAB, size.width, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = stack(rngs)
        self.head = nnx.Linear(size.width, VOCAB, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, block):
            return block(x)

        return self.head(run(self.embed(tokens), self.blocks))


@nnx.jit
def train_step(model, optimizer, batch):
    def loss(model):
        logits = model(batch["tokens"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def abstract(case: Case):
    """The model, the optimizer and a batch, as shapes."""
    model = nnx.eval_shape(lambda: Decoder(case.size, nnx.Rngs(0)))
    optimizer = nnx.eval_shape(lambda m: nnx.Optimizer(m, optax.adam(1e-4), wrt=nnx.Param), model)
    tokens = jax.ShapeDtypeStruct((case.examples, case.time), jnp.int32)
    return model, optimizer, {"tokens": tokens, "next": tokens}


def run(case: Case) -> dict[str, float]:
    """One case in this process."""
    mesh = jaxshard_magic.mesh(case.mesh)
    get_ready(mesh)
    model, optimizer, batch = abstract(case)
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    start = time.perf_counter()
    step = jaxshard_magic.shard(train_step, case.strategy, mesh=mesh)
    entry = step.prepare(model, optimizer, batch)
    prepared = time.perf_counter()
    memory = step.report().memory
    end = time.perf_counter()
    train_step.lower(model, optimizer, batch)
    plain = time.perf_counter() - end
    assert memory is not None
    device = memory.per_device[0]
    assert device.peak is not None and device.limit is not None
    target = target_of(mesh)
    assert target is not None
    compiler_of(target).stop()  # only what has ended is counted
    return {
        "parameters": count,
        "compiler": entry.compiled.seconds,
        "prepare": prepared - start,
        "report": end - prepared,
        "plain": plain,
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        "compiler_host": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / GIB,
        "peak": device.peak / GIB,
        "limit": device.limit / GIB,
    }


def alone(name: str) -> dict[str, float]:
    """One case in a process of its own, with nothing cached."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        done = subprocess.run(
            [sys.executable, __file__, "--here", name], stdout=subprocess.PIPE, text=True, env=environment, check=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--here", action="store_true", help="one case in this process, told as JSON")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if options.here:
        print(json.dumps(run(CASES[options.cases[0]])))
        return 0
    above = False
    for name in options.cases:
        case, got = CASES[name], alone(name)
        on_top = got["prepare"] + got["report"] - got["compiler"]
        ours = on_top - got["plain"]
        above |= ours > SHARE * got["compiler"] or got["host"] > LIMIT_GIB
        print(
            f"{name}: {got['parameters'] / 1e9:.2f}B parameters, {case.mesh}, {case.strategy}: "
            f"{got['peak']:.1f} of {got['limit']:.1f} GiB a device\n"
            f"  compiler {got['compiler']:.1f} s; on top {on_top:.2f} s ({on_top / got['compiler']:.1%}), of it plain "
            f"jax {got['plain']:.2f} s and ours {ours:.2f} s: {ours / got['compiler']:.1%}, at most {SHARE:.0%}\n"
            f"  host memory {got['host']:.2f} GiB, at most {LIMIT_GIB:g}; "
            f"the compiler's {got['compiler_host']:.2f} GiB",
            flush=True,
        )
    return above


if __name__ == "__main__":
    sys.exit(main())
