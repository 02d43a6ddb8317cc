"""float32 and float64 arithmetic.

`.approx` functions are evaluated in float64 and rounded once to float32, so they lie within half a
unit in the last place; the card's own results may differ by the bounds PTX states for them
(`APPROX_ULP`), which a comparison with the card has to allow.
"""

import numpy as np

from ..binding import Binder, Op, instruction
from ..types import PtxType, f32, flush, from_f32

APPROX_ULP = {"ex2": 2, "rcp": 1, "sqrt": 1, "rsqrt": 2, "sin": 4, "cos": 4}
APPROX_ULP |= {"lg2": 4, "tanh": 8192}
"""Largest distance, in float32 units in the last place, that PTX allows the card's result.

PTX bounds sin and cos absolutely (2^-20.5), tanh relatively (2^-11), and lg2 relatively (2^-22)
outside (0.5, 2), where its bound is absolute; these are rounded up.
"""

TRUNCATE = {"rz", "rm", "rp"}


def from_f64(values: np.ndarray) -> np.ndarray:
    """float64 results as register bits, NaN made canonical."""
    bits = values.view(np.uint64)
    invalid = np.isnan(values)
    return np.where(invalid, np.uint64(0x7FFFFFFFFFFFFFFF), bits) if invalid.any() else bits


def _lifted(kind: PtxType, fn, ftz: bool = False, saturate: bool = False):
    """`fn` on floats as a function on register bits."""
    if kind.bits == 64:
        return lambda *bits: from_f64(fn(*[x.view(np.float64) for x in bits]))
    if not ftz and not saturate:
        return lambda *bits: from_f32(fn(*[x.view(np.float32) for x in bits]))

    def run(*bits):
        values = [x.view(np.float32) for x in bits]
        result = fn(*[flush(v) for v in values]) if ftz else fn(*values)
        if ftz:
            result = flush(result)
        if saturate:
            result = np.where(np.isnan(result), np.float32(0), np.clip(result, 0, 1))
            result = result.astype(np.float32) + np.float32(0)
        return from_f32(result)

    return run


def _bind(b: Binder, kind: PtxType, fn) -> Op:
    d, *sources = b.operands
    srcs = [b.src(s, kind.bits, "f") for s in sources]
    return b.pure(fn, [b.dst(d, kind.bits)], srcs)


def arithmetic(b: Binder, fn) -> Op:
    """add, sub, mul."""
    ftz, saturate = b.flag("ftz"), b.flag("sat")
    kind = b.type("f32", "f64")
    rounding = b.one_of("rn", "rz", "rm", "rp", default="rn")
    if rounding in TRUNCATE:
        if kind.bits == 64:
            raise b.unknown(f".{rounding}.f64 is not implemented")
        fn = _directed(fn, rounding)
    return _bind(b, kind, _lifted(kind, fn, ftz, saturate))


def _directed(fn, rounding: str):
    """float32 arithmetic in another rounding mode, by way of float64 rounded to odd."""

    def run(x, y):
        x, y = x.astype(np.float64), y.astype(np.float64)
        exact = fn(x, y)
        if fn is not np.multiply:
            exact = _to_odd(exact, _two_sum_error(x, y if fn is np.add else -y, exact))
        return round_f64(exact, rounding)

    return run


def round_f64(exact: np.ndarray, rounding: str) -> np.ndarray:
    """float64 to float32 in a given rounding mode."""
    near = exact.astype(np.float32)
    if rounding == "rn":
        return near
    back = near.astype(np.float64)
    down, up = np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))
    floor, ceiling = np.where(back > exact, down, near), np.where(back < exact, up, near)
    if rounding == "rm":
        return floor
    if rounding == "rp":
        return ceiling
    return np.where(exact < 0, ceiling, floor)


def _two_sum_error(x, y, total):
    """The exact rounding error of total = x + y."""
    virtual = total - x
    return (x - (total - virtual)) + (y - virtual)


