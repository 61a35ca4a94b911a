"""Attention with heads divided in the place of positions: the plain numbers, and what moves around it."""

from collections import Counter
from importlib.util import find_spec
from itertools import product

import jax
import jax.numpy as jnp
import pytest
from support.attentions import by_hand
from support.masked import EXAMPLES, FORMS, HEADS, MASKS, TIME, WIDTH, attention_step
from support.positions import ran, same
from support.refusals import refusal
from support.thinned import thinned
from theory import steps
from theory.expected import AG, F32

import jaxshard_magic
from jaxshard_magic.plan import wire_bytes
from jaxshard_magic.search.candidates import Requests, candidates
from jaxshard_magic.strategies.planned_collectives import planned_collectives

A2A, RS = "all-to-all", "reduce-scatter"
ON = {"sp": "seq=8", "dp+sp": "data=2 seq=4", "sp+tp": "seq=2 model=4", "fsdp+sp": "data=4 seq=2"}
QUICK = {("by hand", "full", "sp+tp"), ("of jax", "segments", "fsdp+sp")}


def divided(step, strategy="sp", axes="cpu:4 seq=4", **options):
    return jaxshard_magic.shard(step, strategy, mesh=jaxshard_magic.mesh(axes), attention="heads", **options)


def moved(sharded, axis="seq"):
    """What activations of attention move over the axis of the positions, as compiled: by kind and bytes."""
    found = Counter()
    for c in sharded.report().collectives or ():
        if axis in c.axes and c.kind in (A2A, AG, RS):
            found[c.kind, c.bytes] += c.count
    return found


def told(sharded, *args, axis="seq"):
    """The same as the plan tells it."""
    found = Counter()
    for move in planned_collectives(sharded.planned(*args).plan.run):
        if axis in move.axes and move.kind in (A2A, AG, RS):
            found[move.kind, move.bytes] += move.count
    return found


@pytest.mark.parametrize(
    ("form", "mask", "strategy"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.full)
        for row in product(FORMS, MASKS, ON)
        if row[0] != "repeated"
    ],
)
def test_any_form_under_any_mask_gives_the_plain_numbers(form, mask, strategy):
    step, *args = attention_step(form, mask)
    ran(divided(step, strategy, ON[strategy]), step, *args)


ARRAY = EXAMPLES * TIME * WIDTH * F32  # of queries, keys, values, or the result


