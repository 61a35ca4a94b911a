"""Attentions found in a program: what people write, and what is none."""

from pathlib import Path

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attentions import FORMS, WRITTEN, by_hand, causal, einsum, mixed, scores_of, window

from jaxshard_magic.program.attention.attention import Attention, DistanceSpan, Unrecognised
from jaxshard_magic.program.attention.detection import find_attentions
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.trace import hoist_constants

T, H = 16, 8


def found(attend, heads=4, batch=2, **more):
    """What is found in a loss with projections before and after, as one attends among positions of one sequence."""
    w = jnp.ones((3, heads, H, H))

    def loss(w, x, more):
        q, k, v = (jnp.einsum("bthd,hde->bthe", x, m) for m in w)
        return jnp.sum(attend(q, k, v, **more) ** 2)

    closed = jax.make_jaxpr(loss)(w, jnp.ones((batch, T, heads, H)), more)
    known = dict(enumerate(closed.consts))
    return find_attentions(Program(hoist_constants(closed)), known)


def one(attend, **options) -> Attention:
    (attention,) = found(attend, **options)
    assert isinstance(attention, Attention), attention
    return attention


@pytest.mark.parametrize(("name", "batch"), [*((name, 2) for name in FORMS), ("by_hand", 1), ("of_jax", 1)])
def test_a_form_is_found_with_its_scale(name, batch):
    attention = one(FORMS[name], batch=batch)
    assert attention.span == DistanceSpan() and not attention.conditions
    before = name in ("einsum", "of_linen")
    assert attention.scale == pytest.approx(1.0 if before else H**-0.5)


@pytest.mark.parametrize("name", FORMS)
def test_a_causal_mask_and_a_window_are_distances(name):
    attend = FORMS[name]
    assert one(lambda q, k, v: attend(q, k, v, causal(T))).span == DistanceSpan(0, None)
    assert one(lambda q, k, v: attend(q, k, v, window(T))).span == DistanceSpan(0, 4)


@pytest.mark.parametrize("name", FORMS)
def test_padding_is_a_condition_beside_the_distances(name):
    def attend(q, k, v, lengths):
        seen = jnp.arange(T)[None] < lengths[:, None]
        return FORMS[name](q, k, v, causal(T)[None, None] & seen[:, None, None])

    attention = one(attend, lengths=jnp.array([9, 16]))
    assert attention.span == DistanceSpan(0, None) and len(attention.conditions) == 1
    assert attention.masks_in_score_mod == (name == "added")


@pytest.mark.parametrize("attend", WRITTEN)
def test_a_causal_mask_is_found_in_other_words(attend):
    attention = one(attend, seen=jnp.ones((2, T), jnp.int32))
    assert attention.span == DistanceSpan(0, None) and not attention.conditions
    assert attention.masks_in_score_mod == WRITTEN[attend]


def test_what_is_added_to_scores_is_a_mask_by_its_numbers():
    def attend(q, k, v, seen, times):
        bias = jnp.where(causal(T), 0, -1e9) + jnp.where(seen[:, None, None], 0, times)
        return mixed(jax.nn.softmax(scores_of(q, k) + bias), v)

    seen = jnp.ones((2, T), bool)
    hidden = one(lambda q, k, v, seen: attend(q, k, v, seen, -1e9), seen=seen)
    assert hidden.span == DistanceSpan(0, None) and len(hidden.conditions) == 1 and hidden.masks_in_score_mod
    away = one(lambda q, k, v, seen: attend(q, k, v, seen, -jnp.inf), seen=seen)
    assert (
        len(away.conditions) == 1 and away.masks_in_score_mod
    )  # what a query has that sees nothing is told by the other
    less = one(lambda q, k, v, seen: attend(q, k, v, seen, -2.0), seen=seen)
    assert less.span == DistanceSpan(0, None) and not less.conditions and less.score_mod is not None


def test_segments_and_masks_that_are_passed_are_conditions():
    def segments(q, k, v, ids):
        same = ids[:, None, :, None] == ids[:, None, None, :]
        return einsum(q, k, v, causal(T) & same)

    attention = one(segments, ids=jnp.zeros((2, T), jnp.int32))
    assert attention.span == DistanceSpan(0, None) and attention.conditions
    passed = one(lambda q, k, v, x: by_hand(q, k, v, x > 0), x=jnp.ones((2, 1, T, T)))
    assert passed.span == DistanceSpan() and passed.conditions


def test_a_mask_that_the_loss_closes_over_is_known():
    mask = np.tri(T, dtype=bool)
    attention = one(lambda q, k, v: by_hand(q, k, v, mask))
    assert attention.span == DistanceSpan(0, None) and not attention.conditions


def test_masks_of_flax_are_taken_apart():
    def attend(q, k, v, tokens):
        mask = linen.combine_masks(linen.make_causal_mask(tokens), linen.make_attention_mask(tokens > 0, tokens > 0))
        return linen.dot_product_attention(q, k, v, mask=mask)

    attention = one(attend, tokens=jnp.ones((2, T), jnp.int32))
    assert attention.span == DistanceSpan(0, None) and len(attention.conditions) == 2  # of queries, and of keys


