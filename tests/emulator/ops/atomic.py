"""`atom` and `red`: lanes that hit one address go one after another, in lane order."""

import numpy as np

from ..access import Access
from ..binding import Binder, Op, instruction
from ..errors import UninitialisedError
from ..instruction import Vector
from .floating import fused
from .memory import Road, take_hints, take_order, take_space
from .packed import lift

_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


def _combine(name: str, kind):
    """New value from old value and operand, on register bits."""
    view, raw = kind.view, kind.raw
    if name == "add" and kind.name in ("f16x2", "bf16x2", "f16", "bf16"):
        one = np.float32(1)
        return lift(lambda x, y: fused(x, np.broadcast_to(one, x.shape), y), kind.name)
    simple = {
        "add": lambda old, x: (old.view(view) + x.view(view)).view(raw),
        "min": lambda old, x: np.minimum(old.view(view), x.view(view)).view(raw),
        "max": lambda old, x: np.maximum(old.view(view), x.view(view)).view(raw),
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda old, x: x,
        "cas": lambda old, x, y: np.where(old == x, y, old),
        "inc": lambda old, x: np.where(old >= x, raw.type(0), old + raw.type(1)),
        "dec": lambda old, x: np.where((old == 0) | (old > x), x, old - raw.type(1)),
    }
    return simple[name]


@instruction("atom", "red")
def atom(b: Binder) -> Op:
    """Atomic read-modify-write."""
    returns = b.ins.opcode == "atom"
    if b.flag("async"):
        raise b.unknown("red.async is not implemented")
    take_order(b)
    space = take_space(b)
    name = b.one_of(*_OPERATIONS)
    b.flag("noftz")
    policy = take_hints(b)
    count = int(b.one_of("v2", "v4", "v8", default="v1")[1:])
    kind = b.type("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64", "f16x2", "bf16x2", "b16",
                  "f16", "bf16")  # fmt: skip
    operands = list(b.operands)
    if policy:
        b.src(operands.pop(), 64)
    d = operands.pop(0) if returns else None
    address = b.address(operands.pop(0))
    items = [i for o in operands for i in (o.items if isinstance(o, Vector) else (o,))]
    if len(items) != (2 if name == "cas" else count):
        raise b.unknown("unexpected number of operands")
    srcs = [b.src(i, kind.bits, kind.kind) for i in items]
    dsts = [b.dst(r, kind.bits) for r in b.vector(d, count)] if returns else []
    combine = _combine(name, kind)
    unit = kind.bits // 8
    roads = [Road(b, space, address, unit, 1, True) for _ in range(count)]

    def fn(G, mask, base, *values):
        parts = [values] if name == "cas" else [(v,) for v in values]
        olds = []
        for i, part in enumerate(parts):
            at = base + base.dtype.type(i * unit) if i else base
            olds.append(_update(roads[i], G, mask, at, part, combine))
        return olds if returns else ()

    return b.effect(fn, dsts, [address[0], *srcs], poll=returns)


def _update(road: Road, G, mask, base, values, combine) -> np.ndarray:
    """Applies `combine` lane after lane; returns what every lane found."""
    memory, offset, access = road.resolve(G, mask, base)
    unit = road.unit
    access.note(memory, offset, unit)
    access.ordered_read(memory, offset, unit)
    access.ordered_write(memory, offset, unit)
    found = memory.load(offset, unit, 1, mask, access).copy()
    if G.undefined is not None:
        raise UninitialisedError("an atomic update of memory that nothing wrote", road.ins)
    active = np.flatnonzero(G.active(mask).ravel())
    flat = offset.ravel()[active]
    values = [G.wide(v).ravel()[active] for v in values]
    old = found.ravel()[active]
    rank = _occurrence(flat)
    new = np.empty_like(old)
    for turn in range(int(rank.max()) + 1):
        at = rank == turn
        if turn:
            lone = Access(road.ins, G, None, True)
            old[at] = memory.load(flat[at], unit, 1, None, lone)
        new[at] = combine(old[at], *[v[at] for v in values])
        memory.store(flat[at], new[at], unit, 1, None, access)
    if (new != old).any():
        G.grid.device.progress += 1
    found.ravel()[active] = old
    return found


def _occurrence(flat: np.ndarray) -> np.ndarray:
    """How many earlier entries equal each entry."""
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    counts = np.arange(flat.size) - np.repeat(starts, np.diff(np.r_[starts, flat.size]))
    rank = np.empty(flat.size, np.int64)
    rank[order] = counts
    return rank
