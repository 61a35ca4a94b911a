"""What lives where when a step is split into stages: parameters, their state, and what travels between them."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support import pipelined_steps as steps
from support.pipelines import captured

import jaxshard_magic
from jaxshard_magic.analysis.pipeline_traffic import sent_bytes
from jaxshard_magic.errors import ShardError
from jaxshard_magic.pipeline.outer_program import flatten_step, gradient_calls
from jaxshard_magic.program.trace import path_name


def split_of(made, stages=2, microbatches=2, **schedule):
    found = captured(made, microbatches)
    return found, found.split(stages, **schedule)


def ranks(found, split):
    """The ranks of each input that holds no examples, piece by piece, by its path."""
    at = split.assignment.rank_of_value
    return {
        path_name(path): [at[v] for v in part.values]
        for i, (path, part) in enumerate(zip(found.traced.in_paths, split.leaves, strict=True))
        if i not in found.batch.input_dims
    }


def travels(split):
    """The shapes of what the step around the gradient call takes from one rank to another."""
    program, at = split.outer.program, split.assignment.rank_of_value
    return {
        program.shapes[v] for group in split.assignment.groups for v in group.inputs if v in at and at[v] != group.rank
    }


def test_each_layer_lives_on_its_stage_with_its_moments():
    found = ranks(*split_of(steps.unrolled(), stages=4, microbatches=4))
    layers = [found[f"params.layers.{i}.a"] for i in range(4)]
    assert layers == sorted(layers) and layers[0] == [0] and layers[3] != [0]
    assert found["params.embedding"] == [0] and found["params.head"] == [3]
    for path, at in found.items():
        for moment in ("mu", "nu"):
            if path.startswith("params"):
                assert found[path.replace("params", f"state.0.{moment}")] == at


def test_a_stack_of_layers_lives_in_pieces_with_its_moments():
    found = ranks(*split_of(steps.scanned(8), stages=4, microbatches=4))
    assert found["params.layers.a"] == found["state.0.mu.layers.b"] == [0, 1, 2, 3]
    assert found["params.embedding"] == [0] and found["params.head"] == [3]


@pytest.mark.parametrize("stacked", [False, True])
def test_factors_of_second_moments_live_with_their_parameters(stacked):
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    found = ranks(*split_of(steps.optimised(optimizer, stacked=stacked)))
    for path, at in found.items():
        if path.startswith("params"):
            for factor in ("v_row", "v_col"):
                own = found[next(p for p in found if p.endswith(path.replace("params", factor)))]
                assert own in (at, [0]), path


@pytest.mark.ci
def test_only_numbers_travel_to_clip_and_update():
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    for stacked in (False, True):
        assert travels(split_of(steps.optimised(clipped, stacked=stacked))[1]) == {()}
    assert travels(split_of(steps.optimised(optax.lamb(1e-2)))[1]) == {()}


def test_tied_embeddings_live_on_the_first_stage_that_reads_them():
    found, split = split_of(steps.tied())
    assert ranks(found, split)["params.embedding"] == [0]
    (loss,) = split.losses
    (i,) = (
        i for i, p in enumerate(loss.split_loss.pieces) if loss.reader_stages.get(i) == (0, 1) and i in loss.trained
    )
    assert loss.owner_rank(i) == 0 and loss.split_loss.program.shapes[loss.split_loss.program.inputs[i]] == (
        32,
        16,
    )


def test_with_several_stages_a_rank_each_lives_on_its_own():
    found = ranks(*split_of(steps.scanned(8), schedule="interleaved", chunks=2))
    assert found["params.layers.a"] == [0, 1, 0, 1]
    found = ranks(*split_of(steps.scanned(8), schedule="zb-v", microbatches=4))
    assert found["params.layers.a"] == [0, 1, 1, 0], "the last stage is on the first rank"


def test_frozen_weights_are_cut_as_trained_ones():
    found = ranks(*split_of(steps.adapters()))
    assert found["base.layers.a"] == found["low.u"] == [0, 1]


def test_averages_of_parameters_live_with_them():
    found = ranks(*split_of(steps.averaged()))
    assert found["ema.layers.b"] == found["params.layers.b"] == [0, 1]


def test_telling_of_an_average_over_layers_moves_none_of_them():
    told, plain = (ranks(*split_of(made)) for made in (steps.average_of_layers(), steps.unrolled()))
    assert told == plain


def test_state_that_belongs_nowhere_lives_with_the_loss():
    found = ranks(*split_of(steps.unrolled()))
    assert found["state.0.count"] == [1]


def test_a_parameter_that_the_loss_does_not_read_has_a_place_and_a_gradient():
    found, split = split_of(steps.unread())
    assert len(set(map(tuple, (at for path, at in ranks(found, split).items() if "spare" in path)))) == 1
    (loss,) = split.losses
    (i,) = (i for i in loss.gradient_values if i not in loss.reader_stages)
    assert loss.owner_rank(i) == split.loss_rank


def test_an_output_that_is_a_number_of_the_program_has_a_value():
    _, split = split_of(steps.average_of_layers())
    (number,) = split.outputs[-1].values
    assert split.outer.program.avals[number].dtype == jnp.int32


def test_rows_are_worked_on_in_the_pieces_of_their_stages():
    _, split = split_of(steps.scanned(8), stages=4, microbatches=4)
    whole = {(8, 16, 32), (8, 32, 16)}
    assert not whole & set(split.outer.program.shapes)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (steps.gradient_in_a_loop, "takes gradients in a loop of its own"),
        (steps.accumulated_in_a_loop, "use --microbatches where it takes the batch in parts"),
        (steps.nothing_to_cut, "has 1 place for a stage"),
    ],
)
def test_steps_that_are_no_pipeline_are_refused(made, message):
    with pytest.raises(ShardError, match=message) as error:
        split_of(made())
    assert "\n" not in str(error.value)


def test_a_step_without_a_gradient_is_refused():
    with pytest.raises(ShardError, match="takes no gradient"):
        gradient_calls(flatten_step(jax.make_jaxpr(lambda x: x + 1)(1.0)))


def test_a_condition_around_the_update_is_opened():
    closed = jax.make_jaxpr(
        lambda i, x: jax.lax.switch(i, [lambda x: (x, 1), lambda x: (2 * x, 2), lambda x: (x, 3)], x)
    )(0, 2.0)
    opened = flatten_step(closed)
    assert not any(e.bodies for e in opened.equations)
    for i, want in ((-1, (2, 1)), (1, (4, 2)), (7, (2, 3))):
        made = jax.core.eval_jaxpr(opened.closed.jaxpr, opened.closed.consts, jnp.int32(i), 2.0)
        assert tuple(map(float, made)) == want


def test_weights_that_a_loop_gives_back_and_nothing_reads_do_not_travel():
    """As nnx.scan does: what it returns has every layer's variables in it."""
    width, layers, examples = 16, 4, 8

    def step(weights, batch):
        def loss(weights):
            def layer(x, w):
                return x + jnp.tanh(x @ w), w

            x, _ = jax.lax.scan(layer, batch, weights)
            return jnp.square(x).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * grads, value

    mesh = jaxshard_magic.mesh("cpu:2 pipe=2")
    sharded = jaxshard_magic.shard(step, "pp", mesh=mesh, microbatches=4)
    pipeline = sharded.prepare(jnp.ones((layers, width, width)), jnp.ones((examples, width))).compiled
    activation = examples // 4 * width * 4  # float32, of one microbatch
    assert sent_bytes(pipeline, 0) == (activation, 0)
    assert sent_bytes(pipeline, 1) == (0, activation)
