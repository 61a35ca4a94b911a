"""Products, convolutions, attention, experts and linear algebra."""

from .drafts import Draft, Pool, operation, ranked


@operation(6)
def product(pool: Pool) -> Draft | None:
    if (x := pool.pick(ranked(1))) is None:
        return None
    inner, outer = pool[x][-1], pool.rng.choice((1, 2, 3, 4, 8, 8, 16))
    w = pool.param((inner, outer))
    return Draft(f"{{0}} @ {{1}} / {max(1, inner) ** 0.5:.3f}", (x, w), x in pool.distinct)


@operation(5)
def einsum(pool: Pool) -> Draft | None:
    """Any two values; equal sizes are contracted, kept as a batch or kept apart."""
    x, y = pool.pick(ranked(1, 3)), pool.pick(ranked(1, 3))
    if x is None or y is None:
        return None
    left, free, right = "abcd"[: len(pool[x])], list("abcd"[: len(pool[x])]), ""
    for i, size in enumerate(pool[y]):
        same = [f for f in free if pool[x][left.index(f)] == size]
        letter = pool.rng.choice(same) if same and pool.rng.random() < 0.8 else "wxyz"[i]
        free = [f for f in free if f != letter]
        right += letter
    letters = [*dict.fromkeys(left + right)]
    shared = [f for f in letters if f in left and f in right]
    summed = [f for f in shared if pool.rng.random() < 0.6]
    out = [f for f in letters if f not in summed]
    if pool.rng.random() < 0.3:
        pool.rng.shuffle(out)
    scale = max(1.0, float(_sizes(pool, x, left, summed))) ** 0.5
    return Draft(f'jnp.einsum("{left},{right}->{"".join(out)}", {{0}}, {{1}}) / {scale:.3f}', (x, y))


def _sizes(pool: Pool, x: str, letters: str, summed: list[str]) -> int:
    found = 1
    for f in summed:
        found *= pool[x][letters.index(f)]
    return found


@operation(3)
def convolution(pool: Pool) -> Draft | None:
    if (x := pool.pick(ranked(3, 4))) is None:
        return None
    rng, shape = pool.rng, pool[x]
    spatial = len(shape) - 2
    groups = rng.choice([g for g in (1, 1, 2, shape[-1]) if g and shape[-1] % g == 0] or [1])
    kernel = (
        *(rng.choice((1, 2, 3)) for _ in range(spatial)),
        shape[-1] // groups,
        groups * rng.choice((1, 2, 4)),
    )
    w = pool.param(kernel)
    strides, padding = (rng.choice((1, 1, 2)),) * spatial, rng.choice(("SAME", "VALID"))
    text = f'lax.conv_general_dilated({{0}}, {{1}}, {strides}, "{padding}"'
    if rng.random() < 0.2:
        text += f", lhs_dilation={(2,) * spatial}"
    if rng.random() < 0.3:
        text += f", rhs_dilation={(2,) * spatial}"
    if groups > 1:
        text += f", feature_group_count={groups}"
    names = '("NHC", "HIO", "NHC")' if spatial == 1 else '("NHWC", "HWIO", "NHWC")'
    scale = max(1, shape[-1] // groups * 3) ** 0.5
    return Draft(f"{text}, dimension_numbers={names}) / {scale:.3f}", (x, w))


@operation(2)
def pooled(pool: Pool) -> Draft | None:
    if (x := pool.pick(ranked(2))) is None:
        return None
    rng, rank = pool.rng, len(pool[x])
    window = [1] * rank
    for i in range(1, rank):
        window[i] = rng.choice((1, 2, 3))
    strides = tuple(rng.choice((1, w)) for w in window)
    start, how, scale = rng.choice((("-jnp.inf", "lax.max", 1), ("0.0", "lax.add", max(window))))
    padding = rng.choice(("SAME", "VALID"))
    return Draft(f'lax.reduce_window({{0}}, {start}, {how}, {tuple(window)}, {strides}, "{padding}") / {scale}', (x,))


@operation(2)
def attention(pool: Pool) -> Draft | None:
    if (x := pool.pick(ranked(3, 3))) is None or 0 in pool[x]:
        return None
    d = pool[x][-1]
    q, k, v = (pool.param((d, pool.rng.choice((d, d, 8)))) for _ in range(3))
    scale = max(1, d) ** 0.5
    heads = pool.rng.choice((1, 2))
    causal = pool.rng.random() < 0.5
    if heads == 1:
        inner = ", ".join(f"{{0}} @ {{{i}}} / {scale:.3f}" for i in (1, 2, 3))
        return Draft(f"attended({inner}, {causal})", (x, q, k, v))
    b, t = pool[x][:2]
    inner = ", ".join(f"({{0}} @ {{{i}}} / {scale:.3f}).reshape({b}, {t}, 2, -1).swapaxes(1, 2)" for i in (1, 2, 3))
    return Draft(f"attended({inner}, {causal}).swapaxes(1, 2).reshape({b}, {t}, -1)", (x, q, k, v))


@operation(3)
def experts(pool: Pool) -> Draft | None:
    if (x := pool.pick(ranked(2, 3))) is None or 0 in pool[x]:
        return None
    d = pool[x][-1]
    called = pool.rng.choice(("mixture", "routed"))
    return Draft(
        f"{called}({{0}}, {{1}}, {{2}}, {{3}})",
        (x, pool.param((d, 4)), pool.param((4, d, 8)), pool.param((4, 8, d))),
    )


@operation(1)
def linear_algebra(pool: Pool) -> Draft | None:
    if (x := pool.pick(lambda t: t.dtype == "float32" and len(t.shape) in (2, 3))) is None or 0 in pool[x]:
        return None
    m, n = pool[x][-2:]
    square = f"jnp.einsum('...ij,...kj->...ik', {{0}}, {{0}}) / {n} + 2 * jnp.eye({m})"
    text = pool.rng.choice(
        (
            f"jnp.linalg.cholesky({square})",
            f"jnp.linalg.solve({square}, {{0}})",
            f"jnp.abs(jnp.fft.rfft({{0}}, axis={pool.axis(x)})) / {n**0.5:.3f}",
            f"jnp.linalg.inv({square})",
            "jnp.real(jnp.fft.ifft(jnp.fft.fft({0}, axis=-1) * 0.5, axis=-1))",
            "own_row_gradient({0}[0], {0})",
        )
    )
    return Draft(text, (x,))
