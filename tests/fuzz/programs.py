"""A random train step as data: typed values, operations on them, a loss; printed as a plain JAX program.

A `Program` is what the generator makes, the judge runs and the shrinker takes parts from. Its text is the only form in
which it runs, so that what is printed for a fault is what failed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

LEARNING_RATE = 0.1
SMALL_WEIGHT = 16  # elements: `fsdp` divides the weights of random programs from here on


@dataclass(frozen=True)
class Type:
    """Shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def floating(self) -> bool:
        return self.dtype in ("float32", "bfloat16")


@dataclass(frozen=True)
class Body:
    """An expression in a function of `c` and `t`, arrays of one shape: `text` with a `{}` for each of `parts`."""

    text: str
    parts: tuple["Body", ...] = ()

    def __str__(self) -> str:
        return self.text.format(*map(str, self.parts))

    def smaller(self) -> Iterator["Body"]:
        """Bodies that lack one node of this one."""
        yield from self.parts
        for i, part in enumerate(self.parts):
            for less in part.smaller():
                yield replace(self, parts=(*self.parts[:i], less, *self.parts[i + 1 :]))


@dataclass(frozen=True)
class Operation:
    """`name = text`, where `{0}`, `{1}`, ... stand for operands and `{body}` for a function's expression.

    `distinct` says whether all elements of the result differ, but by chance: only these are sorted, as a rounding
    would decide between equal ones.
    """

    name: str
    text: str
    operands: tuple[str, ...]
    type: Type
    distinct: bool = False
    body: Body | None = None


@dataclass(frozen=True)
class Input:
    """A parameter or a leaf of the batch. `same_as`: another leaf of the batch, which is the very same array."""

    name: str
    type: Type
    seed: int
    same_as: str | None = None


@dataclass(frozen=True)
class Program:
    """A train step: state {params, key, count} and batch to the next state, the loss and further outputs.

    Args:
        params: trained arrays, `params["p0"]`.
        batch: leaves of the batch, `batch["x0"]`.
        operations: in order, inside of the loss.
        loss: names of floating values whose smooth means are added up.
        outputs: names of values that the step returns beside the loss.
        jitted: whether the step is decorated with `jax.jit`.
        keyed: whether the state has a key that is split in each step.
    """

    params: tuple[Input, ...]
    batch: tuple[Input, ...]
    operations: tuple[Operation, ...]
    loss: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    jitted: bool = False
    keyed: bool = False
    kept: tuple[str, ...] = field(default=())  # inputs that stay though nothing reads them

    @property
    def types(self) -> Mapping[str, Type]:
        """The type of each value, by its name."""
        return {v.name: v.type for v in (*self.params, *self.batch, *self.operations)}

    @property
    def ragged(self) -> bool:
        """Return whether the examples don't divide over eight devices, so that the step is run with `--pad`."""
        return any(x.type.shape[0] % 8 for x in self.batch)

    def text(self) -> str:
        """The step as source: the imports, the helpers that it uses and `train_step`."""
        lines = [self._line(o) for o in self.operations]
        body = "\n".join(lines)
        helpers = [source for name, source in HELPERS.items() if f"{name}(" in body]
        types = self.types
        terms = [f"jnp.sum(jnp.sin({self._read(v)}.astype(jnp.float32))) / {max(1, types[v].size)}" for v in self.loss]
        outputs = ", ".join(f'"{v}": {self._read(v)}' for v in self.outputs)
        kept, split = [], []
        if self.keyed:
            split = ['    key, next_key = jax.random.split(state["key"])']
            kept = ['"key": next_key, ']
        return "\n".join(
            (
                "import jax\nimport jax.numpy as jnp\nfrom jax import lax\n",
                *(f"\n{h}" for h in helpers),
                "",
                *(["@jax.jit"] if self.jitted else []),
                "def train_step(state, batch):",
                *split,
                "    def loss_of(params):",
                *(f"        {line}" for line in lines),
                f"        return {' + '.join(terms)}, {{{outputs}}}",
                '    (loss, more), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["params"])',
                f"    params = jax.tree.map(lambda p, g: p - {LEARNING_RATE} * g, state['params'], gradients)",
                f'    return {{"params": params, {"".join(kept)}"count": state["count"] + 1}}, loss, more',
                "",
            )
        )

    def script(
        self, strategy: str, mesh: str, libraries: tuple[str, ...], specs: Mapping[str, str] | None = None
    ) -> str:
        """A whole program that runs the step plain and sharded and prints how far both are apart."""
        params = ", ".join(f'"{p.name}": jnp.asarray({made(p)})' for p in self.params)
        batch = ", ".join(f'"{x.name}": {made(x)}' for x in self.batch if not x.same_as)
        again = "".join(f'batch["{x.name}"] = batch["{x.same_as}"]\n' for x in self.batch if x.same_as)
        pad = ", pad=True" if self.ragged else ""
        given = f", specs={dict(specs)}" if specs else ""
        key = '"key": jax.random.key(0), ' if self.keyed else ""
        return (
            "import os\nos.environ |= {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '8', 'NPROC': '32'}\n"
            "import numpy as np\n"
            f"{self.text()}\n"
            f'state = {{"params": {{{params}}}, {key}"count": jnp.int32(0)}}\n'
            f"batch = {{{batch}}}\n{again}"
            "import jaxshard_magic\n"
            "from jaxshard_magic.strategies import fsdp\n"
            f"fsdp.SMALL = {SMALL_WEIGHT}  # divide small weights, too\n"
            "plain = jax.jit(train_step)\n"
            f'sharded = jaxshard_magic.shard(train_step, "{strategy}", mesh="{mesh}"{pad}{given})\n'
            f"mine, theirs = state, state\n"
            f"for library in ({', '.join(libraries)},):\n"
            "    given = jax.tree.map(library.asarray, batch)\n"
            "    (mine, *a), (theirs, *b) = plain(mine, given), sharded(theirs, given)\n"
            "    off = lambda x, y: float(np.abs(np.float32(x) - np.float32(y)).max(initial=0))\n"
            '    print(jax.tree.map(off, (mine["params"], a), (theirs["params"], b)))\n'
        )

    def _line(self, o: Operation) -> str:
        text = o.text.replace("{body}", str(o.body)) if o.body else o.text
        for i, name in enumerate(o.operands):
            text = text.replace(f"{{{i}}}", self._read(name))
        return f"{o.name} = {text}"

    def _read(self, name: str) -> str:
        return {"p": f'params["{name}"]', "x": f'batch["{name}"]'}.get(name[0], name)

    def pruned(self) -> "Program":
        """The program without what neither the loss nor an output needs, but for `kept` inputs."""
        needed, operations = {*self.loss, *self.outputs, *self.kept}, []
        for o in reversed(self.operations):
            if o.name in needed:
                needed |= {*o.operands}
                operations.append(o)
        needed |= {x.same_as for x in self.batch if x.same_as and x.name in needed}
        return replace(
            self,
            params=tuple(p for p in self.params if p.name in needed) or self.params[:1],
            batch=tuple(x for x in self.batch if x.name in needed) or self.batch[:1],
            operations=tuple(reversed(operations)),
        )


