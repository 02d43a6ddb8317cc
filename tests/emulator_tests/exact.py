"""Floating-point formats in exact rational arithmetic: the oracle of the instruction tests.

Nothing here uses NumPy's floating point or the emulator: a value is a Fraction, rounding is done on
integers, bits are Python integers.
"""

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    """An IEEE-like binary format.

    Attributes:
        exponent_bits, mantissa_bits: field widths.
        finite_top: code of the largest finite magnitude.
        infinity: code of infinity, or None.
        nan: code of the NaN that arithmetic returns, or None.
    """

    exponent_bits: int
    mantissa_bits: int
    finite_top: int
    infinity: int | None
    nan: int | None

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def sign(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def is_nan(self, bits: int) -> bool:
        magnitude = bits & (self.sign - 1)
        return magnitude > (self.finite_top if self.infinity is None else self.infinity)

    def is_infinite(self, bits: int) -> bool:
        return self.infinity is not None and bits & (self.sign - 1) == self.infinity

    def negative(self, bits: int) -> bool:
        return bool(bits & self.sign)

    def value(self, bits: int) -> Fraction:
        """The value of a finite code."""
        magnitude = bits & (self.sign - 1)
        exponent, mantissa = (
            magnitude >> self.mantissa_bits,
            magnitude & ((1 << self.mantissa_bits) - 1),
        )
        if exponent:
            mantissa += 1 << self.mantissa_bits
        scale = max(exponent, 1) - self.bias - self.mantissa_bits
        value = Fraction(mantissa) * Fraction(2) ** scale
        return -value if self.negative(bits) else value

    def round(
        self, value: Fraction, mode: str = "rn", saturate: bool = False, zero: int = 0
    ) -> int:
        """Bits of a value; `zero` is the code of an exact zero (its sign)."""
        if value == 0:
            return zero
        sign = self.sign if value < 0 else 0
        magnitude = abs(value)
        exponent = max(floor_log2(magnitude), 1 - self.bias)
        step = Fraction(2) ** (exponent - self.mantissa_bits)
        scaled = magnitude / step
        whole = scaled.numerator // scaled.denominator
        rest = scaled - whole
        up = {
            "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1),
            "rz": False,
            "rm": bool(sign) and rest > 0,
            "rp": not sign and rest > 0,
        }[mode]
        whole += up
        code = whole + ((exponent + self.bias - 1) << self.mantissa_bits)
        if code > self.finite_top:
            toward_zero = mode == "rz" or (mode == "rm" and not sign) or (mode == "rp" and sign)
            code = self.finite_top if saturate or toward_zero else self.infinity
        return sign | code


def floor_log2(value: Fraction) -> int:
    """floor(log2(value)) of a positive fraction, exactly."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


F64 = Format(11, 52, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FFFFFFFFFFFFFFF)
F32 = Format(8, 23, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF)
F16 = Format(5, 10, 0x7BFF, 0x7C00, 0x7FFF)
BF16 = Format(8, 7, 0x7F7F, 0x7F80, 0x7FFF)
E4M3 = Format(4, 3, 0x7E, None, 0x7F)
E5M2 = Format(5, 2, 0x7B, 0x7C, 0x7F)
E2M1 = Format(2, 1, 0x7, None, None)


def flushed(fmt: Format, bits: int) -> int:
    """`.ftz`: a subnormal code becomes zero of the same sign."""
    tiny = bits & (fmt.sign - 1) < 1 << fmt.mantissa_bits
    return bits & fmt.sign if tiny else bits


def add(fmt: Format, a: int, b: int, mode: str = "rn") -> int:
    """a + b in `fmt`."""
    return fma(fmt, a, fmt.round(Fraction(1)), b, mode)


def multiply(fmt: Format, a: int, b: int, mode: str = "rn") -> int:
    """a * b in `fmt`."""
    if fmt.is_nan(a) or fmt.is_nan(b):
        return fmt.nan
    sign = (a ^ b) & fmt.sign
    if fmt.is_infinite(a) or fmt.is_infinite(b):
        zero = 0 in (a & (fmt.sign - 1), b & (fmt.sign - 1))
        return fmt.nan if zero else sign | fmt.infinity
    return fmt.round(fmt.value(a) * fmt.value(b), mode, zero=sign)


def fma(fmt: Format, a: int, b: int, c: int, mode: str = "rn") -> int:
    """a * b + c in `fmt`, rounded once."""
    if any(fmt.is_nan(x) for x in (a, b, c)):
        return fmt.nan
    sign = (a ^ b) & fmt.sign
    if fmt.is_infinite(a) or fmt.is_infinite(b):
        if 0 in (a & (fmt.sign - 1), b & (fmt.sign - 1)):
            return fmt.nan
        opposite = fmt.is_infinite(c) and (c & fmt.sign) != sign
        return fmt.nan if opposite else sign | fmt.infinity
    if fmt.is_infinite(c):
        return c
    product, addend = fmt.value(a) * fmt.value(b), fmt.value(c)
    total = product + addend
    both_negative = product == 0 and addend == 0 and sign and fmt.negative(c)
    mixed = mode == "rm" and not (product == 0 and addend == 0 and not sign and not fmt.negative(c))
    return fmt.round(total, mode, zero=fmt.sign if both_negative or mixed else 0)


def divide(fmt: Format, a: int, b: int) -> int:
    """a / b in `fmt`, to nearest."""
    if fmt.is_nan(a) or fmt.is_nan(b):
        return fmt.nan
    sign = (a ^ b) & fmt.sign
    zero_a, zero_b = a & (fmt.sign - 1) == 0, b & (fmt.sign - 1) == 0
    if fmt.is_infinite(a):
        return fmt.nan if fmt.is_infinite(b) else sign | fmt.infinity
    if fmt.is_infinite(b):
        return sign
    if zero_b:
        return fmt.nan if zero_a else sign | fmt.infinity
    return fmt.round(fmt.value(a) / fmt.value(b), zero=sign)


def square_root(fmt: Format, a: int) -> int:
    """sqrt(a) in `fmt`, to nearest."""
    if fmt.is_nan(a) or (fmt.negative(a) and a & (fmt.sign - 1)):
        return fmt.nan
    if fmt.is_infinite(a) or a & (fmt.sign - 1) == 0:
        return a
    value = fmt.value(a)
    shift = 4 * fmt.mantissa_bits + 2 * abs(floor_log2(value)) + 8
    root = math.isqrt(value.numerator * (1 << 2 * shift) // value.denominator)
    exact = root * root * value.denominator == value.numerator << 2 * shift
    # A sticky bit stands for the rest, far below the rounding position.
    return fmt.round(Fraction(2 * root + (0 if exact else 1), 1 << (shift + 1)))


def convert(source: Format, target: Format, bits: int, mode="rn", saturate=False) -> int:
    """A code of one format in another; saturating formats turn infinity into the largest value."""
    sign = target.sign if source.negative(bits) else 0
    if source.is_nan(bits):
        return target.finite_top if target.nan is None else target.nan
    if source.is_infinite(bits):
        return sign | (target.finite_top if saturate else target.infinity)
    return target.round(source.value(bits), mode, saturate, zero=sign)
