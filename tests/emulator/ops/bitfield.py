"""Bit fields, bit counts, byte permutation."""

import numpy as np

from ..binding import Binder, Op, instruction
from ..types import PtxType


def _unary(b: Binder, fn, kind: PtxType, bits: int) -> Op:
    d, x = b.operands
    return b.pure(fn, [b.dst(d, bits)], [b.src(x, kind.bits)])


def leading_zeros(x: np.ndarray) -> np.ndarray:
    """Leading zero bits of 32- or 64-bit unsigned values, as uint32."""
    bits = 8 * x.dtype.itemsize
    length = np.zeros(x.shape, np.uint32)
    for step in (32, 16, 8, 4, 2, 1):
        if step < bits:
            big = (x >> x.dtype.type(step)) != 0
            length += np.where(big, np.uint32(step), np.uint32(0))
            x = np.where(big, x >> x.dtype.type(step), x)
    return np.uint32(bits) - (length + (x != 0))


@instruction("popc")
def popc(b: Binder) -> Op:
    """Number of ones."""
    kind = b.type("b32", "b64")
    return _unary(b, lambda x: np.bitwise_count(x).astype(np.uint32), kind, 32)


@instruction("clz")
def clz(b: Binder) -> Op:
    """Leading zeros."""
    kind = b.type("b32", "b64")
    return _unary(b, leading_zeros, kind, 32)


@instruction("bfind")
def bfind(b: Binder) -> Op:
    """Place of the most significant bit that differs from the sign; all ones if none."""
    amount = b.flag("shiftamt")
    kind = b.type("u32", "s32", "u64", "s64")

    def fn(x):
        if kind.kind == "s":
            negative = x.view(kind.view) < 0
            x = np.where(negative, ~x, x)
        zeros = leading_zeros(x)
        found = zeros if amount else np.uint32(kind.bits - 1) - zeros
        return np.where(x == 0, np.uint32(0xFFFFFFFF), found)

    return _unary(b, fn, kind, 32)


@instruction("brev")
def brev(b: Binder) -> Op:
    """Bits in reverse."""
    kind = b.type("b32", "b64")

    def fn(x):
        bits = np.unpackbits(x[..., None].view(np.uint8), axis=-1, bitorder="little")
        return np.packbits(bits[..., ::-1], axis=-1, bitorder="little").view(kind.raw)[..., 0]

    return _unary(b, lambda x: fn(np.ascontiguousarray(x)), kind, kind.bits)


@instruction("bfe")
def bfe(b: Binder) -> Op:
    """Bit field extract, signed fields extended by their top bit."""
    kind = b.type("u32", "s32", "u64", "s64")
    d, x, start, length = b.operands

    def fn(value, pos, count):
        bits, one = kind.bits, kind.raw.type(1)
        pos, count = (pos & np.uint32(0xFF)).astype(int), (count & np.uint32(0xFF)).astype(int)
        signed = value.view(kind.view)
        shifted = np.where(
            pos < bits, signed >> np.minimum(pos, bits - 1).astype(kind.view), kind.view.type(0)
        ).view(kind.raw)
        whole = np.where(count >= bits, kind.raw.type(0), one << np.minimum(count, bits - 1).astype(
            kind.raw))  # fmt: skip
        field = shifted & (whole - one)
        if kind.kind == "u":
            return field
        top = np.minimum(pos + count - 1, bits - 1)
        sign = (value >> np.maximum(top, 0).astype(kind.raw)) & one
        extend = np.where((sign != 0) & (count > 0), ~(whole - one), kind.raw.type(0))
        beyond = np.where((sign != 0) & (count > 0), ~kind.raw.type(0), kind.raw.type(0))
        return np.where((pos >= bits) & (count > 0), beyond, field | extend)

    srcs = [b.src(x, kind.bits), b.src(start, 32), b.src(length, 32)]
    return b.pure(fn, [b.dst(d, kind.bits)], srcs)


@instruction("bfi")
def bfi(b: Binder) -> Op:
    """Bit field insert."""
    kind = b.type("b32", "b64")
    d, x, y, start, length = b.operands

    def fn(field, into, pos, count):
        pos, count = (pos & np.uint32(0xFF)).astype(int), (count & np.uint32(0xFF)).astype(int)
        raw, bits = kind.raw.type, kind.bits
        ones = np.where(
            count >= bits, ~raw(0), (raw(1) << np.minimum(count, bits - 1).astype(raw)) - raw(1)
        )
        shift = np.minimum(pos, bits - 1).astype(raw)
        mask = np.where(pos >= bits, raw(0), ones << shift)
        return (into & ~mask) | ((field << shift) & mask)

    srcs = [b.src(x, kind.bits), b.src(y, kind.bits), b.src(start, 32), b.src(length, 32)]
    return b.pure(fn, [b.dst(d, kind.bits)], srcs)


@instruction("bmsk")
def bmsk(b: Binder) -> Op:
    """A mask of `b` ones from bit `a`."""
    clamp = b.one_of("clamp", "wrap") == "clamp"
    b.type("b32")
    d, x, y = b.operands

    def fn(pos, count):
        if not clamp:
            pos, count = pos & np.uint32(31), count & np.uint32(31)
        pos, count = np.minimum(pos, 32).astype(np.uint64), np.minimum(count, 32).astype(np.uint64)
        ones = (np.uint64(1) << count) - np.uint64(1)
        return (ones << pos).astype(np.uint32)

    return b.pure(fn, [b.dst(d, 32)], [b.src(x, 32), b.src(y, 32)])


@instruction("prmt")
def prmt(b: Binder) -> Op:
    """Byte permutation of b:a, with sign replication."""
    b.type("b32")
    mode = b.one_of("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", default="default")
    if mode != "default":
        raise b.unknown(f"prmt.{mode} is not implemented")
    d, x, y, selector = b.operands

    def fn(lo, hi, select):
        both = lo.astype(np.uint64) | (hi.astype(np.uint64) << np.uint64(32))
        result = np.zeros(np.broadcast_shapes(both.shape, select.shape), np.uint32)
        for i in range(4):
            pick = (select >> np.uint32(4 * i)) & np.uint32(0xF)
            place = ((pick & np.uint32(7)) * np.uint32(8)).astype(np.uint64)
            byte = ((both >> place) & np.uint64(0xFF)).astype(np.uint32)
            sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
            byte = np.where(pick & np.uint32(8), sign, byte)
            result |= byte << np.uint32(8 * i)
        return result

    return b.pure(fn, [b.dst(d, 32)], [b.src(s, 32) for s in (x, y, selector)])


@instruction("dp4a")
def dp4a(b: Binder) -> Op:
    """Dot product of four bytes, plus c."""
    second, first = b.type("u32", "s32"), b.type("u32", "s32")
    d, x, y, z = b.operands

    def parts(value, kind):
        value = np.ascontiguousarray(value)[..., None].view("u1" if kind.kind == "u" else "i1")
        return value.astype(np.int64)

    def fn(p, q, r):
        total = (parts(p, first) * parts(q, second)).sum(axis=-1)
        return (total + r.astype(np.int64)).astype(np.uint64).astype(np.uint32)

    return b.pure(fn, [b.dst(d, 32)], [b.src(s, 32) for s in (x, y, z)])
