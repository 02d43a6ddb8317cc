"""Logic and shifts."""

import numpy as np

from ..binding import Binder, Op, instruction
from ..instruction import Immediate


def _bits(b: Binder, fn, count: int) -> Op:
    kind = b.type("pred", "b16", "b32", "b64")
    d, *sources = b.operands
    if len(sources) != count:
        raise b.unknown(f"{len(sources)} sources where {count} are wanted")
    return b.pure(fn, [b.dst(d, kind.bits)], [b.src(s, kind.bits) for s in sources])


@instruction("and", "or", "xor")
def binary(b: Binder) -> Op:
    """Bitwise and, or, xor; also of predicates."""
    fn = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[b.ins.opcode]
    return _bits(b, fn, 2)


@instruction("not")
def invert(b: Binder) -> Op:
    """Bitwise not."""
    return _bits(b, np.invert, 1)


@instruction("cnot")
def cnot(b: Binder) -> Op:
    """1 where the source is 0, else 0."""
    return _bits(b, lambda x: (x == 0).astype(x.dtype), 1)


@instruction("lop3")
def lop3(b: Binder) -> Op:
    """Any function of three bits, by its truth table."""
    b.type("b32")
    d, x, y, z, table = b.operands
    if not isinstance(table, Immediate):
        raise b.unknown("lop3 with a predicate is not implemented")
    fn = lop3_function(table.value & 0xFF)
    return b.pure(fn, [b.dst(d, 32)], [b.src(s, 32) for s in (x, y, z)])


def lop3_function(table: int):
    """The function on arrays; row i of the table is the result for bits (a, b, c) of i."""
    common = {
        0xEA: lambda a, b, c: (a & b) | c,
        0xF8: lambda a, b, c: a | (b & c),
        0xFE: lambda a, b, c: a | b | c,
        0x80: lambda a, b, c: a & b & c,
        0x96: lambda a, b, c: a ^ b ^ c,
        0xCA: lambda a, b, c: (a & b) | (~a & c),
    }
    return common.get(table) or (lambda a, b, c: _minterms(table, a, b, c))


def _minterms(table: int, a, b, c):
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for row in range(8):
        if table >> row & 1:
            x = a if row & 4 else ~a
            y = b if row & 2 else ~b
            z = c if row & 1 else ~c
            result |= x & y & z
    return result


@instruction("shl", "shr")
def shift(b: Binder) -> Op:
    """Shifts; amounts of the width or more give 0, or the sign for signed right shifts."""
    left = b.ins.opcode == "shl"
    kind = b.type(*(f"{k}{n}" for k in ("b" if left else "bus") for n in (16, 32, 64)))
    d, x, amount = b.operands
    view, raw, bits = kind.view, kind.raw, kind.bits

    def fn(value, count):
        value = value.view(view)
        over = count >= bits
        count = np.where(over, np.uint32(bits - 1), count).astype(view)
        shifted = value << count if left else value >> count
        if kind.kind != "s" and over.any():
            shifted = np.where(over, view.type(0), shifted)
        return shifted.view(raw)

    return b.pure(fn, [b.dst(d, bits)], [b.src(x, bits), b.src(amount, 32)])


@instruction("shf")
def funnel(b: Binder) -> Op:
    """Funnel shift of the 64-bit value b:a."""
    left = b.one_of("l", "r") == "l"
    clamp = b.one_of("clamp", "wrap") == "clamp"
    b.type("b32")
    d, low, high, amount = b.operands

    def fn(lo, hi, count):
        count = np.minimum(count, np.uint32(32)) if clamp else count & np.uint32(31)
        both = lo.astype(np.uint64) | (hi.astype(np.uint64) << np.uint64(32))
        count = count.astype(np.uint64)
        shifted = (both << count) >> np.uint64(32) if left else both >> count
        return shifted.astype(np.uint32)

    return b.pure(fn, [b.dst(d, 32)], [b.src(s, 32) for s in (low, high, amount)])