@pytest.mark.parametrize("form", thinned(["softmax", "of jax"], ["softmax"]))
def test_an_attention_sends_four_all_to_alls_a_direction_and_no_gather(form):
    step, *args = attention_step(form)
    found = ran(divided(step), step, *args)
    assert moved(found) == told(found, *args) == {(A2A, ARRAY // 4): 8}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("form", "times"),
    [
        pytest.param({}, 8, marks=pytest.mark.full),
        ({"scan": True}, 8),
        pytest.param({"scan": True, "remat": True}, 12, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_layers_of_a_model_keep_what_was_exchanged_for_the_backward_pass(form, times):
    """Rematerialised, the backward pass does the forward one again."""
    call = steps.transformer(**form)
    sharded = divided(call.step)
    same(sharded(call.state, call.batch), jax.jit(call.step)(call.state, call.batch))
    token = steps.EXAMPLES * steps.TIME * steps.WIDTH * F32
    found = {(A2A, token // 4): times * steps.LAYERS}
    assert moved(sharded) == told(sharded, call.state, call.batch) == found


def test_keys_and_values_of_grouped_queries_are_sent_once_and_not_for_each_query():
    for form in ("of jax", "repeated"):
        step, *args = attention_step(form, keys=4)
        found = ran(divided(step), step, *args)
        assert moved(found) == told(found, *args) == {(A2A, ARRAY // 4): 4, (A2A, ARRAY // 8): 4}


@pytest.mark.ci
def test_where_key_heads_do_not_divide_groups_do_and_keys_are_gathered():
    step, *args = attention_step("of jax", keys=2)
    found = ran(divided(step), step, *args)
    keys = ARRAY // 4
    assert moved(found) == told(found, *args) == {(A2A, ARRAY // 4): 4, (AG, keys): 2, (RS, keys): 2}


@pytest.mark.ci
def test_one_long_example_exchanges_its_heads_over_all_axes():
    step, params, batch = attention_step("softmax", "full")
    args = params, {name: x[:1] for name, x in batch.items()}
    found = ran(divided(step, axes="cpu:8 data=2 seq=4"), step, *args)
    assert moved(found) == told(found, *args) == {(A2A, ARRAY // EXAMPLES // 8): 8}


@pytest.mark.ci
@pytest.mark.parametrize("form", ["gather", "heads"])
def test_a_maximum_over_windows_of_positions_has_the_plain_gradient(form):
    """Which XLA takes for another where windows overlap and positions are divided: it is taken of all positions."""

    def step(params, x):
        def loss(params):
            q, k, v = ((x @ m).reshape(*x.shape[:2], HEADS, -1) for m in params)
            h = by_hand(q, k, v).reshape(x.shape) + x @ params[0]
            h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 3, 1), (1, 1, 1), "SAME")
            return jnp.mean((h @ params[1]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return params - grads, value

    keys = jax.random.split(jax.random.key(0))
    params = jax.random.normal(keys[0], (3, WIDTH, WIDTH)) / 6
    x = jax.random.normal(keys[1], (EXAMPLES, TIME, WIDTH))
    sharded = jaxshard_magic.shard(step, "sp", mesh=jaxshard_magic.mesh("cpu:4 seq=4"), attention=form)
    ran(sharded, step, params, x)


@pytest.mark.ci
def test_a_mask_made_of_data_is_gathered_and_no_scores_are():
    step, *args = attention_step("softmax", "segments")
    found = moved(ran(divided(step), step, *args))
    assert found.pop((A2A, ARRAY // 4)) == 8
    assert max(size for _, size in found) <= EXAMPLES * TIME * F32


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [{"microbatches": 2}, pytest.param({"microbatches": 2, "reduce": "once"}, marks=pytest.mark.full)],
)
def test_microbatches_exchange_a_part_at_each_trip(options):
    step, *args = attention_step("softmax")
    found = ran(divided(step, **options), step, *args)
    assert moved(found)[A2A, ARRAY // 8] == 16


@pytest.mark.full
def test_of_narrow_products_a_cpu_exchanges_wide_arrays():
    step, params, batch = attention_step("softmax", dtype=jnp.bfloat16)
    sharded = divided(step)
    same(sharded(params, batch), jax.jit(step)(params, batch), 0.1)
    assert moved(sharded) == told(sharded, params, batch) == {(A2A, ARRAY // 4): 8}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("attention", "axes", "kind", "each"),
    [
        ("heads", "pipe=2 seq=4", A2A, 8),
        pytest.param("heads", "pipe=4 seq=2", A2A, 8, marks=pytest.mark.full),
        ("ring", "pipe=2 seq=4", "collective-permute", (2 + 4) * 3),
    ],
)
def test_attention_in_the_stages_of_a_pipeline_takes_the_same_form(attention, axes, kind, each):
    """Of four stages two have no attention."""
    call = steps.transformer()
    step = jaxshard_magic.shard(call.step, "pp+sp", mesh=f"cpu:8 {axes}", attention=attention, microbatches=4)
    same(step(call.state, call.batch), jax.jit(call.step)(call.state, call.batch))
    assert [positions.attention for positions in step.report().positions] == [attention]
    moves = [c for c in step.report().collectives or () if c.axes == ("seq",) and c.kind in (kind, AG, RS)]
    assert {c.kind for c in moves} == {kind}
    assert sum(c.count for c in moves) == each * 4 * steps.LAYERS


@pytest.mark.ci
def test_over_the_axis_of_tensor_parallelism_heads_are_divided_as_they_are():
    """Whatever is asked for; of a ring it is said."""
    call = steps.transformer()
    plans = [
        jaxshard_magic.shard(call.step, "sp+tp", mesh="cpu:4 model=4", attention=form)
        .planned(call.state, call.batch)
        .plan
        for form in (None, "heads", "ring")
    ]
    assert {plan.attention for plan in plans} == {"heads"}
    assert len({planned_collectives(plan.run) for plan in plans}) == 1
    assert [[f.code for f in plan.findings] for plan in plans] == [[], ["inside"], ["no-ring"]]


@pytest.mark.parametrize("axis", ["sp", "cp"])
def test_the_axis_of_context_parallelism_is_one_of_positions(axis):
    step, params, batch = attention_step("softmax")
    sharded = divided(step, axes=f"cpu:4 {axis}=4")
    assert told(sharded, params, batch, axis=axis) == {(A2A, ARRAY // 4): 8}


@pytest.mark.parametrize(("heads", "says"), [(2, "2 heads, which do not"), (1, "one head, which does not")])
def test_heads_that_do_not_divide_are_refused_with_their_number(heads, says):
    step, params, batch = attention_step("softmax", heads=heads)
    said = refusal(divided(step).planned, params, batch)
    assert says in said and "divide by seq=4; use" in said


@pytest.mark.parametrize(
    ("strategy", "attention", "says"),
    [
        ("fsdp", "heads", "fsdp divides none; leave it out, or write %%shard fsdp+sp --attention heads"),
        ("sp", "haeds", "--attention does not take 'haeds'. Did you mean 'heads'?"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(strategy, attention, says):
    step, _, _ = attention_step("softmax")
    assert says in refusal(jaxshard_magic.shard, step, strategy, mesh="cpu:8 data=8", attention=attention)


def finding(sharded, *args):
    return next(f.message for f in sharded.planned(*args).plan.findings if f.code == "attention-chosen")


@pytest.mark.ci
def test_auto_divides_heads_where_less_is_sent_for_it_and_says_how_much():
    """Of K and V, gathered forward and their gradients scattered, 4 x 3/4 of an array; of eight exchanges 8 x 3/16."""
    step, params, batch = attention_step("softmax")
    sharded = jaxshard_magic.shard(step, "sp", mesh="cpu:4 seq=4", attention="auto")
    others = [jaxshard_magic.shard(step, "sp", mesh="cpu:4 seq=4", attention=a) for a in ("gather", "heads")]
    assert sharded.planned(params, batch).plan.attention == "heads"
    sent = [
        sum(
            wire_bytes(m.kind, m.group_size, m.bytes * m.count)
            for m in planned_collectives(x.planned(params, batch).plan.run)
        )
        for x in others
    ]
    assert sent[0] - sent[1] == 4 * ARRAY * 3 // 4 - 8 * ARRAY // 4 * 3 // 4
    assert "--attention heads: a device sends" in finding(sharded, params, batch)


def test_auto_gathers_where_heads_do_not_divide_and_says_so():
    step, params, batch = attention_step("softmax", heads=2)
    sharded = jaxshard_magic.shard(step, "sp", mesh="cpu:4 seq=4", attention="auto")
    assert sharded.planned(params, batch).plan.attention == "gather"
    assert "Not heads: the attention at" in finding(sharded, params, batch)


def test_a_search_tries_the_forms_of_attention_where_positions_are_divided():
    step, params, batch = attention_step("softmax", heads=4)
    found = jaxshard_magic.choose(step, (params, batch), mesh="cpu:8 data=8", among="dp,dp+sp", plan_only=True)
    forms = {(c.mesh.get("seq"), c.options.get("attention")) for c in found.candidates if "sp" in c.strategy}
    assert forms == {*product((2, 4), (None, "heads", "ring"))}
    assert all("attention" not in c.options for c in found.candidates if c.strategy == "dp")


def test_a_comparison_varies_attention_where_positions_are_divided_alone():
    varied = {"attention": ["gather", "heads"]}
    found = candidates(Requests(("dp", "dp+sp"), jaxshard_magic.mesh("cpu:8 data=2 seq=4"), vary=varied))
    assert [(c.strategy, c.options.get("attention")) for c in found] == [
        ("dp", None),
        ("dp+sp", "gather"),
        ("dp+sp", "heads"),
    ]


@pytest.mark.ci
def test_a_search_takes_the_ring_where_a_long_contexts_scores_do_not_fit():
    call = steps.transformer(scan=True)
    batch = {name: jax.ShapeDtypeStruct((2, 32_768), jnp.int32) for name in ("token", "next")}
    mesh = jaxshard_magic.mesh("v5e:2x4 data=2 seq=4")
    search = {"among": "dp+sp", "meshes": "data=2 seq=4", "vary": {"remat": [None], "microbatches": [None]}}
    found = jaxshard_magic.choose(call.step, (call.state, batch), mesh=mesh, plan_only=True, **search)
    assert found.chosen is not None and found.chosen.options["attention"] == "ring"
    needs = {c.options.get("attention"): c.needs for c in found.candidates}
    assert needs["ring"] < 16 * 2**30 < min(needs[None], needs["heads"])
    auto = jaxshard_magic.shard(call.step, "dp+sp", mesh=mesh, attention="auto")
    assert auto.planned(call.state, batch).plan.attention == "ring"


@pytest.mark.ci
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_on_a_tpu_an_attention_sends_as_many_in_the_type_that_it_multiplies():
    step, params, batch = attention_step("softmax")
    sharded = divided(step, axes="v5e:2x4 seq=8")
    sharded.prepare(params, batch)
    assert moved(sharded) == told(sharded, params, batch) == {(A2A, ARRAY // 8 // 2): 8}


@pytest.mark.ci
def test_its_program_in_plain_jax_holds_both_divisions_and_sends_the_same(notebook):
    notebook.run("%mesh cpu:4 seq=4;")
    notebook.run("from support.masked import attention_step\nimport jax, jax.numpy as jnp\nH, D = 8, 4")
    notebook.run(MODEL)
    notebook.run("_, p, batch = attention_step('softmax')")
    notebook.run(f"%%shard sp --attention heads;\n{STEP}")
    assert notebook.run("%shard code").same


MODEL = """
def loss_of(p, batch):
    x = p["embed"][batch["token"]]
    q, k, v = ((x @ p[n]).reshape(*x.shape[:2], H, D) for n in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    x = x + mixed.reshape(x.shape) @ p["out"]
    x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    logits = x @ p["embed"].T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["token"][..., None], -1).mean()
"""
STEP = """
def train_step(p, batch):
    loss, grad = jax.value_and_grad(loss_of)(p, batch)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, grad), loss

p, loss = train_step(p, batch)
"""
