"""Rounding to bfloat16 that stays."""

import jax
import jax.numpy as jnp
from jax import lax


def to_bfloat16(x: jax.Array) -> jax.Array:
    """x rounded to bfloat16, to nearest, ties to even.

    A plain conversion is a hint: where the value goes back to float32 inside one fusion, XLA keeps
    float32 (`xla_allow_excess_precision`), and numbers would depend on what was fused.
    """
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)
