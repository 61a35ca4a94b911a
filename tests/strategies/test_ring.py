"""Attention as a ring: the plain numbers, what goes round, what a device holds, and that all work alike."""

from collections import Counter
from importlib.util import find_spec
from itertools import product

import jax
import jax.numpy as jnp
import pytest
from support.attentions import by_distance, causal, einsum, two_masks
from support.masked import EXAMPLES, FORMS, HEADS, MASKS, TIME, attention_step
from support.positions import ran
from support.rings import CP, moves, permuted, sharded
from theory.expected import F32

import jaxshard_magic
from jaxshard_magic.program.attention.attention import DistanceSpan
from jaxshard_magic.program.attention.blockwise import AttentionForm
from jaxshard_magic.strategies.footprint import footprint
from jaxshard_magic.strategies.regions import region
from jaxshard_magic.strategies.ring_attention import chunk_starts, is_in_span, make_ring
from jaxshard_magic.strategies.sharded_lowering import ShardedLowering
from jaxshard_magic.strategies.zigzag_plan import ZigzagPlan

ON = {"sp": "seq=8", "dp+sp": "data=2 seq=4", "sp+tp": "seq=4 model=2", "fsdp+sp": "data=2 seq=4"}
QUICK = {("repeated", "segments", "fsdp+sp")}
TYPES = {"float32": (jnp.float32, 2e-4), "bfloat16": (jnp.bfloat16, 3e-2)}


@pytest.mark.parametrize(
    ("form", "mask", "strategy", "dtype"),
    [
        pytest.param(*row, marks=() if row[:3] in QUICK and row[3] == "float32" else pytest.mark.full)
        for row in product(FORMS, MASKS, ON, TYPES)
    ],
)
def test_a_ring_gives_the_plain_numbers(form, mask, strategy, dtype):
    kind, rtol = TYPES[dtype]
    keys = HEADS // 2 if form == "repeated" else None
    step, *args = attention_step(form, mask, keys=keys, dtype=kind)
    ran(sharded(step, strategy, f"cpu:8 {ON[strategy]}"), step, *args, rtol=rtol)


def layers(seen, *, n=2, wrap=lambda f: f, window=None):
    """A step of `n` layers of attention with one mask, scanned."""
    heads, head = 4, 8
    width = heads * head

    def step(params, x):
        def loss(params):
            def layer(h, p):
                q, k, v = ((h @ p[name]).reshape(*h.shape[:2], heads, head) for name in "qkv")
                return h + einsum(q, k, v, seen(h.shape[1])).reshape(h.shape) @ p["o"], None

            return jnp.mean(jax.lax.scan(wrap(layer), x, params)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        name: jax.random.normal(key, (n, width, width)) * width**-0.5 for name, key in zip("qkvo", keys, strict=False)
    }
    return step, params, jax.random.normal(keys[4], (EXAMPLES, TIME, width))


def one_layer(attend):
    """A step of attention between projections, from one array of weights."""

    def step(w, batch):
        def loss(w):
            shape = (*batch["x"].shape[:2], 4, 8)
            q, k, v = ((batch["x"] @ m).reshape(shape) for m in w)
            return jnp.mean(attend(q, k, v, batch["seen"]) ** 2)

        value, grads = jax.value_and_grad(loss)(w)
        return w - 0.1 * grads, value

    return step


@pytest.mark.ci
@pytest.mark.parametrize("attend", [by_distance, two_masks])
def test_what_is_made_of_scores_besides_has_the_plain_numbers(attend):
    """Of the first positions of some examples queries see nothing, so that under two masks no key is left out, and
    nothing is dealt out anew."""

    step = one_layer(attend)
    keys = jax.random.split(jax.random.key(0))
    w = jax.random.normal(keys[0], (3, 32, 32)) * 0.3
    seen = jnp.arange(TIME) >= jnp.arange(EXAMPLES)[:, None]
    batch = {"x": jax.random.normal(keys[1], (EXAMPLES, TIME, 32)), "seen": seen}
    ring = ran(sharded(step, "dp+sp", "cpu:8 data=2 seq=4"), step, w, batch)
    sizes = {move.bytes for move in moves(ring, w, batch) if move.kind == CP}
    assert (len(sizes) > 1) == (attend is by_distance)
    told = [advice.message for advice in ring.report().advice]
    assert "1 attention as a ring over positions" in " ".join(told)


