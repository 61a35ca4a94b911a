"""What stages a step could be cut into, told before any is made: as by hand, and as in the pipeline that is made."""

import jax
import jax.numpy as jnp
import pytest
from support import steps_of_several_losses as several
from support.pipelined_steps import EXAMPLES, WIDTH, blocks, language_model, mean_loss, run_blocks, sentences
from support.thinned import thinned

import jaxshard_magic
from jaxshard_magic.errors import ShardError

F32 = 4
LAYER = 2 * WIDTH * 2 * WIDTH * F32  # bytes of a block's two weights


def outlined(step, args, mesh="pipe=4", **options):
    sharded = jaxshard_magic.shard(step, "pp", mesh=mesh, **options)
    return sharded, sharded.programs.outlined(args, {})[1]


def chain(stack):
    def step(params, x):
        loss, grads = jax.value_and_grad(lambda p: (run_blocks(p, x) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step, (stack, jnp.ones((EXAMPLES, WIDTH)))


@pytest.mark.parametrize("scanned", [False, True])
def test_stages_of_alike_layers_are_those_derived_by_hand(scanned):
    stack = blocks(8)
    step, args = chain(stack if scanned else [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(8)])
    sharded, outline = outlined(step, args)
    stages = outline.stages(sharded.request.pipeline.scheduled(4, 4).for_losses(1))
    each = 2 * EXAMPLES * WIDTH * 2 * WIDTH  # FLOPs of one of a layer's two products
    assert [sum(p.flops for p in stage.products) for stage in stages] == [2 * 2 * each] * 4
    assert [stage.weight_bytes for stage in stages] == [2 * LAYER] * 4
    assert [sum(p.weights for p in stage.products) for stage in stages] == [2 * LAYER] * 4
    assert [stage.crossing_bytes for stage in stages] == [EXAMPLES * WIDTH * F32] * 3 + [0]


STEPS = {
    "tied": lambda: trained(language_model(tied=True)),
    "scanned": lambda: trained(language_model(8, scanned=True)),
    "adversarial": several.adversarial,
    "alone": several.alone_each,
}


def trained(params):
    def step(params, x, y):
        loss, grads = jax.value_and_grad(mean_loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step, (params, *sentences())


@pytest.mark.parametrize("name", thinned(STEPS, ("tied", "scanned")))
def test_it_is_the_pipeline_that_is_then_made(name):
    step, args = STEPS[name]()
    sharded, outline = outlined(step, args, microbatches=4)
    split = sharded.prepare(*args).compiled.split
    stages, at = outline.stages(split.schedule), 0
    for loss in split.losses:
        read: set[int] = set()
        each = stages[at : at + len(loss.stages)]
        at += len(each)
        assert [s.crossing_bytes // 4 for s in each[:-1]] == list(loss.split_loss.crossing_bytes)
        for program, stage in zip(loss.programs, each, strict=True):
            first = set(program.stage.parameters) - read
            read |= first
            inputs = loss.split_loss.program.closed.in_avals
            assert stage.weight_bytes == sum(inputs[i].size * inputs[i].dtype.itemsize for i in first)
    assert at == len(stages)


def test_a_loss_that_cannot_be_cut_is_whole_in_its_last_stage():
    step, args = several.one_without_examples()
    sharded, outline = outlined(step, args)
    stages = outline.stages(sharded.request.pipeline.scheduled(4, 4).for_losses(len(outline)))
    uncut = [a for a in range(0, len(stages), 4) if not any(s.weight_bytes for s in stages[a : a + 3])]
    assert len(uncut) == 1
    assert [s.crossing_bytes for s in stages[uncut[0] : uncut[0] + 4]] == [0] * 4
    assert stages[uncut[0] + 3].weight_bytes == sum(x.nbytes for x in jax.tree.leaves(args[0]))


def test_a_step_that_takes_no_gradient_and_one_with_too_few_places_are_told():
    with pytest.raises(ShardError, match="takes no gradient"):
        outlined(lambda params, x: (params, x.sum()), chain(blocks(2))[1])
    sharded, outline = outlined(*chain([{"a": jnp.ones((WIDTH, 2 * WIDTH)), "b": jnp.ones((2 * WIDTH, WIDTH))}]))
    with pytest.raises(ShardError, match=r"places for a stage .* 64 are needed"):
        outline.stages(sharded.request.pipeline.scheduled(64, 64).for_losses(1))
