"""Experts and positions that are divided, made by hand."""

from dataclasses import replace

from support.sample_collectives import KIB, MIB, source

from jaxshard_magic.report import Collective, ExpertLoad, Experts, Positions, Report, Ring

AXES = {"expert": 4, "seq": 8}
NUMBER, TOKENS, GROUPS, PLACES = 32, 4096, 16, 16
HOT, ROOM = 5, GROUPS * PLACES  # the expert that more choose than it has places for

CELL = source(
    "cell [4]",
    (
        "def block(x, p):",
        "    x = x + attention(x, p)",
        "    gates = jax.nn.softmax(x @ p['router'])",
        "    best, chosen = jax.lax.top_k(gates, 2)",
        "    rows = jnp.einsum('gsec,gsm->egcm', dispatch, x)",
        "    return jnp.einsum('gsec,egcm->gsm', combine, experts(p, rows))",
    ),
    home=True,
)


def load(layer: int) -> ExpertLoad:
    """A layer in which one expert has a quarter more than its places, and which rest is even but for its number."""
    others = (2 * TOKENS - ROOM * 5 // 4) // (NUMBER - 1)
    chosen = [others - layer * (e % 3) for e in range(NUMBER)]
    chosen[HOT + layer] += 2 * TOKENS - sum(chosen)
    kept = tuple(min(rows, ROOM) for rows in chosen)
    return ExpertLoad(TOKENS, 2, ROOM, GROUPS, tuple(chosen), kept, 40, "cell [4]", 4)


EXPERTS = Experts(NUMBER, ("expert",), "places", tuple(map(load, range(4))))
RING = Ring(8, 4, 4 * MIB, 8 * MIB, True, "cell [4]", 2)
POSITIONS = Positions(4096, ("seq",), "ring", (RING,))


def moved(kind: str, axis: str, job: str, line: int, count: int, size: int, wire: int) -> Collective:
    """One kind of collective of the cell."""
    n = AXES[axis]
    what, text = f"{job}: activation f32[16,64]", CELL.text[line - 1].strip()
    return Collective(kind, (axis,), n, count, size, wire, None, "forward", line, text, "cell [4]", None, what, job=job)


COLLECTIVES = (
    moved("all-to-all", "expert", "dispatch", 5, 8, 4 * MIB, 24 * MIB),
    moved("all-to-all", "expert", "combine", 6, 8, 4 * MIB, 24 * MIB),
    moved("collective-permute", "seq", "turn", 2, 56, 2 * MIB, 112 * MIB),
    moved("collective-permute", "seq", "zig-zag", 2, 32, 512 * KIB, 16 * MIB),
)


def with_divided(report: Report) -> Report:
    """The report with both."""
    return replace(
        report,
        collectives=COLLECTIVES,
        sources=(CELL,),
        timing=None,
        experts=(EXPERTS,),
        positions=(POSITIONS,),
        advice=(),
        check=None,
    )
