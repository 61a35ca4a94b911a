"""Positions divided: the plain numbers, and what moves between devices."""

from collections import Counter
from importlib.util import find_spec

import jax
import pytest
import zoo
from support.positions import RS, same
from support.zoo_cases import assert_same
from theory import steps
from theory.expected import AG, AR, F32, told
from theory.steps import EXAMPLES, HEADS, HIDDEN, LAYERS, TIME, VOCAB, WIDTH

import jaxshard_magic

QKV, SCORES, MIXED, OUT, MLP = "(y @ p[n])", "scores = ", "mixed = ", '@ p["out"]', '@ p["down"]'
LOOK, HEAD, SOFTMAX, LOSS, NORM = 'params["embed"][', "logits = x @", "log_softmax", "-jnp.mean", "lax.rsqrt"
FORMS = {
    "unrolled": steps.transformer,
    "scanned, remat": lambda: steps.transformer(scan=True, remat=True),
}
CONTEXT, MEGATRON, BOTH = ("sp", "seq=8"), ("sp+tp", "data=2 model=4"), ("sp+tp", "data=2 seq=2 model=2")
WEIGHTS = ("fsdp+sp", "data=2 seq=4")
QUICK = (("unrolled", CONTEXT), ("scanned, remat", BOTH))


@pytest.fixture(scope="module")
def ran():
    """A step that has run once with the plain step's numbers, by its form, strategy and mesh."""
    known, plain = {}, {}

    def get(form, strategy, axes):
        call = FORMS[form]()
        if form not in plain:
            plain[form] = jax.jit(call.step)(call.state, call.batch)
        if (form, strategy, axes) not in known:
            step = jaxshard_magic.shard(call.step, strategy, mesh=jaxshard_magic.mesh(axes))
            same(step(call.state, call.batch), plain[form])
            known[form, strategy, axes] = step, call
        return known[form, strategy, axes]

    return get


TABLE = [
    pytest.param(form, on, marks=() if (form, on) in QUICK else pytest.mark.full, id=" ".join((form, *on)))
    for form in FORMS
    for on in (CONTEXT, MEGATRON, BOTH, WEIGHTS)
]


@pytest.mark.parametrize(("form", "on"), TABLE)
def test_divided_positions_give_the_plain_numbers(ran, form, on):
    ran(form, *on)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("nnx_scanned_transformer", marks=pytest.mark.ci),
        pytest.param("linen_scanned_transformer", marks=pytest.mark.full),
        pytest.param("equinox_attention", marks=pytest.mark.full),
    ],
)
def test_attention_of_every_library_gives_the_plain_numbers(name):
    step = zoo.STEPS[name]
    call, plain = step.make(), step.make()
    got = jaxshard_magic.shard(call.fn, "sp", mesh=jaxshard_magic.mesh("data=2 seq=4"))(*call.args, **call.kwargs)
    assert_same(step, zoo.numbers(call, got), zoo.numbers(plain, plain.run()))


def moved(report, wanted):
    """Collectives of more than a number."""
    return by_line({k: n for k, n in told(report.collectives or (), wanted).items() if k[2] > F32})


def by_line(collectives):
    """Without the lines of all-gathers: newer compilers tell where that was made which is gathered, older ones where
    it is needed."""
    found = Counter()
    for (kind, axes, size, line), n in collectives.items():
        found[kind, axes, size, None if kind == AG else line] += n
    return found


