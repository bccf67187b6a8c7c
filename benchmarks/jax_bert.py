"""BERT-base in pure functions of JAX, for `benchmarks.bench --only jaxpr`: what `jax.make_jaxpr` traces."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]
LAYERS, HEADS, WIDTH, INNER, WORDS, LENGTH = 12, 12, 768, 3072, 30522, 512


def _linear(n: int, m: int) -> Params:
    return {"w": jax.ShapeDtypeStruct((n, m), jnp.float32), "b": jax.ShapeDtypeStruct((m,), jnp.float32)}


def _norm() -> Params:
    return {"scale": jax.ShapeDtypeStruct((WIDTH,), jnp.float32), "bias": jax.ShapeDtypeStruct((WIDTH,), jnp.float32)}


def params() -> Params:
    """The shapes of all parameters, as `transformers.BertModel` has them."""
    layer = {name: _linear(WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
    layer |= {"up": _linear(WIDTH, INNER), "down": _linear(INNER, WIDTH), "norm1": _norm(), "norm2": _norm()}
    table = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    tables = {"words": table((WORDS, WIDTH)), "positions": table((LENGTH, WIDTH)), "types": table((2, WIDTH))}
    return {**tables, "norm": _norm(), "layers": [layer] * LAYERS, "pooler": _linear(WIDTH, WIDTH)}


def linear(p: Params, x: jax.Array) -> jax.Array:
    """A product and a bias."""
    return x @ p["w"] + p["b"]


def norm(p: Params, x: jax.Array) -> jax.Array:
    """Layer normalization."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-12) * p["scale"] + p["bias"]


def attention(p: Params, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention of 12 heads."""
    batch, length, _ = x.shape
    q, k, v = (linear(p[name], x).reshape(batch, length, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3) for name in "qkv")
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(WIDTH // HEADS) + mask
    out = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(batch, length, WIDTH)
    return linear(p["o"], out)


def bert(p: Params, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The last hidden state and the pooled one."""
    batch, length = ids.shape
    mask = jnp.where(jnp.ones((batch, 1, 1, length), bool), 0.0, -1e9)
    x = p["words"][ids] + p["positions"][jnp.arange(length)] + p["types"][jnp.zeros_like(ids)]
    x = norm(p["norm"], x)
    for layer in p["layers"]:
        x = norm(layer["norm1"], x + attention(layer, x, mask))
        x = norm(layer["norm2"], x + linear(layer["down"], jax.nn.gelu(linear(layer["up"], x), approximate=False)))
    return x, jnp.tanh(linear(p["pooler"], x[:, 0]))


def trace() -> Any:
    """The jaxpr for one sequence of 128 tokens. JAX remembers what it traced by the function: so it gets a new one."""
    return jax.make_jaxpr(lambda p, ids: bert(p, ids))(params(), jax.ShapeDtypeStruct((1, 128), jnp.int32))
