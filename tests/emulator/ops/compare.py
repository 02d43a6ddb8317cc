"""Comparison and selection."""

import numpy as np

from ..binding import Binder, Op, instruction
from ..instruction import Pair
from ..types import flush
from .packed import widen

_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_TYPES = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64", "f16",
          "bf16")  # fmt: skip


def _comparison(b: Binder):
    """The type and the function on register bits of a comparison."""
    name = b.one_of(*_COMPARE, *_UNORDERED, "num", "nan")
    ftz = b.flag("ftz")
    kind = b.type(*_TYPES)
    if kind.name in ("f16", "bf16"):
        see = lambda x: widen(x, kind.name)  # noqa: E731
    elif ftz:
        see = lambda x: flush(x.view(kind.view))  # noqa: E731
    else:
        see = lambda x: x.view(kind.view)  # noqa: E731
    is_float = kind.kind == "f" or kind.name == "bf16"

    def compare(x, y):
        x, y = see(x), see(y)
        if name in _COMPARE:
            result = _COMPARE[name](x, y)
            # PTX: an ordered "ne" is false when an operand is NaN, unlike NumPy's.
            return result & ~np.isnan(x) & ~np.isnan(y) if is_float and name == "ne" else result
        unordered = np.isnan(x) | np.isnan(y)
        if name in _UNORDERED:
            return unordered | _COMPARE[_UNORDERED[name]](x, y)
        return unordered if name == "nan" else ~unordered

    return kind, compare


@instruction("setp")
def setp(b: Binder) -> Op:
    """Compare, optionally combine with a predicate, into one or two predicates."""
    combine = b.one_of(*_COMBINE, default="")
    kind, compare = _comparison(b)
    d, x, y, *more = b.operands
    srcs = [b.src(x, kind.bits, kind.kind), b.src(y, kind.bits, kind.kind)]
    names = [d.first, d.second] if isinstance(d, Pair) else [d]
    dsts = [b.dst(n, 1) for n in names]
    if not combine:
        if len(dsts) == 1:
            return b.pure(compare, dsts, srcs)

        def both(p, q):
            result = compare(p, q)
            return result, ~result

        return b.pure(both, dsts, srcs)
    slot, negate = b.predicate(more[0])

    def fn(p, q, c):
        c = ~c if negate else c
        result = compare(p, q)
        pair = _COMBINE[combine](result, c), _COMBINE[combine](~result, c)
        return pair if len(dsts) == 2 else pair[0]

    return b.pure(fn, dsts, [*srcs, slot])


@instruction("set")
def set_value(b: Binder) -> Op:
    """Compare into a register: all ones or 1.0 for true."""
    kind, compare = _comparison(b)
    into = b.type("u32", "s32", "f32")
    true = np.uint32(0x3F800000 if into.name == "f32" else 0xFFFFFFFF)
    d, x, y = b.operands
    srcs = [b.src(x, kind.bits, kind.kind), b.src(y, kind.bits, kind.kind)]
    return b.pure(lambda p, q: np.where(compare(p, q), true, np.uint32(0)), [b.dst(d, 32)], srcs)


@instruction("selp")
def selp(b: Binder) -> Op:
    """Select by a predicate."""
    kind = b.type(*_TYPES)
    d, x, y, p = b.operands
    srcs = [b.src(x, kind.bits, kind.kind), b.src(y, kind.bits, kind.kind)]
    slot, negate = b.predicate(p)
    if negate:
        srcs.reverse()

    def mark(R, G, flags):
        return [np.where(R[slot], flags[0], flags[1]) | flags[2]]

    dsts = [b.dst(d, kind.bits)]
    return b.pure(lambda s, t, c: np.where(c, s, t), dsts, [*srcs, slot], mark=mark)


@instruction("slct")
def slct(b: Binder) -> Op:
    """Select by sign: a where c >= 0."""
    by = b.type("s32", "f32")
    ftz = b.flag("ftz")
    kind = b.type(*_TYPES)
    d, x, y, c = b.operands
    srcs = [b.src(x, kind.bits, kind.kind), b.src(y, kind.bits, kind.kind)]
    srcs.append(b.src(c, 32, by.kind))

    def fn(s, t, sign):
        sign = sign.view(by.view)
        return np.where((flush(sign) if ftz else sign) >= 0, s, t)

    return b.pure(fn, [b.dst(d, kind.bits)], srcs)
