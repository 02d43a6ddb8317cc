"""MXFP8: E4M3 elements in groups of 32 that share an E8M0 scale (OCP Microscaling Formats v1.0).

Used for activations by the opt-in W4A8 numerics; weights stay MXFP4.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

MXFP8_GROUP_SIZE = 32
E4M3_MAX = 448.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mxfp8Array:
    """Activations in MXFP8; groups run along the last, contraction axis.

        value[..., k] = values[..., k] * 2^(scale[..., k // 32] - 127);  scale byte 255 is NaN

    Attributes:
        values: float8_e4m3fn [..., K].
        scale: uint8 [..., K / 32].
    """

    values: jax.Array
    scale: jax.Array

    def dequantize(self, dtype=jnp.bfloat16) -> jax.Array:
        """Every value as `dtype`; exact in bfloat16 while the result is a normal number."""
        exponent = jnp.repeat(self.scale, MXFP8_GROUP_SIZE, axis=-1).astype(jnp.int32) - 127
        # Two factors of half the exponent each: 2^exponent itself need not be a normal float.
        half = exponent >> 1
        factors = _power_of_two(half), _power_of_two(exponent - half)
        product = self.values.astype(jnp.float32) * factors[0] * factors[1]
        return jnp.where(exponent == 128, jnp.nan, product).astype(dtype)


def quantize(x: jax.Array) -> Mxfp8Array:
    """Rounds float x [..., K] to MXFP8, K a multiple of 32.

    The scale is the smallest power of two at least max |group| / 448, so nothing saturates in exact
    arithmetic; elements round to nearest, ties to even, and are clamped to +-448 first because the
    conversion to E4M3 does not saturate. A group of zeros gets scale byte 0, a group with NaN or
    infinity gets 255.
    """
    *rows, width = x.shape
    if width % MXFP8_GROUP_SIZE:
        raise ValueError(
            f"x has last axis {width}; MXFP8 groups need a multiple of {MXFP8_GROUP_SIZE}"
        )
    groups = x.astype(jnp.float32).reshape(*rows, width // MXFP8_GROUP_SIZE, MXFP8_GROUP_SIZE)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    bits = lax.bitcast_convert_type(largest, jnp.uint32).astype(jnp.int32)
    # 448 = 1.75 * 2^8, so the quotient's exponent is 8 less, one more past a mantissa of 1.75.
    byte = jnp.clip((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000), 0, 254)
    scaled = groups * _power_of_two(127 - byte)[..., None]
    clamped = jnp.clip(scaled, -E4M3_MAX, E4M3_MAX).reshape(x.shape)
    byte = jnp.where(jnp.isfinite(largest), byte, 255)
    return Mxfp8Array(clamped.astype(jnp.float8_e4m3fn), byte.astype(jnp.uint8))


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
