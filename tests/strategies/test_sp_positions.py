"""Positions divided: which dimension they are found to be, and what is refused."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.tree_util import tree_flatten_with_path
from support.positions import RS, same
from support.refusals import refusal

import jaxshard_magic
from jaxshard_magic.config.request import make_request
from jaxshard_magic.config.strategy_text import jobs_of, parse_strategy, part_axes
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.trace import trace
from jaxshard_magic.strategies import find_facts, plan

WIDE, WORDS = 32, 64


def attention(p, x, keys_first=False):
    q, k, v = (jnp.einsum("btd,dhe->bthe", x, p[n]) for n in "qkv")
    if keys_first:
        weights = jax.nn.softmax(jnp.einsum("bkhe,bqhe->bhkq", k, q), axis=2)
        return jnp.einsum("bhkq,bkhe->bqhe", weights, v)
    return jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k)), v)


def layer(p, x, **form):
    x = x + jnp.einsum("bqhe,hed->bqd", attention(p, x, **form), p["out"])
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def drawn(**shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {n: 0.2 * jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def weights(**more):
    square = dict.fromkeys("qkv", (WIDE, 4, WIDE // 4))
    mlp = {"up": (WIDE, 2 * WIDE), "down": (2 * WIDE, WIDE)}
    return drawn(embed=(WORDS, WIDE), out=(4, WIDE // 4, WIDE), head=(WIDE, WORDS), **square, **mlp, **more)


def loss(p, tokens, *, flat=False, **form):
    x = p["embed"][tokens[:, :-1]]
    if "position" in p:
        x = x + p["position"]
    logits, labels = layer(p, x, **form) @ p["head"], tokens[:, 1:]
    if flat:
        logits, labels = logits.reshape(-1, WORDS), labels.reshape(-1)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def step_of(loss, **form):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch, **form)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def tokens(*shape):
    return jax.random.randint(jax.random.key(1), shape, 0, WORDS)


def planned(step, params, batch, strategy="sp", axes="data=2 seq=4", **options):
    """The plan alone, without compiling."""
    paths, tree = tree_flatten_with_path({"params": params, "batch": batch})

    def flat(*leaves):
        a = jax.tree.unflatten(tree, leaves)
        outs = tree_flatten_with_path(step(a["params"], a["batch"]))[0]
        return [x for _, x in outs], [path for path, _ in outs]

    traced = trace(flat, [x for _, x in paths], [path for path, _ in paths])
    request = make_request(strategy, jaxshard_magic.mesh(axes), **options)
    return plan(find_facts(traced, request), request)


def leaf(plan, path):
    return next(x for x in plan.leaves if x.path == path)


def held(plan, shape):
    """The specs that constraints inside the step give to values of this shape, in its order."""
    closed = jax.make_jaxpr(plan.run)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in plan.leaves))
    program = Program(closed)
    pins = (e for e in program.equations if e.name == "sharding_constraint")
    return [e.params["sharding"].spec for e in pins if program.shapes[e.results[0]] == shape]


def numbers(step, params, batch, strategy="sp", axes="data=2 seq=4"):
    sharded = jaxshard_magic.shard(step, strategy, mesh=jaxshard_magic.mesh(axes))
    same(sharded(params, batch), jax.jit(step)(params, batch))
    return sharded


def test_positions_of_data_are_found_and_said():
    def frames(p, b):
        return ((layer(p, b["x"]) @ p["head"]) ** 2 * b["mask"][..., None]).mean()

    batch = {"x": jnp.ones((8, 16, WIDE)), "mask": jnp.ones((8, 16))}
    found = planned(step_of(frames), weights(), batch)
    assert leaf(found, "batch.x").spec == P("data", "seq", None)
    assert leaf(found, "batch.mask").spec == P("data", "seq")
    assert leaf(found, "batch.x").reason == "examples: dim 0 over data; positions: dim 1 over seq"
    assert "a copy on every device" in leaf(found, "params.up").reason
    assert found.idle_axes == ()


@pytest.mark.parametrize("keys_first", [False, True])
def test_of_the_scores_the_queries_are_divided_and_the_keys_whole(keys_first):
    found = planned(step_of(loss, keys_first=keys_first), weights(), tokens(8, 17))
    scores = held(found, (8, 4, 16, 16))[0]
    assert scores == (P("data", None, None, "seq") if keys_first else P("data", None, "seq", None))


def test_a_table_of_learned_positions_is_no_weight():
    found = planned(step_of(loss), weights(position=(16, WIDE)), tokens(8, 17))
    assert P("data", "seq", None) in held(found, (8, 16, WIDE))


def test_one_token_more_than_the_model_sees_leaves_activations_divided():
    found = planned(step_of(loss), weights(), tokens(8, 17))
    assert leaf(found, "batch").spec == P("data", None)
    assert leaf(found, "batch").reason == "examples: dim 0 over data; positions: 17 do not divide by seq"
    assert P("data", "seq", None) in held(found, (8, 16, WIDE))
    assert not found.findings


def test_where_only_the_tokens_divide_a_finding_says_how_many_to_pass():
    found = planned(step_of(loss), weights(), tokens(8, 16))
    (odd,) = found.findings
    assert (odd.code, odd.level) == ("sequence-odd", "warning")
    assert "batch has 16 positions, but the model sees 15, which do not divide by seq=4" in odd.message
    assert "13 or 17" in odd.message
    assert leaf(found, "batch").spec == P("data", None)


def test_of_an_encoder_and_a_decoder_both_sequences_are_divided():
    def translate(p, b):
        source, target = layer(p, p["embed"][b["source"]]), p["embed"][b["target"]]
        q, k, v = (x @ p[n].reshape(WIDE, WIDE) for n, x in (("q", target), ("k", source), ("v", source)))
        mixed = jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v
        return ((mixed @ p["up"]) ** 2).mean()

    batch = {"source": tokens(8, 24), "target": tokens(8, 16)}
    found = planned(step_of(translate), weights(), batch)
    assert leaf(found, "batch.source").spec == leaf(found, "batch.target").spec == P("data", "seq")
    assert P("data", "seq", None) in held(found, (8, 16, 24))


def test_patches_of_an_image_are_positions():
    def classify(p, images):
        x = lax.conv_general_dilated(images, p["patch"], (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (layer(p, x.reshape(len(x), -1, WIDE)).mean(1) @ p["head"]).mean()

    images = jax.random.normal(jax.random.key(2), (8, 16, 16, 3))
    found = planned(step_of(classify), weights(patch=(4, 4, 3, WIDE)), images)
    assert leaf(found, "batch").spec == P("data", None, None, None)
    assert P("data", "seq", None) in held(found, (8, 16, WIDE))


def test_one_long_example_is_divided_over_all_axes():
    found = planned(step_of(loss), weights(), tokens(1, 17))
    assert P(None, ("data", "seq"), None) in held(found, (1, 16, WIDE))
    numbers(step_of(loss), weights(), tokens(1, 17))


def test_a_dimension_that_the_user_names_is_taken():
    def features(p, x):
        return ((jax.nn.gelu(x @ p["up"]) @ p["down"]) ** 2).mean()

    specs = {"batch": P("data", "seq")}
    found = planned(step_of(features), weights(), jnp.ones((8, WIDE)), specs=specs)
    assert leaf(found, "batch").spec == P("data", "seq")
    found = planned(step_of(loss), weights(), tokens(8, 16), specs=specs)
    assert leaf(found, "batch").reason == "given batch=P('data', 'seq')"


@pytest.mark.ci
def test_microbatches_in_a_loop_keep_their_positions_divided():
    inner = step_of(loss)

    def step(params, batch):
        def trip(total, part):
            new, value = inner(params, part)
            return jax.tree.map(lambda t, n, p: t + (n - p) / 2, total, new, params), value

        new, values = lax.scan(trip, params, batch.reshape(2, -1, batch.shape[1]))
        return new, values.mean()

    assert P("data", "seq", None) in held(planned(step, weights(), tokens(8, 17)), (4, 16, WIDE))
    numbers(step, weights(), tokens(8, 17))


def test_a_reshape_that_merges_examples_and_positions_is_told():
    found = planned(step_of(loss, flat=True), weights(), tokens(8, 17))
    (merged,) = (f for f in found.findings if f.code == "sequence-merged")
    assert "(8 x 16)" in merged.message
    beside = planned(step_of(loss, flat=True), weights(), tokens(8, 17), "sp+tp", "data=2 model=4")
    assert "sequence-merged" not in {f.code for f in beside.findings}


@pytest.mark.ci
def test_bfloat16_products_are_scattered_to_the_plain_numbers():
    def half(p, batch):
        return loss(jax.tree.map(lambda x: x.astype(jnp.bfloat16), p), batch).astype(jnp.float32)

    sharded = jaxshard_magic.shard(step_of(half), "sp+tp", mesh=jaxshard_magic.mesh("data=2 model=4"))
    params, batch = weights(), tokens(8, 17)
    same(sharded(params, batch), jax.jit(step_of(half))(params, batch), rtol=2e-2)
    assert any(c.kind == RS for c in sharded.report().collectives or ())


def dense(p, x):
    return ((jax.nn.gelu(x @ p["up"]) @ p["down"]) ** 2).mean()


def image(p, x):
    x = lax.conv_general_dilated(x, p["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return (x.mean((1, 2)) @ p["up"]).mean()


def recurrent(p, x):
    return time_major(p, x.swapaxes(0, 1))


def time_major(p, x):
    def cell(h, x):
        return jnp.tanh(x @ p["w"] + h @ p["u"]), None

    return lax.scan(cell, jnp.zeros((x.shape[1], WIDE)), x)[0].mean()


@pytest.mark.parametrize(
    ("loss", "params", "shape", "spec"),
    [
        (dense, weights(), (8, WIDE), "P(None, 'seq')"),
        (image, weights(conv=(3, 3, 3, WIDE)), (8, 16, 16, 3), "P(None, 'seq')"),
        (recurrent, drawn(w=(WIDE, WIDE), u=(WIDE, WIDE)), (8, 16, WIDE), "P(None, 'seq')"),
        (time_major, drawn(w=(WIDE, WIDE), u=(WIDE, WIDE)), (16, 8, WIDE), "P('seq')"),
    ],
    ids=["features", "image", "recurrence", "recurrence with time first"],
)
def test_a_step_without_positions_is_refused_with_the_spec_that_would_name_them(loss, params, shape, spec):
    said = refusal(planned, step_of(loss), params, jnp.ones(shape))
    assert f"sp found no dimension of positions in batch ({' x '.join(map(str, shape))})" in said
    assert f'--spec "batch={spec}"' in said


def test_a_step_that_reads_no_batch_is_told_so():
    said = refusal(planned, step_of(lambda p, x: jnp.tanh(p["w"]).mean()), drawn(w=(WIDE, WIDE)), jnp.ones((8, WIDE)))
    assert "no input of this step is a batch" in said


def test_positions_that_do_not_divide_are_refused_with_what_would():
    said = refusal(planned, step_of(loss), weights(), tokens(8, 19))
    assert "batch has 19 positions (dim 1), of which the model sees 18, which do not divide by seq=4" in said
    assert "use 17 or 21 positions" in said


@pytest.mark.parametrize(
    ("strategy", "axes", "want"),
    [
        ("sp", "data=2 seq=4", {"sp": ("seq",)}),
        ("sp", "context=8", {"sp": ("context",)}),
        ("sp+tp", "data=2 model=4", {"sp": ("model",), "tp": ("model",)}),
        ("sp@model+tp", "seq=2 model=4", {"sp": ("model",), "tp": ("model",)}),
        ("tp@x+sp", "x=8", {"sp": ("x",), "tp": ("x",)}),
        ("sp+tp", "seq=2 model=4", {"sp": ("seq",), "tp": ("model",)}),
    ],
)
def test_the_axis_of_a_sequence_is_its_own_or_that_of_tp(strategy, axes, want):
    assert part_axes(parse_strategy(strategy), jaxshard_magic.mesh(axes)) == want


@pytest.mark.parametrize(
    ("strategy", "says"), [("sp", "%mesh seq=8"), ("sp+tp", "%mesh model=8"), ("sp@sq", "no axis 'sq'")]
)
def test_a_mesh_without_an_axis_for_it_is_one_line_with_the_mesh_to_write(strategy, says):
    assert says in refusal(part_axes, parse_strategy(strategy), jaxshard_magic.mesh("data=8"))


def test_beside_tp_a_sequence_asks_for_no_axis_of_its_own():
    assert jobs_of(parse_strategy("sp")) == ("sequence",)
    assert jobs_of(parse_strategy("fsdp+sp+tp")) == ("fsdp", "tensor")
