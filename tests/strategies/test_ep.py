"""Experts divided: found in the forms that people write, the plain numbers, and what moves between devices."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
import zoo
from jax.version import __version_info__ as jax_version
from support.divided_experts import A2A, AG, AR, F32, MOVES, RS, finding, leaves, planned, sent, told
from support.divided_experts import ran as ran
from support.refusals import refusal
from zoo.mixtures import BEST, CAPACITY, EXPERTS, HIDDEN, OUT, TIME, WIDTH
from zoo.parts import BATCH

import jaxshard_magic
from jaxshard_magic.strategies.min_cut import FlowNetwork

GROUPED, FLAT, DENSE, MAPPED, LAYERS, SCANNED, IN_TURN = FORMS = (
    "dispatched_in_groups",
    "dispatched_together",
    "mixture_of_experts",
    "experts_mapped",
    "layers_of_experts",
    "experts_scanned",
    "experts_in_turn",
)
ALONE, BESIDE = ("ep", "expert=8"), ("ep+dp", "data=2 expert=4")
STORED, INSIDE = ("ep+fsdp", "data=2 expert=4"), ("ep+tp", "data=2 expert=2 model=2")
QUICK = {(GROUPED, BESIDE), (FLAT, ALONE), (MAPPED, INSIDE)}
TABLE = [
    pytest.param(form, on, marks=() if (form, on) in QUICK else pytest.mark.full, id=" ".join((form, *on)))
    for form in FORMS
    for on in (ALONE, BESIDE, STORED, INSIDE)
]


@pytest.mark.parametrize(("form", "on"), TABLE)
def test_divided_experts_give_the_plain_numbers_of_five_steps(ran, form, on):
    ran(form, *on)


def dispatched(devices: int, model: int = 1) -> int:
    """What a device has of the dispatched tokens: every token BEST times, and CAPACITY times the room for them."""
    return BATCH * TIME * BEST * CAPACITY * WIDTH * F32 // devices


def in_all(moves: MOVES) -> MOVES:
    """Bytes by kind and axes, in however many collectives."""
    bytes_sent = MOVES()
    for (kind, axes, size), count in moves.items():
        bytes_sent[kind, axes] += size * count
    return bytes_sent


MATRIX_OF = "params.mixture"
MATRIX, ROUTER, HEAD = WIDTH * HIDDEN * F32, WIDTH * EXPERTS * F32, WIDTH * OUT * F32


def test_dispatched_tokens_move_by_all_to_all_and_no_weight_does(ran):
    """To the experts and back, and back again with the gradient of what these made; the tokens are data, and no
    gradient of theirs is asked for. Gradients of an expert are added up over data alone."""
    step = ran(GROUPED, *BESIDE)
    both, own = ("data", "expert"), EXPERTS // 4
    wanted = Counter({(A2A, ("expert",), dispatched(8)): 3})
    wanted |= {(AR, ("data",), own * MATRIX): 2, (AR, ("data",), own * HIDDEN * F32): 1}
    wanted |= {(AR, both, ROUTER): 1, (AR, both, HEAD): 1}
    report = step.report()
    assert sent(report) == wanted == told(planned(GROUPED, *BESIDE))
    jobs = Counter({(c.job, c.phase): c.count for c in report.collectives or () if c.kind == A2A})
    assert jobs == {("dispatch", "forward"): 1, ("combine", "forward"): 1, ("dispatch", "backward"): 1}
    assert [load.chosen for experts in report.experts for load in experts.layers] == [None]  # nobody asked
    assert not any(MATRIX_OF in (c.what or "") for c in report.collectives or () if c.kind == A2A)


@pytest.mark.ci
@pytest.mark.parametrize(("form", "exchanges"), [(GROUPED, 3), (LAYERS, 12)])
def test_a_tpus_compiler_sends_what_is_told_and_in_bfloat16_what_it_multiplies(form, exchanges):
    """A TPU multiplies float32 as bfloat16 at its default precision, and sends dispatched tokens so: wherever they and
    their gradients, in whatever form, are read by products alone. Sums of gradients are as many bytes as are told; a
    newer compiler sends those of two layers at once."""
    call = zoo.STEPS[form].make()
    step = jaxshard_magic.shard(call.fn, "ep+dp", mesh=jaxshard_magic.mesh("v5e:2x4 data=2 expert=4"))
    plan = step.prepare(*call.args).plan
    moved = sent(step.report())
    assert {size: n for (kind, _, size), n in moved.items() if kind == A2A} == {dispatched(8) // 2: exchanges}
    assert in_all(moved) == in_all(told(plan))
    assert moved == told(plan) or jax_version >= (0, 12)


@pytest.mark.ci
def test_places_shared_by_all_tokens_send_each_token_once_a_direction(ran):
    """Forward every device takes all tokens, for its places of its experts, and what these made is added up; backward
    it takes the gradient of the result. Masks are made where places
    are, of each choice's place and share: BEST numbers a token, as are their gradients. On CPU a sum is made along
    experts, then along places, and not scattered."""
    step, both = ran(FLAT, *BESIDE), ("data", "expert")
    tokens, choices = BATCH * TIME * WIDTH * F32, BATCH * TIME * BEST * F32
    own = EXPERTS // 4
    wanted = Counter({(AG, both, tokens): 2, (AR, ("expert",), tokens): 1, (AR, ("data",), tokens): 1})
    wanted |= {(AG, both, choices): 2, (AR, ("expert",), choices): 2, (AR, ("data",), choices): 1}
    wanted |= {(AR, ("data",), own * MATRIX): 2, (AR, ("data",), own * HIDDEN * F32): 1}
    wanted |= {(AR, both, ROUTER): 1, (AR, both, HEAD): 1}
    one_hot = BATCH * TIME * BEST * EXPERTS  # of bytes
    wanted |= {(A2A, ("expert",), one_hot // 8): 1, (AG, ("data",), one_hot // 4): 1}
    assert sent(step.report()) == wanted == told(planned(FLAT, *BESIDE))


def test_in_layers_that_are_computed_again_tokens_move_six_times_each(ran):
    """Forward two, two again before the backward pass, and the gradients of both; fsdp gathers each expert's weights
    over data, forward and again, and nothing over the experts."""
    step = ran(LAYERS, *STORED)
    found, layers = sent(step.report()), 2
    assert found == told(planned(LAYERS, *STORED))
    assert found[A2A, ("expert",), dispatched(8)] == 6 * layers
    assert {axes for kind, axes, _ in found if kind == AG} == {("data",)}
    assert found[AG, ("data",), EXPERTS // 4 * MATRIX] == 2 * 2 * layers


def test_where_all_experts_see_all_tokens_these_are_gathered_and_results_added_up(ran):
    """The tokens forward and the gradient of the result backward; what each token counts, for each expert, is dealt out
    anew both ways. On CPU what is scattered is an all-reduce."""
    step, over = ran(DENSE, *BESIDE), ("expert",)
    tokens, counts = BATCH // 2 * TIME * WIDTH * F32, BATCH * TIME * EXPERTS * F32 // 8
    for found in (told(planned(DENSE, *BESIDE)), sent(step.report())):
        assert (found[AG, over, tokens], found[AR, over, tokens], found[A2A, over, counts]) == (2, 1, 2)
        assert found[AR, ("data", "expert"), ROUTER] == 1  # it reads tokens as they lie, also for its gradient
        assert max(size for kind, _, size in found if kind == AG) == tokens


def test_a_device_does_the_trips_of_its_own_experts_in_a_loop_over_them(ran):
    """Tokens are gathered before the loop, before its backward pass again, and so is the gradient of the result. A trip
    adds its expert's gradient up over data: as many as a device has experts, for two matrices. On CPU a sum that is
    scattered is an all-reduce."""
    step, plan, tokens = ran(SCANNED, *BESIDE), planned(SCANNED, *BESIDE), BATCH // 2 * TIME * WIDTH * F32
    own = EXPERTS // 4
    found = sent(step.report())
    assert (found[AG, ("expert",), tokens], found[AR, ("expert",), tokens]) == (3, 1)
    assert found[AR, ("data",), MATRIX] == 2 * own
    assert told(plan) == found
    flops = BATCH * TIME * EXPERTS * WIDTH * HIDDEN * 2
    assert max(share.flops for share in plan.shares or ()) * 8 == flops


@pytest.mark.ci
def test_a_loop_over_experts_stays_divided_where_its_body_is_computed_again():
    """Remat puts the body of the backward pass, with what it adds up, inside a body of its own: no sum of a gradient
    over the expert axis, and no expert's matrix in one piece."""
    for options in ({"remat": "dots"}, {"remat": "full", "microbatches": 2}):
        moves = told(planned(SCANNED, *BESIDE, **options))
        assert moves[AR, ("data",), MATRIX] == 2 * EXPERTS // 4 * options.get("microbatches", 1)
        assert not any(size >= MATRIX and axes != ("data",) for _, axes, size in moves)


