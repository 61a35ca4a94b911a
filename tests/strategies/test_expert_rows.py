"""The rows that each expert of a step gets, counted on the first call's inputs, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from zoo.mixtures import BEST, CAPACITY, EXPERTS, TIME, flat, grouped, mapped
from zoo.parts import BATCH

import jaxshard_magic


def load_of(form, strategy, axes, examples=BATCH, **options):
    """The layers' loads after a call of a form of the zoo with so many of its examples, and what the call was given."""
    call = zoo.STEPS[form].make()
    params, batch = call.args
    batch = {name: x[:examples] for name, x in batch.items()}
    step = jaxshard_magic.shard(call.fn, strategy, mesh=jaxshard_magic.mesh(f"cpu:8 {axes}"), **options)
    step.count_expert_rows = True
    step(params, batch)
    (experts,) = step.report().experts
    assert (experts.number, experts.axes) == (EXPERTS, ("expert",))
    return experts, params, batch


def chosen_of(router, tokens):
    """How many of each group's tokens choose each expert, in NumPy: (groups, experts)."""
    gates = tokens @ router
    best = np.argsort(-gates, axis=-1)[..., :BEST]
    return np.stack([np.bincount(group.ravel(), minlength=EXPERTS) for group in best])


@pytest.mark.parametrize(
    ("examples", "microbatches"),
    [
        (BATCH, None),
        (BATCH - 3, 2),
        pytest.param(BATCH, 2, marks=pytest.mark.full),
        pytest.param(BATCH - 3, None, marks=pytest.mark.full),
    ],
)
def test_rows_that_a_step_dispatches_and_drops_are_those_that_numpy_counts(examples, microbatches):
    """Each example is a group. The batch's rows and not those that are added to it, at once or in microbatches."""
    how = {"microbatches": microbatches, "pad": examples < BATCH}
    experts, params, batch = load_of("dispatched_in_groups", "ep+dp", "data=2 expert=4", examples, **how)
    counts = chosen_of(np.asarray(params["mixture"]["router"]), np.asarray(batch["x"]))
    room = CAPACITY * BEST * TIME // EXPERTS
    (load,) = experts.layers
    assert experts.work == "places"
    assert (load.tokens, load.best) == (examples * TIME, BEST)
    assert (load.places, load.groups) == (examples * room, examples)
    assert load.chosen == tuple(counts.sum(0))
    assert load.kept == tuple(np.minimum(counts, room).sum(0))
    assert load.most == counts.max() and load.dropped == np.maximum(counts - room, 0).sum() > 0


@pytest.mark.parametrize("mixture", [grouped, flat, mapped])
def test_what_a_loss_chooses_to_even_out_what_experts_get_is_no_layer(mixture):
    """The first choice of each token, found once more from the same gates: of all tokens, and of each group."""

    def train_step(params, batch):
        def loss_fn(p):
            gates = jax.nn.softmax(batch["x"] @ p["mixture"]["router"])
            first = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
            also = jax.nn.one_hot(jax.lax.top_k(gates, 1)[1][..., 0], EXPERTS)
            uneven = jnp.sum(first.mean((0, 1)) * gates.mean((0, 1)))
            uneven += jnp.mean(also.mean(1) * gates.mean(1))
            return jnp.mean((mixture(p["mixture"], batch["x"]) @ p["head"] - batch["y"]) ** 2) + uneven

        return jax.grad(loss_fn)(params)

    params, batch = zoo.STEPS["dispatched_in_groups"].make().args
    step = jaxshard_magic.shard(train_step, "ep+dp", mesh=jaxshard_magic.mesh("cpu:8 data=2 expert=4"))
    (experts,) = step.planned(params, batch).plan.experts
    assert [(route.experts_per_token, route.tokens) for route in experts.layers] == [(BEST, BATCH * TIME)]


@pytest.mark.ci
def test_rows_that_are_sorted_to_experts_are_counted_for_each_layer_of_a_loop():
    experts, *_ = load_of("dropless_scanned", "ep+fsdp", "data=2 expert=4")
    assert experts.work == "sorted" and len(experts.layers) == 2
    for load in experts.layers:
        assert load.chosen is not None and sum(load.chosen) == load.tokens * BEST == BATCH * TIME * BEST
        assert load.places is load.kept is load.dropped is None
    assert experts.layers[0].chosen != experts.layers[1].chosen


@pytest.mark.ci
def test_a_cell_counts_rows_before_its_first_step(notebook, as_asked):
    """Its state is the one that the first step takes, though each call gives another; so in a step that drops none."""
    notebook.run("%mesh cpu:8 expert=8;")
    notebook.run("import zoo; call = zoo.STEPS['experts_mapped'].make(); given = params, batch = call.args")
    notebook.run(
        "%%shard ep -o report\ntrain_step = call.fn\nfor _ in range(2):\n    params, loss = train_step(params, batch)"
    )
    params, batch = notebook["given"]
    counts = chosen_of(np.asarray(params["mixture"]["router"]), np.asarray(batch["x"]))
    (experts,) = notebook["report"].experts
    (load,) = experts.layers
    assert (experts.work, load.chosen, load.places) == ("all", tuple(counts.sum(0)), None)
