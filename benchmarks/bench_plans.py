"""What plans say beside what their programs do: `python benchmarks/bench_plans.py [PAIR ...]`.

A pair is a model with its strategy on a slice that isn't attached. What a device sends and how long a step is predicted
to take is told by the plan alone, then by the program that the slice's own compiler makes. Prints both, and whether the
pairs stand in the same order by both; each pair has a process of its own. Exits with 1 where a figure is further apart
than the limit.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("NPROC", "32")
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax
from bench_targets import Case, Size, abstract, train_step

import jaxshard_magic
from jaxshard_magic.search import Requests, candidates
from jaxshard_magic.search.candidates import Candidate
from jaxshard_magic.search.plan_estimate import estimate_plan, to_report_collective
from jaxshard_magic.strategies.planned_collectives import planned_collectives
from jaxshard_magic.strategies.sharded_lowering import ShardedLowering
from jaxshard_magic.targets import target_of

LIMIT = 0.10
MIB = 2**20


class Pair(NamedTuple):
    """`made`: the step and the shapes of its arguments."""

    made: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    mesh: str
    strategy: str


def decoder(width: int, layers: int, examples: int, time: int) -> Callable[[], Any]:
    size = Size(width, width // 128, 4 * width, layers)
    return lambda: (train_step, abstract(Case(size, "", "", examples, time)))


def mlp(width: int, layers: int, rows: int) -> Callable[[], Any]:
    """Layers of one stack, run by a scan."""

    @jax.jit
    def step(params: Any, moments: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
                return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

            return jnp.square(jax.lax.scan(jax.checkpoint(layer), batch, params)[0]).astype(jnp.float32).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optax.adam(1e-4).update(grads, moments)
        return optax.apply_updates(params, updates), moments, value

    def made() -> Any:
        shapes = {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}
        params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
        moments = jax.eval_shape(optax.adam(1e-4).init, params)
        return step, (params, moments, jax.ShapeDtypeStruct((rows, width), jnp.bfloat16))

    return made


PAIRS = {
    "mlp-v5p-cube": Pair(mlp(8192, 8, 64), "v5p:4x4x4 data=64", "fsdp"),
    "mlp-v4-cube": Pair(mlp(8192, 8, 64), "v4:4x4x4 data=64", "fsdp"),
    "mlp-v5e": Pair(mlp(8192, 8, 256), "v5e:4x4 data=16", "fsdp"),
    "1b-v5p-cube": Pair(decoder(2048, 18, 256, 2048), "v5p:4x4x4 data=64", "fsdp"),
    "1b-tpu7x-cube": Pair(decoder(2048, 18, 256, 2048), "tpu7x:4x4x4 data=128", "fsdp"),
    "1b-v5e-fsdp": Pair(decoder(2048, 18, 64, 2048), "v5e:4x4 data=16", "fsdp"),
    "1b-v5e-tp": Pair(decoder(2048, 18, 64, 2048), "v5e:4x4 data=4 model=4", "fsdp+tp"),
    "1b-v6e-dp": Pair(decoder(2048, 18, 64, 2048), "v6e:4x4 data=16", "dp"),
    "7b-v5p-fsdp": Pair(decoder(4096, 33, 64, 4096), "v5p:2x4x4 data=32", "fsdp"),
    "7b-v5p-tp": Pair(decoder(4096, 33, 64, 4096), "v5p:2x4x4 data=8 model=4", "fsdp+tp"),
    "7b-v6e": Pair(decoder(4096, 33, 64, 2048), "v6e:4x8 data=32", "fsdp"),
    "7b-cube-dp+fsdp": Pair(decoder(4096, 33, 128, 4096), "v5p:4x4x4 data=4 fsdp=16", "dp+fsdp"),
}


def figures(pair: Pair) -> dict[str, float]:
    """One pair in this process."""
    mesh = jaxshard_magic.mesh(pair.mesh)
    made, args = pair.made()
    target = target_of(mesh)
    assert target is not None
    (candidate,) = candidates(Requests([pair.strategy], mesh))
    assert isinstance(candidate, Candidate)
    step = jaxshard_magic.shard(made, pair.strategy, mesh=mesh)
    hold = step.planned(*args).plan.run
    assert isinstance(hold, ShardedLowering)
    known = estimate_plan(step, candidate, args, {}, target.chip)
    step.prepare(*args)
    report = step.report()
    timing, sent = report.timing, report.collectives
    assert known.seconds is not None and timing is not None and sent is not None
    assert timing.predicted_step_s is not None
    return {
        "planned": sum(to_report_collective(move).wire_bytes for move in planned_collectives(hold)),
        "sent": sum(c.wire_bytes for c in sent),
        "planned_s": known.seconds,
        "predicted_s": timing.predicted_step_s,
    }


def told(name: str) -> dict[str, float]:
    """Prints a pair."""
    done = subprocess.run([sys.executable, __file__, "--here", name], stdout=subprocess.PIPE, text=True, check=True)
    got = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{name:16s} sent {got['planned'] / MIB:9.1f} MiB planned, {got['sent'] / MIB:9.1f} compiled "
        f"({_apart(got['planned'], got['sent']):+.1%}); step {1e3 * got['planned_s']:8.2f} ms planned, "
        f"{1e3 * got['predicted_s']:8.2f} of its program ({_apart(got['planned_s'], got['predicted_s']):+.1%})",
        flush=True,
    )
    return got


def _apart(planned: float, compiled: float) -> float:
    return planned / compiled - 1 if compiled else 0.0


def main(names: Sequence[str]) -> None:
    found = {name: told(name) for name in names}
    far = [
        name
        for name, got in found.items()
        if abs(_apart(got["planned"], got["sent"])) > LIMIT or abs(_apart(got["planned_s"], got["predicted_s"])) > LIMIT
    ]
    orders = [sorted(found, key=lambda name: found[name][by]) for by in ("planned_s", "predicted_s")]
    print(f"{len(found) - len(far)} of {len(found)} within {LIMIT:.0%}{': not ' * bool(far)}{', '.join(far)}")
    print("the same order by both" if orders[0] == orders[1] else f"order planned {orders[0]}, compiled {orders[1]}")
    sys.exit(bool(far) or orders[0] != orders[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PAIRS, []])
    parser.add_argument("--here", choices=PAIRS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(figures(PAIRS[options.here])))
    else:
        main(options.names or list(PAIRS))
