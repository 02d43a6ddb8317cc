"""Warp-synchronous instructions: shuffles, votes, matches, reductions, election."""

import numpy as np

from ..binding import Binder, Op, instruction
from ..errors import BarrierError
from ..instruction import Immediate, Pair
from ..types import LANES


def member_sync(b: Binder, operand):
    """What `Op.sync` is for a member mask operand, and the mask's slot."""
    slot = b.src(operand, 32)
    if isinstance(operand, Immediate) and operand.value % (1 << 32) == 0xFFFFFFFF:
        return "all", slot
    return slot, slot


def warp_barrier(b: Binder) -> Op:
    """`bar.warp.sync`: convergence itself is the whole effect."""
    b.one_of("sync")
    sync, slot = member_sync(b, b.operands[0])
    return b.effect(lambda G, mask, m: (), [], [slot], sync=sync)


@instruction("shfl")
def shfl(b: Binder) -> Op:
    """`shfl.sync`: reads another lane's register."""
    b.one_of("sync")
    mode = b.one_of("up", "down", "bfly", "idx")
    b.type("b32")
    d, a, lane, clamp, members = b.operands
    names = [d.first, d.second] if isinstance(d, Pair) else [d]
    dsts = [b.dst(names[0], 32)] + [b.dst(n, 1) for n in names[1:]]
    srcs = [b.src(v, 32) for v in (a, lane, clamp)]
    sync, slot = member_sync(b, members)

    def fn(G, mask, value, lane, clamp, _):
        source, inside = _source_lane(mode, G.wide(lane), G.wide(clamp))
        value = G.wide(value)
        result = np.take_along_axis(value, source, axis=1)
        if mask is not None:
            silent = mask & inside & ~np.take_along_axis(mask, source, axis=1)
            if silent.any():
                row, at = (int(v[0]) for v in np.nonzero(silent))
                raise BarrierError(
                    f"lane {at} reads lane {source[row, at]}, which does not execute it", b.ins
                )
        return (result, inside)[: len(dsts)]

    def mark(R, G, flags):
        source, _ = _source_lane(mode, G.wide(R[srcs[1]]), G.wide(R[srcs[2]]))
        moved = np.take_along_axis(G.wide(flags[0]), source, axis=1)
        where = flags[1] | flags[2] | flags[3]
        return [moved | where, where][: len(dsts)]

    return b.effect(fn, dsts, [*srcs, slot], effect=False, sync=sync, mark=mark)


def _source_lane(mode: str, lane, clamp):
    """Source lane of every lane, and whether it lies inside the segment."""
    own = np.arange(LANES, dtype=np.int64)[None]
    lane, clamp = (lane & np.uint32(31)).astype(np.int64), clamp.astype(np.int64)
    segment = (clamp >> 8) & 31
    clamp = clamp & 31
    low, high = own & segment, (own & segment) | (clamp & ~segment)
    if mode == "up":
        source = own - lane
        inside = source >= high
    elif mode == "down":
        source = own + lane
        inside = source <= high
    elif mode == "bfly":
        source = own ^ lane
        inside = source <= high
    else:
        source = low | (lane & ~segment)
        inside = source <= high
    return np.where(inside, source, own) & 31, inside


def _pack(votes: np.ndarray) -> np.ndarray:
    """Bool [warps, 32] to uint32 [warps, 1], lane 0 in bit 0."""
    return np.packbits(votes, axis=1, bitorder="little").view(np.uint32)


def _restrict(G, mask, members) -> np.ndarray:
    """Lanes that are active and in each lane's member mask (taken from the first active lane)."""
    active = G.active(mask)
    bits = np.where(active, G.wide(members), 0).max(axis=1).astype(np.uint32)
    return active & ((bits[:, None] >> np.arange(LANES, dtype=np.uint32)) & 1).astype(bool)


