"""The latent tail in plain JAX on one rank: the specification of every tier."""

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.rounding import to_bfloat16


def rms_norm(m: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """m * rsqrt(mean(m^2) + eps) * gain for rows m [T, L]: float32 inside, rounded once."""
    m = m.astype(jnp.float32)
    variance = jnp.mean(m * m, axis=-1, keepdims=True)
    return to_bfloat16(m * lax.rsqrt(variance + eps) * gain.astype(jnp.float32)[None])


def up_project(latent: jax.Array, weight: jax.Array) -> jax.Array:
    """latent [T, L] times weight [H, L]: bfloat16 [T, H], summed in float32."""
    out = jnp.einsum("tl,hl->th", latent, weight, preferred_element_type=jnp.float32)
    return to_bfloat16(out)


def tail(m: jax.Array, shared, gain, weight: jax.Array, eps: float) -> jax.Array:
    """r(r(RMSNorm(m) W_up^T) + shared): bfloat16 [T, H].

    Args:
        m: bfloat16 [T, L], the weighted expert sum over all ranks.
        shared: bfloat16 [T, H], the shared expert over all ranks, or None.
        gain: bfloat16 [L], or None for no norm.
        weight: bfloat16 [H, L].
        eps: epsilon of the norm.
    """
    latent = m if gain is None else rms_norm(m, gain, eps)
    out = up_project(latent, weight)
    return out if shared is None else out + shared
