"""The tensor core's fused dot product: D = A B + C for one instruction's whole K.

NVIDIA does not document it. The model here is the one that public measurements agree on for Hopper
and Blackwell (Xie et al., "MMA-Sim", arXiv 2511.10909): all K products are exact; products and
accumulator are aligned to the largest exponent among them, truncated toward zero at
`FRACTION_BITS` bits below it, summed exactly, and the sum is truncated toward zero to float32. The
exponent of a product is the sum of its factors' exponents (so its significand may reach 4), and
that of zero is the smallest normal exponent. The order within K therefore does not matter.
"""

import numpy as np

from .ops.floating import round_f64
from .types import F32_NAN

FRACTION_BITS = 25
FP8_WGMMA_FRACTION_BITS = 13
_ZERO_EXPONENT = -126


def exponents(values: np.ndarray, smallest: int) -> np.ndarray:
    """Exponent of each value with a significand in [1, 2); subnormals take the smallest one."""
    _, exponent = np.frexp(values)
    return np.where(values == 0, _ZERO_EXPONENT, np.maximum(exponent - 1, smallest))


@np.errstate(all="ignore")
def fused_dot_add(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    smallest: int,
    fraction_bits: int = FRACTION_BITS,
) -> np.ndarray:
    """A [..., M, K] times B [..., N, K] plus C [..., M, N].

    Args:
        a, b: float32 values of the operands, B transposed.
        c: float32 accumulator.
        smallest: exponent of the operand format's smallest normal number.
        fraction_bits: bits kept below the largest exponent.

    Returns:
        float32 bits as uint32, NaN canonical.
    """
    a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
    products = a[..., :, None, :] * b[..., None, :, :]
    total = products.sum(axis=-1) + c
    powers = exponents(a, smallest)[..., :, None, :] + exponents(b, smallest)[..., None, :, :]
    largest = np.maximum(powers.max(axis=-1), exponents(c, _ZERO_EXPONENT))
    finite = np.isfinite(total)
    unit = np.ldexp(1.0, np.where(finite, fraction_bits - largest, 0))
    if not finite.all():
        products = np.where(finite[..., None], products, 0.0)
        c = np.where(finite, c, 0.0)
    products *= unit[..., None]
    np.trunc(products, out=products)
    exact = (products.sum(axis=-1) + np.trunc(c * unit)) / unit
    if fraction_bits < 23:
        mantissa, exponent = np.frexp(exact)
        scale = 1 << (fraction_bits + 1)
        exact = np.ldexp(np.trunc(mantissa * scale) / scale, exponent)
    bits = round_f64(exact, "rz").view(np.uint32)
    if finite.all():
        return bits
    special = np.where(np.isnan(total), F32_NAN, total.astype(np.float32).view(np.uint32))
    return np.where(finite, bits, special)
