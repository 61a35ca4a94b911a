"""A random program of a seed: the same one for the same seed, whatever else runs."""

import warnings
from random import Random

import jax
import jax.numpy as jnp
from jax import lax

from .drafts import Draft, Pool
from .operations import OPERATIONS
from .programs import HELPERS, Input, Operation, Program, Type

OPERATIONS_OF = (3, 8)  # at least and at most
MOST_ELEMENTS, MOST_DIMENSIONS = 4096, 4
TRIES = 200
_SPACE = {"jax": jax, "jnp": jnp, "lax": lax}
exec("\n".join(HELPERS.values()), _SPACE)  # our own text


def generate(seed: int) -> Program:
    """A program; its loss depends on a parameter."""
    rng = Random(seed)
    pool = Pool(rng, keyed=rng.random() < 0.4)
    batch = _batch(rng)
    for x in batch:
        pool.types[x.name] = x.type
        if x.type.dtype == "float32":
            pool.distinct.add(x.name)
    names, weights = [*OPERATIONS], [weight for weight, _ in OPERATIONS.values()]
    operations: list[Operation] = []
    wanted = rng.randint(*OPERATIONS_OF)
    for _ in range(TRIES):
        if len(operations) == wanted:
            break
        name = rng.choices(names, weights)[0] if operations else "product"
        before, params = dict(pool.types), [*pool.params]
        draft = OPERATIONS[name][1](pool)
        if draft is None or (type_ := _type_of(draft, pool)) is None:
            pool.types, pool.params = before, params
            pool.distinct &= {*before}
            continue
        made = Operation(f"v{len(operations)}", draft.text, draft.operands, type_, draft.distinct, draft.body)
        operations.append(made)
        pool.types[made.name] = type_
        if draft.distinct and type_.dtype == "float32":
            pool.distinct.add(made.name)
    return _ended(rng, pool, batch, operations)


def _batch(rng: Random) -> tuple[Input, ...]:
    """One to four leaves whose rows are examples; sizes of other dimensions repeat, also that of the rows."""
    rows = rng.choice((8, 8, 8, 8, 8, 16, 16, 24, 13))
    positions, width = rng.choice((4, 8, 8, 6)), rng.choice((2, 3, 4, 4, 8, 8))
    shapes: list[tuple[int, ...]] = [rng.choice(((rows, width), (rows, positions, width), (rows, positions, width)))]
    dtypes = ["float32"]
    for _ in range(rng.randrange(4)):
        shapes.append(rng.choice(((rows,), (rows, positions), (rows, width), (rows, 4, 4, 2), (rows, 0), shapes[0])))
        dtypes.append(rng.choice(("float32", "float32", "int32", "int32", "bfloat16", "bool")))
    leaves = [Input(f"x{i}", Type(s, d), i) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
    if rng.random() < 0.1:
        leaves.append(Input(f"x{len(leaves)}", leaves[0].type, leaves[0].seed, same_as=leaves[0].name))
    return tuple(leaves)


def _ended(rng: Random, pool: Pool, batch: tuple[Input, ...], operations: list[Operation]) -> Program:
    """The program with a loss of what nothing else reads, and a few outputs."""
    read = {name for o in operations for name in o.operands}
    trained = _from_params(operations)
    last = [o.name for o in operations if o.name not in read and o.type.floating and o.name in trained]
    loss = tuple(last[-3:]) or (operations[0].name,)
    others = [o.name for o in operations if o.name not in loss]
    outputs = tuple(n for n in others if rng.random() < (0.7 if n not in read else 0.15))
    kept = [x.name for x in (*pool.params, *batch) if rng.random() < 0.5]
    program = Program(tuple(pool.params), batch, tuple(operations), loss, outputs, rng.random() < 0.5)
    text = "".join(o.text for o in operations)
    return Program(**{**vars(program), "keyed": "(key" in text, "kept": tuple(kept)}).pruned()


def _from_params(operations: list[Operation]) -> set[str]:
    found: set[str] = set()
    for o in operations:
        if any(n[0] == "p" or n in found for n in o.operands):
            found.add(o.name)
    return found


def _type_of(draft: Draft, pool: Pool) -> Type | None:
    """The type of a drafted operation's result; None where its operands don't suit, or it is too large."""
    text = draft.text.replace("{body}", str(draft.body)) if draft.body else draft.text
    for i in range(len(draft.operands)):
        text = text.replace(f"{{{i}}}", f"a{i}")
    names = ", ".join(f"a{i}" for i in range(len(draft.operands)))
    shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in map(pool.types.__getitem__, draft.operands)]
    call = eval(f"lambda key: lambda {names}: {text}", _SPACE)  # our own text

    def summed(key: jax.Array, *args: jax.Array) -> jax.Array:
        return jnp.sum(call(key)(*args).astype(jnp.float32))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            key = jax.eval_shape(lambda: jax.random.key(0))
            result = jax.eval_shape(lambda k, *args: call(k)(*args), key, *shapes)
            floating = tuple(i + 1 for i, s in enumerate(shapes) if jnp.issubdtype(s.dtype, jnp.inexact))
            if floating:
                jax.eval_shape(jax.grad(summed, floating), key, *shapes)
    except (TypeError, ValueError, IndexError, NotImplementedError, ZeroDivisionError, AttributeError):
        return None  # what JAX says of shapes that don't fit
    type_ = Type(result.shape, str(result.dtype))
    fits = type_.size <= MOST_ELEMENTS and len(type_.shape) <= MOST_DIMENSIONS
    return type_ if fits and type_.dtype in ("float32", "bfloat16", "int32", "bool") else None
