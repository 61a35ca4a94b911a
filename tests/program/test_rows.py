"""What follows the batch without meeting a gradient, and what only looks like one: indices, targets, keys, graphs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.thinned import thinned

import jaxshard_magic

ROWS = 64
adam = optax.adam(1e-3, eps=1e-4)


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed + sum(shape)).normal(size=shape), jnp.float32)


def network(params, x):
    *hidden, last = params.values()
    for w, b in hidden:
        x = jax.nn.relu(x @ w + b)
    return x @ last[0] + last[1]


def layers(out, seed=0):
    sizes = {"layer0": (16, 256), "layer1": (256, 256), "layer2": (256, out)}
    return {name: (0.1 * array(*size, seed=seed), jnp.zeros(size[1])) for name, size in sizes.items()}


def planned(step, *arguments, strategy="fsdp", mesh="data=8"):
    return jaxshard_magic.shard(step, strategy, mesh=jaxshard_magic.mesh(mesh)).planned(*arguments).plan


def specs(plan, name):
    """Where each leaf under an argument lies."""
    return {x.path.removeprefix(name): x.spec for x in plan.leaves if x.path.split(".")[0] == name}


def divided(plan, *names):
    return all(spec[:1] == ("data",) for name in names for spec in specs(plan, name).values())


def same(step, *arguments, strategy="fsdp", mesh="data=8"):
    got = jaxshard_magic.shard(step, strategy, mesh=jaxshard_magic.mesh(mesh))(*arguments)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(step(*arguments)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * float(jnp.max(jnp.abs(b))))


def q_learning(index):
    """CleanRL's DQN; `index(values, actions)` picks the value of each row's action."""

    @jax.jit
    def step(params, target, opt_state, observations, actions, next_observations, rewards):
        best = jnp.max(network(target, next_observations), axis=-1)
        goal = rewards + 0.99 * best

        def loss(params):
            return jnp.mean((index(network(params, observations), actions) - goal) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = adam.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    params, target = layers(4), layers(4, seed=1)
    batch = array(ROWS, 16), jnp.arange(ROWS) % 4, array(ROWS, 16, seed=1), array(ROWS)
    return step, (params, target, adam.init(params), *batch)


INDEXED = {
    "beside arange": lambda q, a: q[jnp.arange(q.shape[0]), a],
    "beside arange of a column": lambda q, a: q[jnp.arange(len(q))[:, None], a[:, None]][:, 0],
    "taken along": lambda q, a: jnp.take_along_axis(q, a[:, None], axis=1)[:, 0],
    "row by row": lambda q, a: jax.vmap(lambda row, i: row[i])(q, a),
    "by a mask": lambda q, a: (q * jax.nn.one_hot(a, 4)).sum(-1),
    "set to one": lambda q, a: (q * jnp.zeros_like(q).at[jnp.arange(q.shape[0]), a].set(1)).sum(-1),
}


@pytest.mark.parametrize("how", INDEXED)
def test_rows_are_followed_through_indices_and_targets(how):
    step, arguments = q_learning(INDEXED[how])
    assert divided(planned(step, *arguments), "observations", "actions", "next_observations", "rewards")


@pytest.mark.ci
def test_a_target_network_that_comes_back_to_nobody_is_cut_as_the_network():
    step, arguments = q_learning(INDEXED["beside arange"])
    for strategy, mesh in (("fsdp", "data=8"), ("fsdp+tp", "data=4 model=2")):
        plan = planned(step, *arguments, strategy=strategy, mesh=mesh)
        assert specs(plan, "target") == specs(plan, "params")
        assert any(any(spec) for spec in specs(plan, "target").values())
        assert {x.role for x in plan.leaves if x.path.startswith("target")} == {"frozen"}
    same(step, *arguments, strategy="fsdp+tp", mesh="data=4 model=2")


def test_an_array_of_a_parameters_shape_is_no_copy_of_it():
    @jax.jit
    def step(params, batch):
        def loss(p):
            return jnp.mean((jnp.tanh(batch["x"] @ p["x"]) @ p["y"] - batch["y"]) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    square = {"x": array(64, 64), "y": array(64, 64)}
    assert divided(planned(step, square, square), "batch")


def keyed(split):
    @jax.jit
    def step(params, keys, x):
        def loss(params, key, x):
            h = jax.nn.relu(x @ params["in"])
            return jnp.mean((h * jax.random.bernoulli(key, 0.5, h.shape) @ params["out"]) ** 2)

        def value(p):
            return jnp.mean(jax.vmap(loss, (None, 0, 0))(p, keys, x))

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(value)(params))

    return step, ({"in": array(16, 64), "out": array(64, 4)}, split, array(ROWS, 16))


@pytest.mark.parametrize(
    "kind", [pytest.param(jax.random.key, marks=pytest.mark.full), jax.random.PRNGKey], ids=["typed", "raw"]
)
def test_a_key_for_each_example_lies_with_its_example(kind):
    step, arguments = keyed(jax.random.split(kind(0), ROWS))
    assert divided(planned(step, *arguments), "keys", "x")
    same(step, *arguments)


def graph(nodes, edges):
    """A graph convolution over all of one graph (Kipf and Welling)."""

    @jax.jit
    def step(params, x, senders, receivers, weights, labels):
        def loss(params):
            h = x
            for name in ("in", "out"):
                sent = (h @ params[name])[senders] * weights[:, None]
                h = jnp.tanh(jax.ops.segment_sum(sent, receivers, num_segments=x.shape[0]))
            return optax.softmax_cross_entropy_with_integer_labels(h, labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    ends = np.random.default_rng(0).integers(0, nodes, (2, edges))
    data = array(nodes, 16), jnp.asarray(ends[0]), jnp.asarray(ends[1]), array(edges), jnp.arange(nodes) % 4
    return step, ({"in": array(16, 32), "out": array(32, 4)}, *data)


@pytest.mark.ci
def test_nodes_and_edges_of_a_graph_are_divided():
    step, arguments = graph(64, 256)
    plan = planned(step, *arguments)
    assert divided(plan, "x", "senders", "receivers", "weights", "labels")
    assert plan.examples is None
    assert "made of each other (" in next(f.message for f in plan.findings if f.code == "rows-joined")
    same(step, *arguments)


@pytest.mark.parametrize("edges", [pytest.param(156, marks=pytest.mark.full), 160])
def test_the_nodes_of_one_graph_are_no_examples_that_have_to_divide(edges):
    step, arguments = graph(34, edges)
    plan = planned(step, *arguments)
    assert specs(plan, "x") == {"": P(None, None)}
    assert divided(plan, "senders", "weights") == (edges == 160)
    odd = next(f for f in plan.findings if f.code == "rows-odd")
    assert "34 rows, which do not divide by data=8" in odd.message and "Of 40 rows" in odd.message and odd.fix is None
    same(step, *arguments)


def test_the_rows_of_an_adjacency_matrix_are_no_examples():
    @jax.jit
    def step(params, adjacency, x, labels):
        def loss(params):
            h = adjacency @ jax.nn.relu(adjacency @ x @ params["in"]) @ params["out"]
            return optax.softmax_cross_entropy_with_integer_labels(h, labels).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = {"in": array(16, 32), "out": array(32, 4)}
    arguments = params, (array(34, 34) > 0.8).astype("f"), array(34, 16), jnp.arange(34) % 4
    assert planned(step, *arguments).examples is None
    same(step, *arguments)


def test_microbatches_of_one_graph_are_refused_for_what_it_is():
    step, arguments = graph(64, 256)
    sharded = jaxshard_magic.shard(step, "dp", mesh=jaxshard_magic.mesh("data=8"), microbatches=4)
    with pytest.raises(jaxshard_magic.ShardError, match="the rows of x are made of each other"):
        sharded.planned(*arguments)


def test_what_has_as_many_rows_as_the_batch_and_stays_whole_is_said():
    @jax.jit
    def step(params, x, y, order):
        def loss(p):
            return jnp.mean((x @ p - y) ** 2)

        return params - jax.grad(loss)(params), order[::-1]

    plan = planned(step, array(16, 4), array(ROWS, 16), array(ROWS, 4), jnp.arange(ROWS))
    told = next(f for f in plan.findings if f.code == "rows-whole")
    assert told.message.startswith("order has 64 rows, as the batch has")
    assert told.fix == " ".join(f"--spec \"{name}=P('data')\"" for name in ("x", "y", "order"))


def test_statistics_of_as_many_features_as_there_are_rows_are_not_taken_for_rows():
    @jax.jit
    def step(params, mean, x):
        def loss(p):
            h = x @ p["in"]
            return jnp.mean(((h - h.mean(0)) @ p["out"]) ** 2), h.mean(0)

        grads, now = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), 0.9 * mean + 0.1 * now

    params = {"in": array(16, ROWS), "out": array(ROWS, 4)}
    plan = planned(step, params, array(ROWS), array(ROWS, 16), strategy="dp")
    assert divided(plan, "x") and not divided(plan, "mean")
    assert not any(f.code == "rows-whole" for f in plan.findings)


def actor_critic(returned):
    """Actor and critic of like layers; `returned` says which come back, and in which order."""

    @jax.jit
    def step(actor_params, critic_params, observations, actions, returns):
        def policy(p):
            chosen = jax.nn.log_softmax(network(p, observations))[jnp.arange(len(actions)), actions]
            return -jnp.mean(chosen * (returns - network(critic_params, observations)[:, 0]))

        def value(p):
            return jnp.mean((network(p, observations)[:, 0] - returns) ** 2)

        new = {"actor": descended(policy, actor_params), "critic": descended(value, critic_params)}
        return [new[name] for name in returned]

    return step, (layers(4), layers(1, seed=1), array(ROWS, 16), jnp.arange(ROWS) % 4, array(ROWS))


def descended(loss, params):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


@pytest.mark.parametrize(
    "returned",
    thinned([["actor"], ["critic"], ["critic", "actor"], ["actor", "critic"]], [["critic", "actor"]]),
)
def test_actor_and_critic_of_like_layers_are_not_taken_for_each_other(returned):
    step, arguments = actor_critic(returned)
    plan = planned(step, *arguments)
    traced = plan.traced
    assert traced is not None
    came = {traced.in_paths[i][0].name for i in plan.state_pairs.values()}
    assert came == {f"{name}_params" for name in returned}
    for o, i in plan.state_pairs.items():
        assert returned[traced.out_paths[o][1].idx] + "_params" == traced.in_paths[i][0].name
    same(step, *arguments)