def made(leaf: Input) -> str:
    """The expression that makes an input, in NumPy alone but for bfloat16, which takes `jnp`."""
    rng, shape = f"np.random.default_rng({leaf.seed})", leaf.type.shape
    if leaf.type.dtype == "int32":
        return f"{rng}.integers(0, 8, {shape}).astype(np.int32)"
    if leaf.type.dtype == "bool":
        return f"({rng}.normal(size={shape}) > 0)"
    dtype = "jnp.bfloat16" if leaf.type.dtype == "bfloat16" else "np.float32"
    return f"{rng}.normal(size={shape}).astype({dtype})"


# Functions that an expression can't hold.
HELPERS = {
    "own_gradient": """\
@jax.custom_vjp
def own_gradient(x):
    return jnp.sin(x)


own_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (0.5 * g * jnp.cos(x),))
""",
    "own_row_gradient": """\
@jax.custom_vjp
def own_row_gradient(x, y):
    return x * jnp.mean(y, 0)


own_row_gradient.defvjp(
    lambda x, y: (x * jnp.mean(y, 0), (x, y)),
    lambda saved, g: (g * jnp.mean(saved[1], 0), jnp.broadcast_to(g * saved[0], saved[1].shape) * 0.1),
)
""",
    "own_tangent": """\
@jax.custom_jvp
def own_tangent(x):
    return jnp.tanh(x)


own_tangent.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), 0.3 * tangents[0] * primals[0]))
""",
    "blocks_scanned": """\
def blocks_scanned(x, axis):
    def after(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    return lax.associative_scan(after, (jnp.full_like(x, 0.5), x), axis=axis)[1]
""",
    "sorted_by_expert": """\
def sorted_by_expert(x, route, up, down):
    keys = jnp.argmax(x @ route, -1)
    order, sizes = jnp.argsort(keys), jnp.bincount(keys, length=up.shape[0])
    rows = x[order]
    made = lax.ragged_dot(jnp.tanh(lax.ragged_dot(rows, up, sizes)), down, sizes)
    return made[jnp.argsort(order)], made, rows, order, sizes, keys
""",
    "attended": """\
def attended(q, k, v, causal):
    scores = jnp.einsum("...qd,...kd->...qk", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(scores, -1), v)
""",
    "mixture": """\
def mixture(x, gate, up, down):
    chances = jax.nn.softmax(x @ gate, -1)
    every = jnp.einsum("...d,edf->...ef", x, up) / x.shape[-1] ** 0.5
    return jnp.einsum("...ef,efd,...e->...d", jnp.tanh(every), down, chances) / up.shape[-1] ** 0.5
""",
    "routed": """\
def routed(x, gate, up, down):
    chance, expert = lax.top_k(jax.nn.softmax(x @ gate, -1), 2)
    weight = jnp.sum(jax.nn.one_hot(expert, gate.shape[-1]) * chance[..., None], -2)
    every = jnp.tanh(jnp.einsum("...d,edf->...ef", x, up) / x.shape[-1] ** 0.5)
    return jnp.einsum("...ef,efd,...e->...d", every, down, weight) / up.shape[-1] ** 0.5
""",
}
