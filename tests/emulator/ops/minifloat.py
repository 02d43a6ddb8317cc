"""Small floating-point formats: E4M3, E5M2, E2M1 and the scale format UE8M0."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MiniFloat:
    """A sign-magnitude format of at most 8 bits.

    Attributes:
        values: magnitude of every code without its sign bit; NaN codes hold NaN.
        sign: the sign bit.
        nan: the code of NaN, or None if the format has none.
        largest: code of the largest finite magnitude.
    """

    values: np.ndarray
    sign: int
    nan: int | None
    largest: int

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Codes to float32."""
        magnitude = self.values[codes & (self.sign - 1)]
        return np.where(codes & self.sign, -magnitude, magnitude).astype(np.float32)

    def encode(self, values: np.ndarray, relu: bool = False) -> np.ndarray:
        """float32 or float64 to the nearest code, ties to even, saturating; NaN stays NaN.

        A format without NaN takes the largest positive value for it.
        """
        invalid = np.isnan(values)
        if relu:
            values = np.where(values > 0, values, 0)
        finite = self.values[: self.largest + 1].astype(np.float64)
        magnitude = np.minimum(np.abs(np.where(invalid, 0, values)).astype(np.float64), finite[-1])
        above = np.searchsorted(finite, magnitude, side="left")
        below = np.maximum(above - 1, 0)
        up, down = finite[above] - magnitude, magnitude - finite[below]
        even = np.where(above % 2 == 0, above, below)
        code = np.where(up < down, above, np.where(down < up, below, even))
        code = np.where(np.signbit(values), code | self.sign, code)
        code = np.where(invalid, self.largest if self.nan is None else self.nan, code)
        return code.astype(np.uint32)


def _magnitudes(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    codes = np.arange(1 << (exponent_bits + mantissa_bits))
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    normal = (1 + fraction) * 2.0 ** (exponent - bias)
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)


def _e4m3() -> MiniFloat:
    values = _magnitudes(4, 3, 7)
    values[0x7F] = np.nan
    return MiniFloat(values, 0x80, 0x7F, 0x7E)


def _e5m2() -> MiniFloat:
    values = _magnitudes(5, 2, 15)
    values[0x7C], values[0x7D:] = np.inf, np.nan
    return MiniFloat(values, 0x80, 0x7F, 0x7B)


FORMATS = {
    "e4m3": _e4m3(),
    "e5m2": _e5m2(),
    "e2m1": MiniFloat(_magnitudes(2, 1, 1), 0x8, None, 0x7),
}


def decode_ue8m0(codes: np.ndarray) -> np.ndarray:
    """2^(code - 127) as float32; 255 is NaN."""
    exact = np.ldexp(1.0, codes.astype(np.int64) - 127).astype(np.float32)
    return np.where(codes == 255, np.float32(np.nan), exact)


def encode_ue8m0(values: np.ndarray, up: bool) -> np.ndarray:
    """float32 magnitude to the power of two below (or above), saturating; NaN gives 255.

    Zero and everything below 2^-127 give code 0.
    """
    magnitude = np.abs(values.astype(np.float64))
    invalid = np.isnan(magnitude)
    safe = np.where(invalid | (magnitude == 0), 1.0, np.minimum(magnitude, 2.0**127))
    fraction, exponent = np.frexp(safe)
    floor = exponent - 1
    power = floor + (fraction > 0.5) if up else floor
    code = np.clip(power + 127, 0, 254)
    code = np.where(magnitude == 0, 0, code)
    return np.where(invalid, 255, code).astype(np.uint32)