WAITING = {"microbatches": 2, "reduce": "once"}


@pytest.mark.ci
def test_expert_gradients_are_reduced_once_after_the_last_microbatch():
    """And where what is left of each is stored over these, they are scattered once."""
    own = EXPERTS // 4 * MATRIX
    moves = told(planned(GROUPED, *BESIDE, **WAITING))
    assert (moves[AR, ("data",), own], moves[AR, ("data", "expert"), ROUTER]) == (2, 1)
    moves = told(planned(LAYERS, *STORED, **WAITING))
    both_layers = {2 * own: 2}
    assert {size: n for (kind, _, size), n in moves.items() if kind == RS} == both_layers


@pytest.mark.ci
@pytest.mark.parametrize(("form", "on"), [(GROUPED, BESIDE), (LAYERS, STORED)])
def test_gradients_of_experts_that_wait_are_the_plain_ones(form, on):
    step, (strategy, axes) = zoo.STEPS[form], on
    call = step.make()
    sharded = jaxshard_magic.shard(call.fn, strategy, mesh=jaxshard_magic.mesh(f"cpu:8 {axes}"), **WAITING)
    ours, plain = step.make(), step.make()
    both = (zoo.numbers_of_calls(step, c, fn, calls=3) for c, fn in ((ours, sharded), (plain, plain.fn)))
    for got, want in zip(*both, strict=True):
        assert all(difference.rounding for difference in zoo.differences(step, got, want))
    assert sent(sharded.report(), WAITING["microbatches"]) == told(planned(form, *on, **WAITING))


