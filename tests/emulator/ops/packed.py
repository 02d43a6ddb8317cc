"""f16, bf16 and their packed pairs: each half computed and rounded once."""

import numpy as np

from ..binding import Binder, Op
from ..types import halves, join
from .floating import FUNCTIONS, fused

NAN16 = np.uint32(0x7FFF)
"""The canonical NaN of f16 and bf16 arithmetic."""


def widen(bits: np.ndarray, name: str) -> np.ndarray:
    """16-bit floats (in the low bits of any unsigned array) as float32, exactly."""
    if name == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def narrow(values: np.ndarray, name: str) -> np.ndarray:
    """float32 or odd-rounded float64 to 16-bit floats in uint32, to nearest even."""
    if name == "f16":
        bits = values.astype(np.float16).view(np.uint16).astype(np.uint32)
    elif values.dtype == np.float64:
        bits = _bf16_from_f64(values)
    else:
        word = values.view(np.uint32)
        bits = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> 16
    invalid = np.isnan(values)
    return np.where(invalid, NAN16, bits) if invalid.any() else bits


def _bf16_from_f64(values: np.ndarray) -> np.ndarray:
    """Odd-rounded float64 to bf16, by way of float32 rounded to odd."""
    single = values.astype(np.float32)
    back = single.astype(np.float64)
    word = single.view(np.uint32)
    toward = np.where(np.abs(back) > np.abs(values), word - np.uint32(1), word)
    word = np.where((back != values) & np.isfinite(values), toward | np.uint32(1), word)
    return (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


def lift(fn, name: str):
    """`fn` on float32 arrays as a function on packed registers of type `name`.

    `fn` returns float32, or float64 rounded to odd where float32 would round a first time.
    """
    single = name.removesuffix("x2")
    if single == name:
        return lambda *bits: narrow(fn(*[widen(x, single) for x in bits]), single).astype(np.uint16)

    def run(*bits):
        low, high = zip(*[halves(x) for x in bits], strict=True)
        return join(
            narrow(fn(*[widen(x, single) for x in low]), single),
            narrow(fn(*[widen(x, single) for x in high]), single),
        )

    return run


def _bind(b: Binder, fn, name: str, bits: int) -> Op:
    d, *sources = b.operands
    return b.pure(fn, [b.dst(d, bits)], [b.src(s, bits) for s in sources])


def _type(b: Binder):
    return b.type("f16", "f16x2", "bf16", "bf16x2")


def arithmetic(b: Binder, fn) -> Op:
    """add, sub, mul.

    A product of two 11-bit significands is exact in float32. A sum of two float16 or bfloat16
    may not be, so sums go through float64, which holds every float16 sum exactly and is rounded
    to odd for bfloat16.
    """
    kind = _type(b)
    b.flag("rn")
    if b.flag("ftz"):
        raise b.unknown("f16 arithmetic with .ftz is not implemented")
    one = np.float32(1)
    if fn is not np.multiply:
        minus = fn is np.subtract
        fn = lambda x, y: fused(x, np.broadcast_to(one, x.shape), -y if minus else y)  # noqa: E731
    return _bind(b, lift(fn, kind.name), kind.name, kind.bits)


def fma(b: Binder) -> Op:
    """`fma.rn`, optionally `.relu`."""
    kind = _type(b)
    b.one_of("rn")
    relu = b.flag("relu")

    def fn(x, y, z):
        result = fused(x, y, z)
        return np.where(np.isnan(result) | (result > 0), result, 0.0) if relu else result

    return _bind(b, lift(fn, kind.name), kind.name, kind.bits)


def min_max(b: Binder) -> Op:
    """`min`, `max`: a NaN loses unless `.NaN`; -0 is below +0."""
    kind = _type(b)
    nan = b.flag("NaN")
    least = b.ins.opcode == "min"

    def fn(x, y):
        first = (x < y) if least else (x > y)
        signs = (x == y) & (np.signbit(x) if least else ~np.signbit(x))
        result = np.where(first | signs, x, y)
        if nan:
            return np.where(np.isnan(x) | np.isnan(y), np.float32(np.nan), result)
        return np.where(np.isnan(y), x, np.where(np.isnan(x), y, result))

    return _bind(b, lift(fn, kind.name), kind.name, kind.bits)


def sign(b: Binder) -> Op:
    """`abs`, `neg` on the bits."""
    kind = _type(b)
    top = kind.raw.type(0x8000 if kind.bits == 16 else 0x80008000)
    fn = (lambda x: x & ~top) if b.ins.opcode == "abs" else (lambda x: x ^ top)
    return _bind(b, fn, kind.name, kind.bits)


def approximate(b: Binder) -> Op:
    """`ex2.approx`, `tanh.approx` of 16-bit floats."""
    if b.ins.opcode not in ("ex2", "tanh"):
        raise b.unknown(f"{b.ins.opcode} of 16-bit floats does not exist")
    kind = _type(b)
    b.one_of("approx")
    b.flag("ftz")
    function = FUNCTIONS[b.ins.opcode]
    fn = lift(lambda x: function(x.astype(np.float64)), kind.name)
    return _bind(b, fn, kind.name, kind.bits)
