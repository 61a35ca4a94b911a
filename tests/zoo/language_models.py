"""Language models as their repositories train them: one array of tokens, masks, two sentences, pairs of answers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from .parts import BATCH, Draw, adam, adamw, linen_variables, state_roles
from .registry import Call, step

VOCAB, WIDTH, HEADS, HIDDEN, LAYERS, TIME = 64, 64, 4, 128, 4, 16
each_token = optax.softmax_cross_entropy_with_integer_labels


class CharacterBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class CharacterModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.position = nnx.Embed(TIME, WIDTH, rngs=rngs)
        self.blocks = nnx.List([CharacterBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, nn.make_causal_mask(tokens))
        return self.head(self.norm(x))


@nnx.jit
def character_step(model, optimizer, metrics, tokens):
    def loss_fn(model):
        return each_token(model(tokens[:, :-1]), tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    metrics.update(values=loss)
    optimizer.update(model, grads)


@step(
    "public nnx transformer rng",
    batch={"tokens": 0},
    roles={"model": "params", "optimizer": "optimizer", "optimizer.step": None, "metrics": "other"}
    | {f"model.blocks.{i}.{inner}": "rng" for i in range(LAYERS) for inner in ("dropout", "attention.rngs")}
    | {"tokens": "batch"},
    mutates=True,
    noise=tuple(
        f"{tree}.blocks.{i}.attention.key.bias"
        for tree in ("model", "optimizer.opt_state.0.mu", "optimizer.opt_state.0.nu")
        for i in range(LAYERS)
    ),
    notes="inputs and targets are slices of one array, which the first and the last layer read; dropout inside",
)
def nnx_character_model(seed: int = 0) -> Call:
    model = CharacterModel(nnx.Rngs(params=seed, dropout=seed + 1))
    metrics, tokens = nnx.metrics.Average(), Draw(seed).ids(VOCAB, BATCH, TIME + 1)
    return Call(character_step, (model, nnx.Optimizer(model, adamw, wrt=nnx.Param), metrics, tokens))


class Layer(nn.Module):
    """Attention, to the encoder's output too where there is one, and an MLP; LayerNorm before each."""

    @nn.compact
    def __call__(self, x, mask, memory=None, memory_mask=None):
        attention = functools.partial(nn.MultiHeadDotProductAttention, HEADS, use_bias=False)
        x = x + attention()(nn.LayerNorm()(x), mask=mask)
        if memory is not None:
            x = x + attention()(nn.LayerNorm()(x), memory, mask=memory_mask)
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(HIDDEN)(nn.LayerNorm()(x))))


def shift_right(tokens: jax.Array) -> jax.Array:
    return jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]


class ShiftedDecoder(nn.Module):
    """Layers under scan, each computed again on the way back; the embedding is the head, too."""

    @nn.compact
    def __call__(self, tokens):
        mask = nn.combine_masks(nn.make_attention_mask(tokens > 0, tokens > 0), nn.make_causal_mask(tokens))
        embed = nn.Embed(VOCAB, WIDTH)
        x = embed(shift_right(tokens)) + self.param("position", nn.initializers.normal(0.02), (TIME, WIDTH))
        stack = nn.scan(
            nn.remat(lambda layer, x, mask: (layer(x, mask), None), prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x, _ = stack(Layer(), x, mask)
        return embed.attend(nn.LayerNorm()(x)) / WIDTH**0.5


SHIFTED = ShiftedDecoder()
warm = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.warmup_cosine_decay_schedule(1e-4, 1e-3, 4, 20), eps=1e-5),
)


@functools.partial(jax.jit, donate_argnums=0)
def shifted_step(state, batch):
    tokens = batch["inputs"]
    weights = jnp.where(tokens > 0, 1.0, 0.0)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens)
        return (each_token(logits, tokens) * weights).sum() / weights.sum(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    right = ((jnp.argmax(logits, -1) == tokens) * weights).sum()
    return state.apply_gradients(grads=grads), {"loss": loss, "right": right, "denominator": weights.sum()}


@step(
    "public linen transformer scan remat",
    batch={"batch.inputs": 0},
    roles=state_roles("state") | {"batch": "batch"},
    feeds={"state": 0},
    notes="the whole array is input, shifted, mask and target; padding weighs nothing; scanned layers with remat",
)
def linen_padded_tokens(seed: int = 0) -> Call:
    d = Draw(seed)
    lengths = TIME - d.ids(6, BATCH)[:, None]
    tokens = jnp.where(jnp.arange(TIME) < lengths, 1 + d.ids(VOCAB - 1, BATCH, TIME), 0)
    params = linen_variables(SHIFTED, seed, tokens[:1])["params"]
    state = TrainState.create(apply_fn=SHIFTED.apply, params=params, tx=warm)
    return Call(shifted_step, (state, {"inputs": tokens}))


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB + 1, WIDTH)(tokens) + nn.Embed(TIME, WIDTH)(jnp.arange(tokens.shape[1]))
        for _ in range(LAYERS):
            x = Layer()(x, None)
        return nn.Dense(VOCAB)(nn.LayerNorm()(nn.gelu(nn.Dense(WIDTH)(x))))