@pytest.mark.ci
def test_a_step_that_dispatches_nothing_is_told_what_dispatch_would_save():
    for form in (DENSE, MAPPED, SCANNED):
        assert f"All {EXPERTS} experts work on all tokens, of which each chooses {BEST}" in finding(
            planned(form, "ep", "expert=8"), "experts-dense"
        )
    assert not {"experts-dense", "experts-ungrouped"} & {f.code for f in planned(GROUPED, "ep", "expert=8").findings}
    assert "tokens of all examples" in finding(planned(FLAT, "ep", "expert=8"), "experts-ungrouped")


def test_tokens_cut_out_of_a_longer_row_are_no_places_of_experts():
    """Those before each target of a language model: its plan is that of tokens and targets by themselves."""

    def of(pairs):
        def step(params, batch):
            def loss(p):
                tokens, targets = pairs(batch)
                h = p["embed"][tokens]
                gates = jax.nn.softmax(h @ p["router"])
                best, chosen = jax.lax.top_k(gates, BEST)
                shares = (jax.nn.one_hot(chosen, EXPERTS) * best[..., None]).sum(-2)
                made = jnp.einsum("...d,edf->...ef", h, p["up"])
                h = h + jnp.einsum("...ef,efd,...e->...d", made, p["down"], shares)
                scores = jax.nn.log_softmax(h @ p["head"])
                return -jnp.take_along_axis(scores, targets[..., None], -1).mean()

            grads = jax.grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        shapes = {
            "embed": (48, WIDTH),
            "router": (WIDTH, EXPERTS),
            "up": (EXPERTS, WIDTH, HIDDEN),
            "down": (EXPERTS, HIDDEN, WIDTH),
            "head": (WIDTH, 48),
        }
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        longer = 1 if pairs is shifted else 0
        batch = jax.ShapeDtypeStruct((BATCH, TIME + longer), jnp.int32)
        sharded = jaxshard_magic.shard(step, BESIDE[0], mesh=jaxshard_magic.mesh(f"cpu:8 {BESIDE[1]}"))
        return sharded.planned(params, batch).plan

    def shifted(batch):
        return batch[:, :-1], batch[:, 1:]

    def alone(batch):
        return batch, batch

    assert told(of(shifted)) == told(of(alone))
    assert "experts work on all tokens" in finding(of(shifted), "experts-dense")