def gradients(axis, n=1):
    """One all-reduce of every parameter's gradient over `axis`; tensor parallelism over `n` devices cuts all but the
    norms."""
    found = Counter({(AR, (axis,), WIDTH * F32, NORM): 2 * LAYERS})
    for line, size, count in [
        (QKV, WIDTH * WIDTH, 3 * LAYERS),
        (OUT, WIDTH * WIDTH, LAYERS),
        (MLP, WIDTH * HIDDEN, 2 * LAYERS),
        (LOOK, VOCAB * WIDTH, 1),
        (HEAD, VOCAB * WIDTH, 1),
    ]:
        found[AR, (axis,), size * F32 // n, line] += count
    return found


@pytest.mark.parametrize("form", ["unrolled", pytest.param("scanned, remat", marks=pytest.mark.full)])
def test_context_parallelism_gathers_keys_and_values_and_scatters_gradients(ran, form):
    """Rematerialised, the backward pass gathers keys and values again."""
    token, again = EXAMPLES * TIME * WIDTH * F32, 2 if "remat" in form else 1
    wanted = gradients("seq")
    for line in (SCORES, MIXED):
        wanted[AG, ("seq",), token, line] = LAYERS * again
        wanted[RS, ("seq",), token, line] = LAYERS
    assert moved(ran(form, *CONTEXT)[0].report(), wanted) == by_line(wanted)


def megatron(remat):
    """Korthikanti et al. 2022, figure 5, on data=2 model=4. A layer gathers positions before q, k, v and before the MLP
    and scatters sums after both; backward likewise. Rematerialised it scatters after the attention once more, and what
    was gathered forward is not kept and gathered again.

    The vocabulary is cut: the head is a region of its own, a lookup sums once (on CPU an all-reduce, of which each
    keeps its part) and its gradient gathers once, and the cross entropy sums four numbers a token.
    """
    examples, more = EXAMPLES // 2, int(remat)
    token = examples * TIME * WIDTH * F32
    wanted = gradients("data", 4)
    wanted[AR, ("model",), WIDTH * F32, NORM] = 2 * LAYERS
    for line, gathers, scatters in [
        (QKV, 1 + more, 1),
        (OUT, 1, 1 + more),
        (MLP, 2 + more, 2),
    ]:
        wanted[AG, ("model",), token, line] = LAYERS * gathers
        wanted[RS, ("model",), token, line] = LAYERS * scatters
    wanted[AG, ("model",), token, HEAD] = wanted[RS, ("model",), token, HEAD] = 1
    wanted[AR, ("model",), token, LOOK] = wanted[AG, ("model",), token, LOOK] = 1
    for line in (LOOK, SOFTMAX):  # which token to look up, which logit to pick
        wanted[AG, ("model",), examples * TIME * F32, line] = 1
    wanted[AR, ("model",), examples * TIME * F32, SOFTMAX] = 4
    return wanted


def test_with_tp_every_all_reduce_of_a_layer_becomes_a_gather_and_a_scatter(ran):
    wanted = megatron(remat=True)
    assert moved(ran("scanned, remat", *MEGATRON)[0].report(), wanted) == by_line(wanted)


@pytest.mark.ci
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_on_a_tpu_no_activation_is_all_reduced_over_the_tensor_axis(tmp_path, monkeypatch):
    """There the lookup is scattered too; small sums are joined over both axes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    call = FORMS["scanned, remat"]()
    state, batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (call.state, call.batch))
    with jax.default_matmul_precision("highest"):  # else a TPU gathers operands in bfloat16
        step = jaxshard_magic.shard(call.step, "sp+tp", mesh="v5e:2x4 data=2 model=4")
        step.prepare(state, batch)
        report = step.report()
    wanted = megatron(remat=True)
    token = EXAMPLES // 2 * TIME * WIDTH * F32
    got = {k: n for k, n in moved(report, wanted).items() if k[2] >= token and k[1] == ("model",)}
    theory = {k: n for k, n in by_line(wanted).items() if k[2] >= token and k[1] == ("model",)}
    theory[RS, ("model",), token, LOOK] = theory.pop((AR, ("model",), token, LOOK))
    assert got == theory


def test_no_device_has_all_scores(ran):
    step, call = ran("unrolled", *CONTEXT)
    text = step.prepare(call.state, call.batch).compiled.as_text()
    assert f"f32[{EXAMPLES},{HEADS},{TIME // 8},{TIME}]" in text
    assert f"f32[{EXAMPLES},{HEADS},{TIME},{TIME}]" not in text