def test_keys_and_values_go_round_and_their_gradients_behind_them():
    """Per layer 2(n-1) times forward and 4(n-1) times backward; zig-zag deals out halves of what comes into the step,
    once. Rematerialised it is the same: the result is kept."""
    n, count = 8, 2
    step, params, x = layers(causal, n=count, wrap=jax.checkpoint)
    ring = ran(sharded(step), step, params, x)
    part = x.nbytes // n
    found, told = permuted(ring, params, x)
    assert found == told == Counter({part: 6 * (n - 1) * count, part // 2: 2})
    report = ring.report()
    jobs = Counter[str | None]()
    for c in report.collectives or ():
        jobs[c.job] += c.count if c.kind == CP else 0
    assert (jobs["turn"], jobs["zig-zag"], jobs[None]) == (6 * (n - 1) * count, 2, 0)
    (positions,) = report.positions
    (turning,) = positions.rings
    assert (positions.number, positions.axes, positions.attention) == (TIME, ("seq",), "ring")
    assert (turning.turns, turning.count, turning.zigzag) == (n, count, True)
    assert (turning.bytes, turning.gradients) == (2 * part, 2 * part)


@pytest.mark.ci
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.full), 2])
def test_on_a_tpu_what_is_multiplied_goes_round_in_bfloat16(count, monkeypatch):
    """Keys and values at every turn; of what zig-zag deals out queries, keys, values and the result's gradient, and the
    gradients of keys and values, which products alone read. The result, which a loop keeps, and the gradient of the
    queries, which is scaled, stay float32, and so do sums. A loop of one trip is none: what it deals out forward it has
    backward."""
    monkeypatch.setattr(region, "find_zigzag_plan", lambda *_: ZigzagPlan())  # each attention by itself
    n = 8
    step, params, x = layers(causal, n=count, wrap=jax.checkpoint if count > 1 else lambda f: f)
    part, number = x.nbytes // n, EXAMPLES * 4 * TIME * F32 // n
    again = 6 if count > 1 else 0
    wanted = {part: 2 * (n - 1), part // 2: 4 * (n - 1) + 4, part // 4: 6 + again + 2 + 4, number // 2: 10}
    found, told = permuted(sharded(step, axes="v5e:2x4 seq=8"), params, x)
    assert found == told == Counter({size: times * count for size, times in wanted.items()})


@pytest.mark.ci
def test_where_something_needs_positions_in_order_each_attention_deals_them_out(monkeypatch):
    """Halves of queries, keys, values and the result forward, backward of its gradient and of theirs: what a gradient
    needs of what was dealt before is not dealt again where both stand in one body. Segments are whole."""

    def running(q, k, v, mask):
        return jnp.cumsum(FORMS["softmax"](q, k, v, mask), 1) / TIME

    monkeypatch.setitem(FORMS, "running", running)
    step, params, batch = attention_step("running", "segments")
    ring = sharded(step)
    found, told = permuted(ring, params, batch)
    part = EXAMPLES * TIME * 32 * F32 // 8
    assert found == told == Counter({part: 42, part // 2: 16, part // 8: 10})
    segments = EXAMPLES * TIME * 4
    assert [m.bytes for m in moves(ring, params, batch) if m.bytes == segments] == [segments]


@pytest.mark.ci
def test_what_sees_everything_is_not_dealt_out_anew():
    step, params, x = layers(lambda t: None, n=1)
    found, told = permuted(sharded(step, "dp+sp", "cpu:8 data=2 seq=4"), params, x)
    assert found == told == Counter({x.nbytes // 8: 6 * 3})


def test_bfloat16_goes_round_as_such_and_its_sums_in_float32():
    """Of a CPU both do so in float32."""
    step, params, x = layers(lambda t: None, n=1)
    ring = sharded(step, "dp+sp", "cpu:8 data=2 seq=4", precision="bf16")
    found, told = permuted(ring, params, x)
    assert found == told == Counter({x.nbytes // 8: 6 * 3})


@pytest.mark.ci
def test_a_window_goes_no_further_than_it_sees():
    """Eight positions a device: of the keys from 15 positions before on those two devices are seen beside its own."""
    at = jnp.arange(TIME)
    seen = (at[:, None] >= at) & (at[:, None] - at < 16)
    step, params, x = layers(lambda t: seen, n=1)
    ring = ran(sharded(step), step, params, x)
    found, told = permuted(ring, params, x)
    assert found == told == Counter({x.nbytes // 8: 6 * 2})
    assert ring.report().positions[0].rings[0].turns == 3


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_of_a_causal_ring_all_devices_work_alike_at_every_turn(devices):
    """Products are of whole parts; of those on the diagonal a half is needed."""
    span = DistanceSpan(0, None)
    ring = make_ring(form(span), ("seq",), devices, 48 * devices, [])
    assert ring.zigzag
    firsts = [[int(x) for x in chunk_starts(ring, d)] for d in range(devices)]
    assert sorted(x for parts in firsts for x in parts) == [24 * k for k in range(2 * devices)]
    works = [
        [
            sum(bool(is_in_span(span, ring, q, k)) for q in firsts[d] for k in firsts[(d - turn) % devices])
            for d in range(devices)
        ]
        for turn in range(devices)
    ]
    assert all(max(turn) <= 1.1 * sum(turn) / devices for turn in works)


def form(span):
    return AttentionForm(1, 0, 1.0, span, (), False, None, (None, None), jnp.float32)


@pytest.mark.ci
def test_attention_of_long_sequences_takes_a_fifth_of_the_memory_of_gathered_keys():
    """As compiled for 4,096 positions on 8 devices, value and gradient of one layer with its projections."""
    heads, head, time = 2, 64, 4096
    width = heads * head

    def step(params, x):
        def loss(params):
            q, k, v = ((x @ params[name]).reshape(2, time, heads, head) for name in "qkv")
            return jnp.mean((einsum(q, k, v, causal(time)).reshape(x.shape) @ params["o"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {name: jax.ShapeDtypeStruct((width, width), jnp.float32) for name in "qkvo"}
    x = jax.ShapeDtypeStruct((2, time, width), jnp.float32)
    mesh = jaxshard_magic.mesh("cpu:8 seq=8")
    compiled, planned = {}, {}
    for how in ("gather", "ring"):
        plan = jaxshard_magic.shard(step, "sp", mesh=mesh, attention=how).planned(params, x).plan
        assert isinstance(plan.run, ShardedLowering)
        ins, outs = ([jax.NamedSharding(mesh, spec) for spec in specs] for specs in (plan.in_specs, plan.out_specs))
        run = jax.jit(plan.run.__call__, in_shardings=ins, out_shardings=outs)
        compiled[how] = run.lower(*jax.tree.leaves((params, x))).compile()
        planned[how] = footprint(plan.run)
    temporaries = {how: c.memory_analysis().temp_size_in_bytes for how, c in compiled.items()}
    assert temporaries["ring"] <= 0.2 * temporaries["gather"]
    assert f"{time // 8},{time}]" not in compiled["ring"].as_text()  # nor of all scores
    assert f"{time},{time}]" not in compiled["ring"].as_text()
    assert temporaries["ring"] / 2 <= planned["ring"].temporaries <= 2 * temporaries["ring"]


def test_what_no_ring_takes_is_gathered_and_said(monkeypatch):
    def summed(q, k, v, mask):
        scores = jnp.cumsum(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)

    monkeypatch.setitem(FORMS, "summed", summed)
    step, params, batch = attention_step("summed")
    planned = sharded(step).planned(params, batch)
    assert planned.plan.attention == "gather"
    findings = [] if planned.rewritten is None else [finding.message for finding in planned.rewritten.findings]
    assert any("`cumsum`" in message and "test_ring.py, line" in message for message in findings)
    auto = jaxshard_magic.shard(step, "sp", mesh=jaxshard_magic.mesh("cpu:8 seq=8"), attention="auto")
    why = next(f for f in auto.planned(params, batch).plan.findings if f.code == "attention-chosen")
    assert "Not ring: no attention" in why.message


def test_rings_of_one_line_are_told_apart():
    """By their masks, which make zig-zag of one, and by their positions."""

    def step(w, x, y):
        def attended(w, h, mask):
            q, k, v = ((h @ m).reshape(*h.shape[:2], 4, 8) for m in w)
            return jnp.mean(einsum(q, k, v, mask) ** 2)

        def loss(w):
            return sum(attended(w, *each) for each in ((x, None), (x, causal(TIME)), (y, None)))

        value, grads = jax.value_and_grad(loss)(w)
        return w - 0.1 * grads, value

    w = jax.ShapeDtypeStruct((3, 32, 32), jnp.float32)
    x, y = (jax.ShapeDtypeStruct((EXAMPLES, time, 32), jnp.float32) for time in (TIME, TIME // 2))
    both = sharded(step).planned(w, x, y).plan.positions
    found = {(r.positions, r.zigzag, r.count, r.bytes, r.gradients) for one in both for r in one.rings}
    sent = 2 * EXAMPLES * TIME * 32 * F32 // 8
    assert found == {
        (TIME, False, 1, sent, sent),
        (TIME, True, 1, sent, sent),
        (TIME // 2, False, 1, sent // 2, sent // 2),
    }


@pytest.mark.ci
def test_gathered_keys_are_said_to_be_more_than_divided_heads_send():
    """Of one layer 4 x (n - 1)/n arrays are gathered and scattered; by heads 8 x (n - 1)/n of a part go over, and
    nothing else that differs."""
    time, w = 8192, jax.ShapeDtypeStruct((3, 32, 32), jnp.float32)
    array = EXAMPLES * time * 32 * F32

    def said(time):
        x = jax.ShapeDtypeStruct((EXAMPLES, time, 32), jnp.float32)
        seen = jax.ShapeDtypeStruct((EXAMPLES, time), bool)
        plain = jaxshard_magic.shard(one_layer(by_distance), "sp", mesh=jaxshard_magic.mesh("cpu:4 seq=4"))
        planned = plain.planned(w, {"x": x, "seen": seen}).plan.findings
        plain.prepare(w, {"x": x, "seen": seen})
        assert all(f.code != "attention-gathers" for f in planned)  # it takes time, and nobody reads it there
        return [advice for advice in plain.report().advice if advice.code == "attention-gathers"]

    (hint,) = said(time)
    assert hint.fix == "%%shard sp --attention heads"
    assert f"{(4 * array - 8 * array / 4) * 3 / 4 / 2**20:.2f}\u202fMiB less" in hint.message
    assert not said(time // 64)