def best_two(gates):
    best, chosen = jax.lax.top_k(gates, BEST)
    return (jax.nn.one_hot(chosen, EXPERTS) * best[..., None]).sum(-2)


def best_two_of_groups(gates):
    """As DeepSeek-V3: the best two of four groups of experts, then the best two experts of these."""
    groups = gates.reshape(*gates.shape[:-1], 4, -1)
    kept = jax.nn.one_hot(jax.lax.top_k(groups.max(-1), 2)[1], 4).sum(-2)
    return best_two((groups * kept[..., None]).reshape(gates.shape))


def nearest(gates):
    return jax.nn.one_hot(jnp.argmin(-gates, -1), EXPERTS)


def side_by_side(up, x, shares):
    return (jnp.einsum("...d,edf->...ef", x, up) * shares[..., None]).sum(-2)


def looped(up, x, shares):
    return jnp.einsum("ebtf,bte->btf", jax.lax.map(lambda one: x @ one, up), shares)


ROWS_OF_ONE, EACH = (EXPERTS * WIDTH,), (EXPERTS, WIDTH)


@pytest.mark.parametrize(
    ("choose", "made", "stored", "best"),
    [
        (best_two, side_by_side, ROWS_OF_ONE, 2),
        (best_two_of_groups, side_by_side, EACH, 2),
        (nearest, side_by_side, EACH, 1),
        (best_two, looped, EACH, 2),
    ],
)
def test_there_are_as_many_experts_as_a_product_has_matrices(choose, made, stored, best):
    """Whether they are stored as rows of one matrix, and whatever groups of them are chosen among before; who chooses
    is known as well where a loop stacks what each of them makes."""

    def step(params, x):
        def loss(p):
            hidden = made(p["up"].reshape(*EACH, HIDDEN), x, choose(jax.nn.softmax(x @ p["router"])))
            return jnp.mean((hidden @ p["down"] - x) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    shapes = {"router": (WIDTH, EXPERTS), "up": (*stored, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((BATCH, TIME, WIDTH), jnp.float32)
    plan = jaxshard_magic.shard(step, "ep", mesh=jaxshard_magic.mesh("expert=4")).planned(params, x).plan
    (found,) = plan.experts
    assert found.expert_count == EXPERTS and [(r.expert_count, r.experts_per_token) for r in found.layers] == [
        (EXPERTS, best)
    ]
    assert f"All {EXPERTS} experts work on all tokens, of which each chooses {best}" in finding(plan, "experts-dense")


def test_matrices_and_biases_are_divided_by_expert_and_the_router_is_not():
    found = leaves(planned(GROUPED, "ep", "expert=4"))
    assert found["up"] == found["down"] == ("expert", None, None)
    assert (found["bias"], found["router"]) == (("expert", None), (None, None))
    found = leaves(planned(LAYERS, "ep+fsdp+tp", "data=2 expert=2 model=2"))
    assert found["up"] == (None, "expert", "data", "model")
    assert found["down"] == (None, "expert", "model", "data")
    assert not any(found["router"])  # tensor parallelism leaves experts that are chosen among alone


def test_experts_that_the_user_placed_otherwise_are_not_told_as_divided():
    some, every = {"mixture.up": "P()"}, {"mixture.(up|down|bias)": "P()"}
    assert [e.expert_count for e in planned(GROUPED, "ep", "expert=4", rules=some).experts] == [EXPERTS]
    assert not planned(GROUPED, "ep", "expert=4", rules=every).experts


def test_tensor_parallelism_divides_experts_and_adds_up_a_tokens_result_once():
    """And not what each of its experts makes of it, in all of their places, as along hidden dimensions."""
    plan = planned(GROUPED, "dp+tp", "data=2 model=4")
    assert leaves(plan)["up"] == leaves(plan)["down"] == ("model", None, None)
    assert "products side by side, dim 0" in next(x.reason for x in plan.leaves if x.path.endswith("up"))
    tokens = BATCH // 2 * TIME * WIDTH * F32
    sums = {size: n for (_, axes, size), n in told(plan).items() if axes == ("model",)}
    assert max(sums) == tokens and sums[tokens] == 1 + 1  # backward the gradient of what the head read


def refused(form: str, strategy: str, axes: str, experts: int = EXPERTS) -> str:
    call = zoo.STEPS[form].make()
    params = jax.tree.map(lambda x: x[tuple(slice(experts if n == EXPERTS else n) for n in x.shape)], call.args[0])
    mesh = jaxshard_magic.mesh(axes)
    return refusal(lambda: jaxshard_magic.shard(call.fn, strategy, mesh=mesh).planned(params, call.args[1]))


def test_what_cannot_be_divided_says_so():
    says = "6 experts do not divide by expert=4; expert=3 would divide; with expert=4, 4 or 8 experts would"
    assert says in refused(DENSE, "ep", "expert=4", experts=6)
    assert "ep found no experts" in refused("vision_transformer", "ep", "expert=4")
    assert "experts are not divided inside the stages" in refused(GROUPED, "ep+pp", "expert=4 pipe=2")
    assert "ep needs a mesh axis for it (expert)" in refused(GROUPED, "ep", "data=8")


def test_the_cheapest_cut_is_found_through_several_paths():
    """Two ways of 3 and 2 that meet in one of 4, and an edge back that lets the first go round: 4 are paid."""
    net = FlowNetwork()
    for a, b, x in (
        (net.SOURCE, "a", 3),
        (net.SOURCE, "b", 2),
        ("a", "c", 3),
        ("b", "c", 2),
        ("c", net.SINK, 4),
    ):
        net.add_cost(a, b, x)
    assert net.min_cut() == {"a", "b", "c"}
    net.add_cost("c", net.SINK, 9)
    assert net.min_cut() == set()


def test_a_softmax_along_features_of_experts_weights_takes_no_axis_twice():
    def step(params, x):
        def loss(p):
            chances = jax.nn.softmax(x @ p["gate"], -1)
            every = jnp.tanh(jnp.einsum("nd,edf->nef", x, p["up"]))
            out = jnp.einsum("nef,efd,ne->nd", every, p["down"], chances) @ p["gate"]
            near = jax.nn.softmax(jnp.einsum("eqf,ekf->eqk", p["up"], p["up"]), -1)
            return jnp.mean(out**2) + jnp.mean(near**2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    shapes = {"gate": (16, 4), "up": (4, 16, 8), "down": (4, 8, 16)}
    keys = jax.random.split(jax.random.key(0), 4)
    params = {n: jax.random.normal(k, s) / 4 for k, (n, s) in zip(keys, shapes.items(), strict=False)}
    x = jax.random.normal(keys[3], (8, 16))
    made = jaxshard_magic.shard(step, "ep+dp", mesh="data=2 expert=4")(params, x)
    for got, want in zip(jax.tree.leaves(made), jax.tree.leaves(jax.jit(step)(params, x)), strict=True):
        assert jnp.allclose(got, want, rtol=1e-4, atol=1e-5)
