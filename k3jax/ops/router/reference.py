"""The router in plain JAX: the specification of every implementation."""

import jax
import jax.numpy as jnp
from jax import lax


def logits(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, H] times weight [E, H]: float32 [T, E], products of bfloat16 summed in float32."""
    return jnp.einsum("th,eh->te", x, weight, preferred_element_type=jnp.float32)


def choose(
    logits: jax.Array,
    bias: jax.Array,
    top_k: int,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts by sigmoid(logit) + bias and weighs them by sigmoid(logit) alone.

        s = sigmoid(logits);  ids = the top_k largest of s + bias, ties to the lowest index
        w = s[ids];  renormalised: w / (sum(w) + 1e-20);  times scaling_factor

    NaN and infinite logits are never preferred and weigh 0: ids of a row with too few finite logits
    are filled up with the lowest other indices. A row without a finite logit gets ids 0..top_k-1
    and weights 1 / top_k (0 if not renormalised), without the scaling factor.

    Args:
        logits: float32 [T, E].
        bias: float32 [E], finite.
        top_k: experts a token.
        renormalize: whether weights are divided by their sum.
        scaling_factor: factor on the weights.

    Returns:
        ids int32 [T, top_k], distinct and by descending choice; weights float32 [T, top_k].
    """
    valid = jnp.isfinite(logits)
    score = jnp.where(valid, jax.nn.sigmoid(logits), 0.0)
    _, ids = lax.top_k(jnp.where(valid, score + bias[None], -jnp.inf), top_k)
    weights = jnp.take_along_axis(score, ids, axis=1)
    if renormalize:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    weights = weights * scaling_factor
    without = 1.0 / top_k if renormalize else 0.0
    return ids, jnp.where(jnp.any(valid, axis=1, keepdims=True), weights, without)
