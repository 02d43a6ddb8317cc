"""Moves and address conversions."""

import numpy as np

from ..binding import Binder, Op, instruction
from ..instruction import Symbol, Vector
from ..types import RAW

SHARED_WINDOW = 0x0001_0000_0000_0000
"""Generic addresses of shared memory: this plus the 32-bit shared address."""
LOCAL_WINDOW = 0x0002_0000_0000_0000

_CLOCKS = ("%clock", "%clock64", "%globaltimer", "%clock_hi", "%globaltimer_lo")


@instruction("mov")
def mov(b: Binder) -> Op:
    """Move, pack, unpack."""
    kind = b.type()
    d, x = b.operands
    if isinstance(d, Vector):
        return _unpack(b, d, x, kind.bits)
    if isinstance(x, Vector):
        return _pack(b, d, x, kind.bits)
    if isinstance(x, Symbol) and x.name in _CLOCKS:
        return _clock(b, d, x.name, kind.bits)
    return b.pure(np.array, [b.dst(d, kind.bits)], [b.src(x, kind.bits, kind.kind)])


def _clock(b: Binder, d, name: str, bits: int) -> Op:
    def fn(G, mask):
        return (np.full((1, 1), G.grid.device.clock(name) % (1 << bits), RAW[bits]),)

    return b.effect(fn, [b.dst(d, bits)], [], effect=False, poll=True)


def _pack(b: Binder, d, vector: Vector, bits: int) -> Op:
    part = bits // len(vector.items)
    srcs = [b.src(item, part) for item in vector.items]
    raw = RAW[bits]

    def fn(*parts):
        result = parts[0].astype(raw)
        for i, value in enumerate(parts[1:], 1):
            result = result | (value.astype(raw) << raw.type(i * part))
        return result

    return b.pure(fn, [b.dst(d, bits)], srcs)


def _unpack(b: Binder, vector: Vector, x, bits: int) -> Op:
    part = bits // len(vector.items)
    source, raw, small = b.src(x, bits), RAW[bits], RAW[part]

    def fn(value):
        return [(value >> raw.type(i * part)).astype(small) for i in range(len(vector.items))]

    dsts = [b.dst(item, part) for item in vector.items]
    if len(dsts) == 1:
        raise b.unknown("a vector of one element")
    return b.pure(fn, dsts, [source])


@instruction("cvta")
def cvta(b: Binder) -> Op:
    """Address conversion between generic and a state space."""
    to = b.flag("to")
    space = b.prefixed("shared") or b.one_of("global", "const", "local", "param")
    bits = b.type("u32", "u64").bits
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space.split("::")[0], 0)
    if space in ("const", "param"):
        raise b.unknown(f"cvta.{space} is not implemented")
    d, x = b.operands
    raw = RAW[bits]
    if to:
        fn = lambda a: a & raw.type(0xFFFFFFFF) if window else np.array(a)  # noqa: E731
    else:
        fn = lambda a: a | raw.type(window) if window else np.array(a)  # noqa: E731
    return b.pure(fn, [b.dst(d, bits)], [b.src(x, bits)])


@instruction("isspacep")
def isspacep(b: Binder) -> Op:
    """Whether a generic address lies in a state space."""
    space = b.prefixed("shared") or b.one_of("global", "local")
    d, a = b.operands
    slot = b.src(a, 64)

    def fn(address):
        window = address & np.uint64(SHARED_WINDOW | LOCAL_WINDOW)
        if space == "global":
            return window == 0
        return window == np.uint64(LOCAL_WINDOW if space == "local" else SHARED_WINDOW)

    if space == "shared::cta":
        raise b.unknown("isspacep.shared::cta is not implemented")
    return b.pure(fn, [b.dst(d, 1)], [slot])