def _to_odd(total, error):
    """Makes an inexact float64 sum odd in its last bit, so that a second rounding is right."""
    bits = total.view(np.int64)
    away = (error > 0) == (total > 0)
    inexact = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    return np.where(inexact, bits + np.where(away, 1, -1), bits).view(np.float64)


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of float32 values as float64 rounded to odd: exact enough for any later rounding.

    The product of two float32 is exact in float64, so only the sum rounds.
    """
    product = x.astype(np.float64) * y
    z = z.astype(np.float64)
    total = product + z
    return _to_odd(total, _two_sum_error(product, z, total))


def fused_f32(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Correctly rounded float32 x * y + z.

    Rounding twice goes wrong only where the float64 sum falls on the midpoint of two float32
    or the result is subnormal; only then is the exact way taken.
    """
    product = x.astype(np.float64) * y
    total = product + z
    result = total.astype(np.float32)
    tie = (total.view(np.uint64) & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    small = np.abs(result) < np.float32(2.0**-125)
    if (tie | small).any():
        return fused(x, y, z).astype(np.float32)
    return result


@instruction("fma")
def fma(b: Binder) -> Op:
    """`fma` of every type."""
    if b.modifiers[-1] in ("f16", "f16x2", "bf16", "bf16x2"):
        from . import packed

        return packed.fma(b)
    ftz, saturate = b.flag("ftz"), b.flag("sat")
    kind = b.type("f32")
    rounding = b.one_of("rn", "rz", "rm", "rp", default="rn")
    fn = fused_f32 if rounding == "rn" else lambda x, y, z: round_f64(fused(x, y, z), rounding)
    return _bind(b, kind, _lifted(kind, fn, ftz, saturate))


def divide(b: Binder) -> Op:
    """`div.rn`, `div.approx`, `div.full`."""
    ftz = b.flag("ftz")
    kind = b.type("f32", "f64")
    rounding = b.one_of("rn", "rz", "rm", "rp", "approx", "full")
    if rounding in TRUNCATE:
        raise b.unknown(f"div.{rounding} is not implemented")

    def fn(x, y):
        if kind.bits == 64 or rounding == "rn":
            return x / y
        return (x.astype(np.float64) / y).astype(np.float32)

    return _bind(b, kind, _lifted(kind, fn, ftz))


def min_max(b: Binder) -> Op:
    """`min`, `max`: a NaN loses unless `.NaN`; -0 is below +0."""
    ftz, nan, magnitude = b.flag("ftz"), b.flag("NaN"), b.flag("xorsign")
    if magnitude:
        raise b.unknown("min/max.xorsign is not implemented")
    absolute = b.flag("abs")
    kind = b.type("f32", "f64")
    least = b.ins.opcode == "min"

    def two(x, y):
        if absolute:
            x, y = np.abs(x), np.abs(y)
        first = (x < y) if least else (x > y)
        signs = (x == y) & (np.signbit(x) if least else ~np.signbit(x))
        result = np.where(first | signs, x, y)
        if nan:
            return np.where(np.isnan(x) | np.isnan(y), kind.view.type(np.nan), result)
        return np.where(np.isnan(y), x, np.where(np.isnan(x), y, result))

    fn = two if len(b.operands) == 3 else lambda x, y, z: two(two(x, y), z)
    return _bind(b, kind, _lifted(kind, fn, ftz))


def sign(b: Binder) -> Op:
    """`abs`, `neg`: on the bits, so a NaN keeps its payload."""
    ftz = b.flag("ftz")
    kind = b.type("f32", "f64")
    top = kind.raw.type(1 << (kind.bits - 1))

    def fn(x):
        if ftz:
            x = flush(f32(x)).view(np.uint32)
        return x & ~top if b.ins.opcode == "abs" else x ^ top

    return _bind(b, kind, fn)


@instruction("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def unary(b: Binder) -> Op:
    """Functions of one float."""
    if b.modifiers[-1] in ("f16", "f16x2", "bf16", "bf16x2"):
        from . import packed

        return packed.approximate(b)
    ftz = b.flag("ftz")
    kind = b.type("f32", "f64")
    if b.ins.opcode in ("rcp", "sqrt"):
        rounding = b.one_of("approx", "rn", "rz", "rm", "rp")
    else:
        rounding = b.one_of("approx")
    if rounding in TRUNCATE or (kind.bits == 64 and rounding == "approx"):
        raise b.unknown(f".{rounding}.{kind.name} is not implemented")
    function = FUNCTIONS[b.ins.opcode]
    if kind.bits == 64:
        return _bind(b, kind, _lifted(kind, function))
    # PTX: ex2.approx without .ftz takes subnormal inputs; they all give 1 either way.
    return _bind(
        b, kind, _lifted(kind, lambda x: function(x.astype(np.float64)).astype(np.float32), ftz)
    )


FUNCTIONS = {
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@instruction("copysign")
def copysign(b: Binder) -> Op:
    """`copysign`: the sign of a, the magnitude of b."""
    kind = b.type("f32", "f64")
    top = kind.raw.type(1 << (kind.bits - 1))
    return _bind(b, kind, lambda x, y: (x & top) | (y & ~top))


@instruction("testp")
def testp(b: Binder) -> Op:
    """`testp`: the class of a float."""
    kind = b.type("f32", "f64")
    test = b.one_of("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    tiny = np.finfo(kind.view).tiny
    tests = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= tiny),
        "subnormal": lambda x: (np.abs(x) < tiny) & (x != 0),
    }
    d, x = b.operands
    srcs = [b.src(x, kind.bits, "f")]
    return b.pure(lambda bits: tests[test](bits.view(kind.view)), [b.dst(d, 1)], srcs)
