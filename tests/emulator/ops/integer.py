"""Integer arithmetic."""

import numpy as np

from ..binding import Binder, Op, instruction
from ..types import PtxType
from . import floating, packed

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64", "b16", "b32", "b64")


def _binary(b: Binder, fn, kind: PtxType) -> Op:
    d, x, y = b.operands
    view = kind.view
    raw = kind.raw
    srcs = [b.src(x, kind.bits), b.src(y, kind.bits)]
    return b.pure(
        lambda p, q: fn(p.view(view), q.view(view)).view(raw), [b.dst(d, kind.bits)], srcs
    )


def _is(b: Binder, *names: str) -> bool:
    return bool(b.modifiers) and b.modifiers[-1] in names


@instruction("add", "sub")
def add_sub(b: Binder) -> Op:
    """`add`, `sub` of every type."""
    fn = np.add if b.ins.opcode == "add" else np.subtract
    if _is(b, "f32", "f64"):
        return floating.arithmetic(b, fn)
    if _is(b, "f16", "f16x2", "bf16", "bf16x2"):
        return packed.arithmetic(b, fn)
    saturate = b.flag("sat")
    kind = b.type(*INTEGERS)
    if saturate:
        if kind.name != "s32":
            raise b.unknown(".sat needs .s32")
        wide = np.int64
        limit = np.iinfo(np.int32)
        return _binary(
            b,
            lambda p, q: np.clip(fn(p.astype(wide), q.astype(wide)), limit.min, limit.max).astype(
                np.int32
            ),
            kind,
        )
    return _binary(b, fn, kind)


def _wide(values: np.ndarray, kind: PtxType) -> np.ndarray:
    return values.view(kind.view).astype(np.int64 if kind.kind == "s" else np.uint64)


def _high(x: np.ndarray, y: np.ndarray, kind: PtxType) -> np.ndarray:
    """High half of a product, as register bits."""
    if kind.bits < 64:
        product = _wide(x, kind) * _wide(y, kind)
        return (product >> product.dtype.type(kind.bits)).astype(kind.raw)
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    xl, xh, yl, yh = x & mask, x >> shift, y & mask, y >> shift
    low = xh * yl + ((xl * yl) >> shift)
    middle = xl * yh + (low & mask)
    high = xh * yh + (low >> shift) + (middle >> shift)
    if kind.kind == "s":
        high = high - np.where(x >> np.uint64(63), y, np.uint64(0))
        high = high - np.where(y >> np.uint64(63), x, np.uint64(0))
    return high


def _product(kind: PtxType, part: str):
    """The function of `mul.part` and the result's width."""
    if part == "lo":
        return lambda x, y: x * y, kind.bits
    if part == "hi":
        return lambda x, y: _high(x, y, kind), kind.bits
    raw = np.dtype(f"u{kind.bits // 4}")
    return lambda x, y: (_wide(x, kind) * _wide(y, kind)).astype(raw), 2 * kind.bits


@instruction("mul")
def mul(b: Binder) -> Op:
    """`mul` of every type."""
    if _is(b, "f32", "f64"):
        return floating.arithmetic(b, np.multiply)
    if _is(b, "f16", "f16x2", "bf16", "bf16x2"):
        return packed.arithmetic(b, np.multiply)
    kind = b.type(*INTEGERS)
    fn, bits = _product(kind, b.one_of("lo", "hi", "wide"))
    d, x, y = b.operands
    return b.pure(fn, [b.dst(d, bits)], [b.src(x, kind.bits), b.src(y, kind.bits)])


@instruction("mad")
def mad(b: Binder) -> Op:
    """`mad`: integer, or the old name of `fma`."""
    if _is(b, "f32", "f64"):
        return floating.fma(b)
    kind = b.type(*INTEGERS)
    fn, bits = _product(kind, b.one_of("lo", "hi", "wide"))
    d, x, y, z = b.operands
    srcs = [b.src(x, kind.bits), b.src(y, kind.bits), b.src(z, bits)]
    return b.pure(lambda p, q, r: fn(p, q) + r, [b.dst(d, bits)], srcs)


@instruction("mul24", "mad24")
def mul24(b: Binder) -> Op:
    """Products of the low 24 bits, low part."""
    kind = b.type("u32", "s32")
    b.one_of("lo")

    def low(x):
        x = x << np.uint32(8)
        return (x.view(kind.view) >> kind.view.type(8)).view(np.uint32)

    d, *sources = b.operands
    srcs = [b.src(s, 32) for s in sources]
    fn = (lambda x, y: low(x) * low(y)) if len(srcs) == 2 else (lambda x, y, z: low(x) * low(y) + z)
    return b.pure(fn, [b.dst(d, 32)], srcs)


def _divide(x, y, kind: PtxType):
    """Quotient truncated to zero; dividing by zero gives all ones, as the card does."""
    p, q = x.view(kind.view), y.view(kind.view)
    zero = q == 0
    safe = np.where(zero, kind.view.type(1), q)
    quotient = p // safe
    if kind.kind == "s":
        inexact = quotient * safe != p
        quotient = quotient + (inexact & ((p < 0) != (safe < 0))).astype(kind.view)
    return np.where(zero, kind.view.type(-1 if kind.kind == "s" else 2**kind.bits - 1), quotient)


def _remainder(x, y, kind: PtxType):
    p, q = x.view(kind.view), y.view(kind.view)
    return np.where(q == 0, p, p - _divide(x, y, kind) * q)


@instruction("div", "rem")
def div(b: Binder) -> Op:
    """`div` of every type and integer `rem`."""
    if _is(b, "f32", "f64"):
        return floating.divide(b)
    kind = b.type(*INTEGERS)
    fn = _divide if b.ins.opcode == "div" else _remainder
    d, x, y = b.operands
    srcs = [b.src(x, kind.bits), b.src(y, kind.bits)]
    return b.pure(lambda p, q: fn(p, q, kind).view(kind.raw), [b.dst(d, kind.bits)], srcs)


@instruction("min", "max")
def min_max(b: Binder) -> Op:
    """`min`, `max` of every type."""
    fn = np.minimum if b.ins.opcode == "min" else np.maximum
    if _is(b, "f32", "f64"):
        return floating.min_max(b)
    if _is(b, "f16", "f16x2", "bf16", "bf16x2"):
        return packed.min_max(b)
    relu = b.flag("relu")
    kind = b.type(*INTEGERS)
    if relu:
        return _binary(b, lambda p, q: np.maximum(fn(p, q), kind.view.type(0)), kind)
    return _binary(b, fn, kind)


@instruction("abs", "neg")
def abs_neg(b: Binder) -> Op:
    """`abs`, `neg` of every type."""
    if _is(b, "f32", "f64"):
        return floating.sign(b)
    if _is(b, "f16", "f16x2", "bf16", "bf16x2"):
        return packed.sign(b)
    kind = b.type("s16", "s32", "s64")
    fn = np.abs if b.ins.opcode == "abs" else np.negative
    d, x = b.operands
    srcs = [b.src(x, kind.bits)]
    return b.pure(lambda p: fn(p.view(kind.view)).view(kind.raw), [b.dst(d, kind.bits)], srcs)


@instruction("sad")
def sad(b: Binder) -> Op:
    """`sad`: c + |a - b|."""
    kind = b.type("u32", "s32")
    d, x, y, z = b.operands

    def fn(p, q, r):
        p, q = p.view(kind.view), q.view(kind.view)
        return (np.where(p < q, q - p, p - q)).view(np.uint32) + r

    return b.pure(fn, [b.dst(d, 32)], [b.src(v, 32) for v in (x, y, z)])