def test_a_mask_that_says_where_nothing_is_seen():
    def attend(q, k, v, padding):
        hidden = ~causal(T) | padding[:, None, None]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(hidden, -1e9, scores)), v)

    attention = one(attend, padding=jnp.zeros((2, T), bool))
    assert attention.span == DistanceSpan(0, None)
    assert [condition.visible_if for condition in attention.conditions] == [False]


def test_a_window_of_jax_is_a_window():
    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(3, 0))

    assert one(attend).span == DistanceSpan(0, 3)


@pytest.mark.parametrize("t", [2048, 8192])
def test_a_causal_mask_of_many_positions_is_told_from_a_few(t):
    def loss(x):
        return einsum(x, x, x, jnp.arange(t)[:, None] >= jnp.arange(t)).sum()

    (attention,) = find_attentions(Program(jax.make_jaxpr(loss)(jax.ShapeDtypeStruct((2, t, 2, H), jnp.float32))))
    assert isinstance(attention, Attention) and attention.span == DistanceSpan(0, None)


@pytest.mark.parametrize("seen", [lambda q, k: q == 777, lambda q, k: k == 777])
def test_one_position_of_many_that_sees_or_is_seen_otherwise_makes_a_condition(seen):
    t = 4096

    def loss(x):
        q, k = (jax.lax.broadcasted_iota(jnp.int32, (t, t), d) for d in (0, 1))
        return einsum(x, x, x, (q >= k) | seen(q, k)).sum()

    (attention,) = find_attentions(Program(jax.make_jaxpr(loss)(jax.ShapeDtypeStruct((2, t, 2, H), jnp.float32))))
    assert isinstance(attention, Attention) and attention.span == DistanceSpan() and attention.conditions


def test_blocks_along_the_diagonal_are_no_window():
    def attend(q, k, v):
        block = jnp.arange(T) // 4
        return by_hand(q, k, v, block[:, None] == block)

    attention = one(attend)
    assert attention.span == DistanceSpan() and len(attention.conditions) == 1


def test_repeated_keys_are_found_before_they_are_repeated():
    attention = one(FORMS["repeated"])
    assert attention.repeats == (1, 2)
    assert one(FORMS["grouped"]).groups == 1


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit, None])
def test_attention_is_found_inside_loops_and_remat(wrap):
    def attend(q, k, v):
        def layer(x, scale):
            return by_hand(x * scale, k, v, causal(T)), None

        return jax.lax.scan(wrap(layer) if wrap else layer, q, jnp.ones(3))[0]

    assert one(attend).span == DistanceSpan(0, None)


def dropped(q, k, v, key):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    keep = jax.random.bernoulli(key, 0.9, scores.shape)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(keep, jax.nn.softmax(scores) / 0.9, 0), v)


def biased(q, k, v, bias):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias), v)


def talking(q, k, v, w):
    return mixed(jax.nn.softmax(jnp.einsum("bhqk,hg->bgqk", scores_of(q, k), w)), v)


def one_more_key(q, k, v, sink):
    more = jnp.broadcast_to(sink[:, None, None], (2, 4, T, 1))
    return mixed(jax.nn.softmax(jnp.concatenate([scores_of(q, k), more], -1))[..., :-1], v)


def one_more_exponential(q, k, v):
    most = scores_of(q, k).max(-1, keepdims=True)
    e = jnp.exp(scores_of(q, k) - most)
    return mixed(e / (e.sum(-1, keepdims=True) + jnp.exp(-most)), v)


def memory_before(q, k, v, memory):
    k, v = (jnp.concatenate([memory, x], 1) for x in (k, v))
    return mixed(jax.nn.softmax(scores_of(q, k)), v)


def softmax_in_remat(q, k, v):
    return mixed(jax.checkpoint(jax.nn.softmax)(scores_of(q, k)), v)


@pytest.mark.parametrize(
    ("attend", "operation", "text", "more"),
    [
        (talking, "dot_general", "bhqk,hg->bgqk", {"w": jnp.ones((4, 4))}),
        (one_more_key, "concatenate", "jnp.concatenate([scores", {"sink": jnp.ones(4)}),
        (one_more_exponential, "add", "jnp.exp(-most)", {}),
        (memory_before, "concatenate", "[memory, x]", {"memory": jnp.ones((2, 3, 4, H))}),
        (softmax_in_remat, "checkpoint", "jax.checkpoint(jax.nn", {}),
        (dropped, "select_n", "jnp.where(keep", {"key": jax.random.key(0)}),
        (biased, "add", "+ bias", {"bias": jnp.ones((4, T, T))}),
    ],
)
def test_what_is_no_softmax_of_scores_is_named_with_its_line(attend, operation, text, more):
    (other,) = found(attend, **more)
    assert isinstance(other, Unrecognised) and other.operation == operation
    assert other.line is not None
    number = int(other.line.split()[-1])
    assert text in Path(__file__).read_text().splitlines()[number - 1]


def test_what_is_no_attention_among_positions_is_left_out():
    def experts(q, k, v, w):
        gates = jax.nn.softmax(jnp.einsum("bthd,de->bthe", q, w))
        return jnp.einsum("bthe,ed->bthd", gates, w.T)

    def other_sequence(q, k, v, memory):
        return by_hand(q, memory, memory)

    assert not found(experts, w=jnp.ones((H, 6)))
    assert not found(other_sequence, memory=jnp.ones((2, T, 4, H)))
    assert not found(lambda q, k, v: jnp.einsum("bqhd,bkhd->bhqk", q, k))