ENCODER = Encoder()


@jax.jit
def masked_step(state, tokens, rng):
    """A sixth of the tokens is hidden, the loss is over those alone."""
    rng, mask_rng = jax.random.split(rng)
    hidden = jax.random.bernoulli(mask_rng, 0.15, tokens.shape)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, jnp.where(hidden, VOCAB, tokens))
        return jnp.sum(each_token(logits, tokens) * hidden) / jnp.maximum(jnp.sum(hidden), 1)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), rng, loss


@step(
    "public linen transformer rng",
    batch={"tokens": 0},
    roles=state_roles("state") | {"tokens": "batch", "rng": "rng"},
    feeds={"state": 0, "rng": 1},
    notes="how many tokens count is drawn inside",
)
def linen_masked_language_model(seed: int = 0) -> Call:
    tokens = Draw(seed).ids(VOCAB, BATCH, TIME)
    params = linen_variables(ENCODER, seed, tokens[:1])["params"]
    state = TrainState.create(apply_fn=ENCODER.apply, params=params, tx=adam)
    return Call(masked_step, (state, tokens, jax.random.key(seed)))


class Translator(nn.Module):
    @nn.compact
    def __call__(self, pair):
        inputs, targets, embed = pair["inputs"], pair["targets"], nn.Embed(VOCAB, WIDTH)
        position = self.param("position", nn.initializers.normal(0.02), (TIME, WIDTH))
        memory, y = embed(inputs) + position, embed(shift_right(targets)) + position
        for _ in range(2):
            memory = Layer()(memory, nn.make_attention_mask(inputs > 0, inputs > 0))
        memory = nn.LayerNorm()(memory)
        causal = nn.combine_masks(nn.make_attention_mask(targets > 0, targets > 0), nn.make_causal_mask(targets))
        for _ in range(2):
            y = Layer()(y, causal, memory, nn.make_attention_mask(targets > 0, inputs > 0))
        return nn.Dense(VOCAB)(nn.LayerNorm()(y))


TRANSLATOR = Translator()


@jax.jit
def translate_step(state, batch):
    weights = (batch["targets"] > 0).astype(jnp.float32)
    smooth = optax.smooth_labels(jax.nn.one_hot(batch["targets"], VOCAB), 0.1)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch)
        return jnp.sum(optax.softmax_cross_entropy(logits, smooth) * weights) / jnp.sum(weights)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "denominator": weights.sum()}


@step(
    "public linen transformer",
    batch={"batch.inputs": 0, "batch.targets": 0},
    roles=state_roles("state") | {"batch": "batch"},
    feeds={"state": 0},
    notes="encoder and decoder; every layer of the decoder reads the encoder's output",
)
def linen_encoder_decoder(seed: int = 0) -> Call:
    d, lengths = Draw(seed), jnp.arange(TIME)
    batch = {name: 1 + d.ids(VOCAB - 1, BATCH, TIME) for name in ("inputs", "targets")}
    batch = {k: jnp.where(lengths < TIME - d.ids(5, BATCH)[:, None], x, 0) for k, x in batch.items()}
    params = linen_variables(TRANSLATOR, seed, {k: x[:1] for k, x in batch.items()})["params"]
    return Call(translate_step, (TrainState.create(apply_fn=TRANSLATOR.apply, params=params, tx=adam), batch))


@jax.jit
def preference_step(state, reference, batch):
    """DPO: the chosen answer gains on the rejected one, beside a reference that stays."""

    def answer(params: Any, tokens: jax.Array) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens)
        return -jnp.sum(each_token(logits, tokens) * (tokens > 0), axis=-1)

    def loss_fn(params):
        gains = {k: answer(params, batch[k]) - answer(reference, batch[k]) for k in ("chosen", "rejected")}
        margin = 0.1 * (gains["chosen"] - gains["rejected"])
        return -jnp.mean(jax.nn.log_sigmoid(margin)), jnp.mean(margin > 0)

    (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}


@step(
    "public linen transformer",
    batch={"batch.chosen": 0, "batch.rejected": 0},
    roles=state_roles("state") | {"reference": None, "batch": "batch"},
    feeds={"state": 0},
    notes="one network four times in a loss, twice with parameters that no gradient reaches",
)
def linen_preference(seed: int = 0) -> Call:
    d = Draw(seed)
    batch = {name: 1 + d.ids(VOCAB - 1, BATCH, TIME) for name in ("chosen", "rejected")}
    params = linen_variables(SHIFTED, seed, batch["chosen"][:1])["params"]
    state = TrainState.create(apply_fn=SHIFTED.apply, params=params, tx=adam)
    return Call(preference_step, (state, jax.tree.map(jnp.copy, params), batch))
