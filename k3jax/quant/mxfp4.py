"""MXFP4: E2M1 elements in groups of 32 that share an E8M0 scale (OCP Microscaling Formats v1.0)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.config import MXFP4_GROUP_SIZE

type Leaf = Any
"""A `jax.Array`, or in trees about arrays what stands for one: a spec, a shape, a variable."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mxfp4Array:
    """A matrix (or stack of them) in MXFP4; groups run along the last, contraction axis.

    For element k of the last axis, with byte b = packed[..., k // 2] and q = scale[..., k // 32]:

        code  = b & 15 if k is even else b >> 4               (low nibble first)
        value = (-1)^(code >> 3) * magnitude[code & 7] * 2^(q - 127)
        magnitude = 0, 0.5, 1, 1.5, 2, 3, 4, 6
        q = 255 makes the whole group NaN; q = 0 is 2^-127; values past the largest float are inf.

    Attributes:
        packed: uint8 [..., K / 2].
        scale: uint8 [..., K / 32].
    """

    packed: Leaf
    scale: Leaf

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., K]."""
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    def __getitem__(self, index) -> "Mxfp4Array":
        """Indexes leading axes: the same index into elements and scales."""
        return Mxfp4Array(self.packed[index], self.scale[index])

    def dequantize(self, dtype=jnp.bfloat16) -> jax.Array:
        """Every value as `dtype` (bfloat16 or float32), exactly, subnormals included."""
        return _scaled_value(unpack_codes(self.packed), _spread(self.scale), dtype)


def unpack_codes(packed: jax.Array) -> jax.Array:
    """uint8 [..., K/2] -> E2M1 codes 0..15, uint8 [..., K]."""
    *rows, half = packed.shape
    return jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*rows, 2 * half)


def pack_codes(codes: jax.Array) -> jax.Array:
    """E2M1 codes 0..15, uint8 [..., K] -> uint8 [..., K/2]; the inverse of `unpack_codes`."""
    *rows, width = codes.shape
    pairs = codes.reshape(*rows, width // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def quantize(x: jax.Array) -> Mxfp4Array:
    """Rounds float x [..., K] to MXFP4, K a multiple of 32.

    The scale is 2^(floor(log2(max |group|)) - 2), so that the largest element lands in [4, 8) and
    saturates at 6; elements round to nearest, ties to even. A group of zeros gets scale byte 127, a
    group with NaN or infinity gets 255.
    """
    *rows, width = x.shape
    if width % MXFP4_GROUP_SIZE:
        raise ValueError(
            f"x has last axis {width}; MXFP4 groups need a multiple of {MXFP4_GROUP_SIZE}"
        )
    groups = x.astype(jnp.float32).reshape(*rows, width // MXFP4_GROUP_SIZE, MXFP4_GROUP_SIZE)
    largest = jnp.max(jnp.abs(groups), axis=-1)
    exponent = (lax.bitcast_convert_type(largest, jnp.uint32) >> 23).astype(jnp.int32)
    byte = jnp.clip(exponent - 2, 0, 254)
    inverse = lax.bitcast_convert_type((254 - byte) << 23, jnp.float32)  # 2^(127 - byte)
    byte = jnp.where(largest == 0, 127, jnp.where(jnp.isfinite(largest), byte, 255))
    values = (groups * inverse[..., None]).astype(jnp.float4_e2m1fn).reshape(*rows, width // 2, 2)
    return Mxfp4Array(lax.bitcast_convert_type(values, jnp.uint8), byte.astype(jnp.uint8))


def _spread(scale: jax.Array) -> jax.Array:
    return jnp.repeat(scale, MXFP4_GROUP_SIZE, axis=-1)


def _scaled_value(code: jax.Array, scale: jax.Array, dtype) -> jax.Array:
    """Assembles the float's bits, because a multiply may flush subnormals or overflow early."""
    mantissa_bits = jnp.finfo(dtype).nmant
    word = jnp.uint16 if mantissa_bits < 16 else jnp.uint32
    width = jnp.iinfo(word).bits
    code = code.astype(jnp.int32)
    magnitude = code & 7
    # 0.5 is the format's subnormal: the only code whose leading one is not implied.
    half = (magnitude & 1) * (magnitude > 1)
    exponent = scale.astype(jnp.int32) + (magnitude >> 1) - 1
    significand = (1 << mantissa_bits) | (half << (mantissa_bits - 1))
    normal = (exponent << mantissa_bits) | (half << (mantissa_bits - 1))
    bits = jnp.where(exponent >= 1, normal, significand >> jnp.clip(1 - exponent, 0, 2))
    infinity = 255 << mantissa_bits
    bits = jnp.where(exponent >= 255, infinity, bits)
    bits = jnp.where(magnitude == 0, 0, bits)
    bits = jnp.where(scale == 255, infinity | (1 << (mantissa_bits - 1)), bits)
    bits = bits.astype(word) | ((code >> 3).astype(word) << (width - 1))
    return lax.bitcast_convert_type(bits, dtype)
