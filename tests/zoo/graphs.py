"""Graphs as jraph has them: several padded to fixed sizes in one tuple, and one whose nodes are all there is."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from .parts import Draw, adam, linen_variables, mlp, mlp_params, state_roles
from .registry import Call, step

CLASSES = 8


class GraphsTuple(NamedTuple):
    """Graphs one after the other; the last one is padding."""

    nodes: Any
    edges: Any
    senders: Any
    receivers: Any
    globals: Any
    n_node: Any
    n_edge: Any


def network(params: Any, graph: GraphsTuple) -> jax.Array:
    """Edges from their ends, nodes from their edges, graphs from both: logits (graphs, classes)."""
    n_nodes, n_graphs = graph.nodes.shape[0], graph.n_node.shape[0]
    which = jnp.arange(n_graphs)
    node_graph = jnp.repeat(which, graph.n_node, total_repeat_length=n_nodes)
    edge_graph = jnp.repeat(which, graph.n_edge, total_repeat_length=graph.edges.shape[0])
    nodes, edges = mlp(params["embed_nodes"], graph.nodes), mlp(params["embed_edges"], graph.edges)
    for p in params["rounds"]:
        ends = [edges, nodes[graph.senders], nodes[graph.receivers]]
        edges = edges + mlp(p["edges"], jnp.concatenate(ends, axis=-1))
        received = jax.ops.segment_sum(edges, graph.receivers, n_nodes)
        nodes = nodes + mlp(p["nodes"], jnp.concatenate([nodes, received], axis=-1))
    means = jax.ops.segment_sum(nodes, node_graph, n_graphs) / jnp.maximum(graph.n_node, 1)[:, None]
    return mlp(params["read"], jnp.concatenate([means, jax.ops.segment_max(edges, edge_graph, n_graphs)], -1))


@jax.jit
def padded_step(params, opt_state, graph, labels):
    mask = jnp.arange(labels.shape[0]) < labels.shape[0] - 1

    def loss_fn(p):
        scores = jax.nn.log_softmax(network(p, graph))
        losses = -jnp.sum(jax.nn.one_hot(labels, CLASSES) * scores, axis=-1)
        right = jnp.sum((jnp.argmax(scores, -1) == labels) * mask) / jnp.sum(mask)
        return jnp.sum(losses * mask) / jnp.sum(mask), right

    (loss, right), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss, right


NODES, EDGES, GRAPHS = 64, 128, 8


@step(
    "public graph",
    batch={f"graph.{name}": 0 for name in ("nodes", "edges", "senders", "receivers", "n_node", "n_edge")}
    | {"labels": 0},
    roles={"params": "params", "opt_state": "optimizer", "graph": "batch", "labels": "batch"},
    feeds={"params": 0, "opt_state": 1},
    tolerance=1e-3,
    notes="graphs of different sizes, the last one padding; None among the fields",
)
def padded_graphs(seed: int = 0) -> Call:
    d, width = Draw(seed), 32
    n_node = np.array([6, 9, 4, 7, 8, 5, 10, 15], np.int32)
    n_edge = 2 * n_node
    n_edge[-1] = EDGES - n_edge[:-1].sum()
    first = np.repeat(np.cumsum(n_node) - n_node, n_edge)
    ends = [(first + d.rng.integers(0, np.repeat(n_node, n_edge))).astype(np.int32) for _ in range(2)]
    graph = GraphsTuple(d.numpy(NODES, 16), d.numpy(EDGES, 8), *ends, None, n_node, n_edge)
    rounds = [
        {"edges": mlp_params(d, 3 * width, 64, width), "nodes": mlp_params(d, 2 * width, 64, width)} for _ in range(2)
    ]
    params = {
        "embed_nodes": mlp_params(d, 16, width),
        "embed_edges": mlp_params(d, 8, width),
        "rounds": rounds,
    }
    params["read"] = mlp_params(d, 2 * width, 64, CLASSES)
    labels = d.rng.integers(0, CLASSES, GRAPHS).astype(np.int32)
    return Call(padded_step, (params, adam.init(params), graph, labels))


class Convolutions(nn.Module):
    """Each node from its neighbours, by a normalised matrix of all pairs."""

    @nn.compact
    def __call__(self, club):
        x = club["features"]
        for width in (64, 32):
            x = nn.relu(club["adjacency"] @ nn.Dense(width)(x))
        return nn.Dense(2)(x)


MEMBERS = 34
CONVOLUTIONS = Convolutions()


@jax.jit
def club_step(state, club):
    """Two of the members are labelled; the loss is over them alone."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, club)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, club["labels"])
        return jnp.sum(losses * club["known"]) / jnp.sum(club["known"]), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == club["labels"])
    return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}


@step(
    "public linen graph",
    roles=state_roles("state") | {"club": None},
    feeds={"state": 0},
    notes="34 nodes of one graph are no batch of 34 examples",
)
def linen_one_graph(seed: int = 0) -> Call:
    d = Draw(seed)
    linked = d.rng.uniform(size=(MEMBERS, MEMBERS)) < 0.15
    links = np.maximum(linked, linked.T).astype(np.float32) + np.eye(MEMBERS, dtype=np.float32)
    root = np.sqrt(links.sum(1))
    club = {"features": np.eye(MEMBERS, dtype=np.float32), "adjacency": links / root / root[:, None]}
    club |= {
        "labels": d.rng.integers(0, 2, MEMBERS),
        "known": np.eye(1, MEMBERS, 0)[0] + np.eye(1, MEMBERS, 33)[0],
    }
    club = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32 if x.dtype == np.int64 else jnp.float32), club)
    params = linen_variables(CONVOLUTIONS, seed, club)["params"]
    return Call(club_step, (TrainState.create(apply_fn=CONVOLUTIONS.apply, params=params, tx=adam), club))
