"""What a plan says and its compiled step moves is what theory says, to the byte, and each byte is told by the line that
causes it."""

import os
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from support.planned_bytes import sent
from support.thinned import thinned
from theory.expected import F32, MESHES, expected, told
from theory.steps import STEPS

import jaxshard_magic
from jaxshard_magic.analysis.collectives import module_collectives
from jaxshard_magic.analysis.hlo import parse_module
from jaxshard_magic.plan import wire_bytes

MANY = {"data": 4, "fsdp": 4, "model": 4}


def prepared(step: str, strategy: str, axes: dict[str, int]):
    call = STEPS[step]()
    mesh = jaxshard_magic.mesh(" ".join(f"{a}={n}" for a, n in axes.items()))
    sharded = jaxshard_magic.shard(call.step, strategy, mesh=mesh)
    entry = sharded.prepare(call.state, call.batch)
    return sharded.report(), entry


def by_size(wanted: Counter) -> Counter:
    """Without lines, and without sums of a single number, which compilers merge."""
    found: Counter = Counter()
    for (kind, axes, size, _), count in wanted.items():
        if size > F32:
            found[kind, axes, size] += int(count)
    return found


ALONE = {("cnn", "dp"), ("transformer", "fsdp"), ("gated mlp", "tp"), ("cnn", "dp+fsdp+tp")}
BY_OTHER_ROWS = {"transformer, fused qkv, scanned", "transformer, tied, scanned"}  # fused, tied and scanned ones
ALWAYS = [
    (step, how)
    for step, how in product(STEPS, MESHES)
    if (how == "fsdp+tp" and step not in BY_OTHER_ROWS) or (step, how) in ALONE
]


@pytest.mark.parametrize(("step", "strategy"), thinned(product(STEPS, MESHES), ALWAYS))
def test_a_step_moves_what_theory_says_from_the_lines_that_theory_says(step, strategy):
    report, entry = prepared(step, strategy, MESHES[strategy])
    wanted = expected(step, strategy)
    assert sent(entry.plan.run) == by_size(wanted)  # before anything was compiled
    assert told(report.collectives or (), wanted) == wanted
    assert {c.phase for c in report.collectives} <= {"forward", "backward"}
    assert {c.file for c in report.collectives} == {"steps.py"}
    (source,) = report.sources
    lines = dict(zip(source.numbers, source.text, strict=True))
    assert all(lines[c.line].strip() == c.source for c in report.collectives)
    program = module_collectives(parse_module(entry.compiled.as_text()), MESHES[strategy])
    wire = sum(wire_bytes(m.kind, m.group_size, m.count * m.bytes) for m in program)
    assert sum(c.wire_bytes for c in report.collectives) == wire


@pytest.mark.ci
@pytest.mark.parametrize("step", ["gated mlp", "transformer, scanned"])
def test_on_64_devices_in_three_dimensions_too(step):
    tests = Path(__file__).parents[1]
    run = [sys.executable, __file__, step]
    path = os.pathsep.join(filter(None, [str(tests), str(tests.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["equal"]


if __name__ == "__main__":
    jaxshard_magic.mesh("cpu:64 data=64")
    wanted = expected(sys.argv[1], "dp+fsdp+tp", MANY)
    got = told(prepared(sys.argv[1], "dp+fsdp+tp", MANY)[0].collectives or (), wanted)
    print("equal" if got == wanted else f"not equal: {got - wanted} {wanted - got}")