@instruction("vote")
def vote(b: Binder) -> Op:
    """`vote.sync`: all, any, uni, ballot."""
    b.one_of("sync")
    mode = b.one_of("all", "any", "uni", "ballot")
    kind = b.type("pred", "b32")
    d, p, members = b.operands
    slot, negate = b.predicate(p) if not isinstance(p, Immediate) else (b.src(p, 1), False)
    sync, member_slot = member_sync(b, members)

    def fn(G, mask, votes, members):
        votes = G.wide(~votes if negate else votes)
        inside = _restrict(G, mask, members)
        yes = (votes & inside).any(axis=1, keepdims=True)
        no = (~votes & inside).any(axis=1, keepdims=True)
        result = {"all": ~no, "any": yes, "uni": ~(yes & no)}.get(mode)
        return (_pack(votes & inside) if result is None else result,)

    return b.effect(fn, [b.dst(d, kind.bits)], [slot, member_slot], effect=False, sync=sync)


@instruction("activemask")
def activemask(b: Binder) -> Op:
    """The lanes that execute together."""
    b.type("b32")
    (d,) = b.operands
    return b.effect(lambda G, mask: (_pack(G.active(mask)),), [b.dst(d, 32)], [], effect=False)


@instruction("match")
def match(b: Binder) -> Op:
    """`match.any`, `match.all`: lanes that hold the same value."""
    mode = b.one_of("any", "all")
    b.one_of("sync")
    kind = b.type("b32", "b64")
    d, a, members = b.operands
    names = [d.first, d.second] if isinstance(d, Pair) else [d]
    dsts = [b.dst(names[0], 32)] + [b.dst(n, 1) for n in names[1:]]
    slot = b.src(a, kind.bits)
    sync, member_slot = member_sync(b, members)

    def fn(G, mask, value, members):
        value, inside = G.wide(value), _restrict(G, mask, members)
        same = (value[:, :, None] == value[:, None, :]) & inside[:, None, :]
        bits = np.packbits(same, axis=2, bitorder="little").view(np.uint32)[..., 0]
        if mode == "any":
            return (bits,)
        everyone = (bits == _pack(inside)) | ~inside
        agreed = everyone.all(axis=1, keepdims=True)
        return (np.where(agreed, _pack(inside), np.uint32(0)), agreed)[: len(dsts)]

    return b.effect(fn, dsts, [slot, member_slot], effect=False, sync=sync)


@instruction("redux")
def redux(b: Binder) -> Op:
    """`redux.sync` of integers."""
    b.one_of("sync")
    name = b.one_of("add", "min", "max", "and", "or", "xor")
    kind = b.type("u32", "s32", "b32")
    d, a, members = b.operands
    slot = b.src(a, 32)
    sync, member_slot = member_sync(b, members)
    combine, neutral = {
        "add": (np.add, 0),
        "min": (np.minimum, np.iinfo(kind.view).max),
        "max": (np.maximum, np.iinfo(kind.view).min),
        "and": (np.bitwise_and, 0xFFFFFFFF),
        "or": (np.bitwise_or, 0),
        "xor": (np.bitwise_xor, 0),
    }[name]

    def fn(G, mask, value, members):
        value, inside = G.wide(value).view(kind.view), _restrict(G, mask, members)
        chosen = np.where(inside, value, kind.view.type(neutral))
        return (combine.reduce(chosen, axis=1, keepdims=True, dtype=kind.view).view(np.uint32),)

    return b.effect(fn, [b.dst(d, 32)], [slot, member_slot], effect=False, sync=sync)


@instruction("elect")
def elect(b: Binder) -> Op:
    """`elect.sync`: one leader, the lowest lane of the member mask."""
    b.one_of("sync")
    d, members = b.operands
    dsts = [b.dst(d.first, 32), b.dst(d.second, 1)]
    sync, member_slot = member_sync(b, members)

    def fn(G, mask, members):
        inside = _restrict(G, mask, members)
        leader = inside.argmax(axis=1)[:, None]
        return leader.astype(np.uint32), np.arange(LANES)[None] == leader

    return b.effect(fn, dsts, [member_slot], effect=False, sync=sync)
