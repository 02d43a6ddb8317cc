"""`cp.async` and `cp.async.bulk`."""

import numpy as np

from ..access import Access
from ..barriers import Mbarriers
from ..binding import Binder, Op, instruction
from ..copies import AsyncCopies, AsyncStores, BulkCopies
from ..instruction import Address
from .mbarrier import BarrierOperand, lanes
from .memory import take_count, take_hints, take_space


@instruction("cp")
def cp(b: Binder) -> Op:
    """The `cp.async` family."""
    b.one_of("async")
    if b.flag("bulk"):
        return _bulk(b)
    if b.flag("commit_group"):
        return _threads(b, lambda copies, numbers, lanes: copies.commit(numbers, lanes))
    if b.flag("wait_all"):
        return _threads(b, lambda copies, numbers, lanes: copies.wait_all(numbers, lanes))
    if b.flag("wait_group"):
        keep = b.operands[0].value
        return _threads(b, lambda copies, numbers, lanes: copies.wait(numbers, lanes, keep))
    if b.flag("mbarrier"):
        return _arrive(b)
    return _copy(b)


def _threads(b: Binder, act) -> Op:
    def fn(G, mask):
        numbers, which = np.nonzero(G.active(mask))
        act(G.grid.part(AsyncCopies), G.numbers[numbers], which)

    return b.effect(fn, [], [])


class _Place:
    """An address operand in shared or global memory."""

    def __init__(self, b: Binder, operand):
        self.slot, self.bits, self.offset = b.address(operand)

    def shared(self, G, base) -> np.ndarray:
        address = G.wide(base).astype(np.uint64) + np.uint64(self.offset % (1 << 64))
        return G.grid.shared.offsets(address & np.uint64(0xFFFFFFFF), G.rows(G.grid.first_block))

    def global_(self, G, base) -> np.ndarray:
        address = G.wide(base) + np.uint64(self.offset % (1 << 64))
        return address - np.uint64(G.grid.device.memory.BASE)


def _copy(b: Binder) -> Op:
    b.one_of("ca", "cg")
    take_space(b)
    b.one_of("global")
    policy = take_hints(b)
    operands = list(b.operands)
    if policy:
        b.src(operands.pop(), 64)
    target, source = _Place(b, operands[0]), _Place(b, operands[1])
    size = operands[2].value
    if size not in (4, 8, 16):
        raise b.unknown(f"cp.async of {size} bytes does not exist")
    srcs = [target.slot, source.slot]
    ignores = len(operands) > 3 and getattr(operands[3], "type", "") == "pred"
    if len(operands) > 3:
        srcs.append(b.predicate(operands[3])[0] if ignores else b.src(operands[3], 32))

    def fn(G, mask, to, frm, extra=None):
        if extra is None:
            valid = np.full((G.count, 32), size)
        elif ignores:
            valid = np.where(G.wide(extra), 0, size)
        else:
            valid = np.minimum(G.wide(extra).astype(np.int64), size)
        access = Access(b.ins, G, mask)
        target_at, source_at = target.shared(G, to), source.global_(G, frm)
        access.note(G.grid.shared, target_at, size)
        G.grid.part(AsyncCopies).issue(access, target_at, source_at, size, valid)

    return b.effect(fn, [], srcs)


def _arrive(b: Binder) -> Op:
    """`cp.async.mbarrier.arrive`: arrives when the thread's earlier copies are done."""
    b.one_of("arrive")
    keeps_count = b.flag("noinc")
    take_space(b)
    b.type("b64")
    target = BarrierOperand(b, b.operands[0])

    def fn(G, mask, base):
        grid = G.grid
        numbers, offset = lanes(G, mask, target.offsets(G, base))
        _, which = np.nonzero(G.active(mask))
        barriers = grid.part(Mbarriers)
        index = barriers.find(offset, numbers, b.ins)
        if not keeps_count:
            np.add.at(barriers.pending, index, 1)
        copies = grid.part(AsyncCopies)

        def later():
            copies.wait_all(numbers, which)
            barriers.arrive(index, 1, 0, (numbers, which), b.ins)

        grid.device.after_a_while(later)

    return b.effect(fn, [], [target.slot])


def _bulk(b: Binder) -> Op:
    if b.flag("commit_group"):
        return _bulk_threads(b, lambda copies, number, lane: copies.commit(number, lane))
    if b.flag("wait_group"):
        read, keep = b.flag("read"), b.operands[0].value
        return _bulk_threads(b, lambda copies, number, lane: copies.wait(number, lane, keep, read))
    if b.flag("prefetch"):
        return _prefetch(b)
    if b.flag("tensor"):
        raise b.unknown("tensor-map copies are not implemented")
    spaces = b.modifiers[:2]
    del b.modifiers[:2]
    if spaces[0].startswith("shared") and spaces[1] in ("global", "shared::cta"):
        return _bulk_load(b, spaces[1] == "global")
    if spaces[0] == "global" and spaces[1] == "shared::cta":
        return _bulk_store(b)
    raise b.unknown(f"cp.async.bulk from {spaces[1]} to {spaces[0]} is not implemented")


def _bulk_threads(b: Binder, act) -> Op:
    def fn(G, mask):
        copies = G.grid.part(BulkCopies)
        for row, lane in zip(*(v.tolist() for v in np.nonzero(G.active(mask))), strict=True):
            act(copies, int(G.numbers[row]), lane)

    return b.effect(fn, [], [])


def _prefetch(b: Binder) -> Op:
    b.one_of("L2")
    b.one_of("global")
    if take_hints(b):
        b.src(b.operands.pop(), 64)
    source = _Place(b, b.operands[0])
    size = b.src(b.operands[1], 32)
    return b.effect(lambda G, mask, base, n: None, [], [source.slot, size], effect=False)


def _bulk_load(b: Binder, from_global: bool) -> Op:
    b.one_of("mbarrier::complete_tx::bytes")
    multicast = b.flag("multicast::cluster")
    policy = take_hints(b)
    operands = list(b.operands)
    if policy:
        b.src(operands.pop(), 64)
    if len(operands) != 4 + multicast or not isinstance(operands[3], Address):
        raise b.unknown("unexpected operands")
    target, source = _Place(b, operands[0]), _Place(b, operands[1])
    barrier = BarrierOperand(b, operands[3])
    srcs = [target.slot, source.slot, barrier.slot, b.src(operands[2], 32)]
    if multicast:
        srcs.append(b.src(operands[4], 16))

    def fn(G, mask, to, frm, bar, size, blocks=None):
        grid = G.grid
        access = Access(b.ins, G, mask)
        if from_global:
            memory, source_at = grid.device.memory, source.global_(G, frm)
        else:
            memory, source_at = grid.shared, source.shared(G, frm)
        target_at, barrier_at = target.shared(G, to), barrier.offsets(G, bar)
        sizes, ranks = G.wide(size), None if blocks is None else G.wide(blocks)
        for row, lane in np.argwhere(G.active(mask)).tolist():
            number = int(G.numbers[row])
            for shift in _shifts(grid, number, None if ranks is None else int(ranks[row, lane])):
                at = (barrier_at[row, lane : lane + 1].astype(np.int64) + shift).astype(np.uint64)
                grid.part(BulkCopies).load(
                    access,
                    number,
                    lane,
                    (memory, int(source_at[row, lane])),
                    int(target_at[row, lane]) + shift,
                    int(sizes[row, lane]),
                    int(grid.part(Mbarriers).find(at, np.array([number]), b.ins)[0]),
                )

    return b.effect(fn, [], srcs)


def _shifts(grid, number: int, ranks: int | None) -> list[int]:
    """Distance in the shared store from the issuing block to every block that receives."""
    if ranks is None:
        return [0]
    own = int(grid.block_of[number]) % grid.cluster_size
    return [
        (rank - own) * grid.shared.stride for rank in range(grid.cluster_size) if ranks >> rank & 1
    ]


def _bulk_store(b: Binder) -> Op:
    b.one_of("bulk_group")
    policy = take_hints(b)
    operands = list(b.operands)
    if policy:
        b.src(operands.pop(), 64)
    target, source = _Place(b, operands[0]), _Place(b, operands[1])
    srcs = [target.slot, source.slot, b.src(operands[2], 32)]

    def fn(G, mask, to, frm, size):
        access = Access(b.ins, G, mask)
        target_at, source_at, sizes = target.global_(G, to), source.shared(G, frm), G.wide(size)
        for row, lane in np.argwhere(G.active(mask)).tolist():
            G.grid.part(BulkCopies).store(
                access,
                int(G.numbers[row]),
                lane,
                int(source_at[row, lane]),
                int(target_at[row, lane]),
                int(sizes[row, lane]),
            )

    return b.effect(fn, [], srcs)


def store_async(b: Binder) -> Op:
    """`st.async`: a store into a block of the cluster that an mbarrier there counts."""
    if take_space(b) != "shared":
        raise b.unknown("st.async outside shared memory is not implemented")
    b.one_of("mbarrier::complete_tx::bytes")
    count = take_count(b)
    kind = b.type("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
    where, x, barrier = b.operands
    target, bar = BarrierOperand(b, where), BarrierOperand(b, barrier)
    srcs = [b.src(item, kind.bits, kind.kind) for item in b.vector(x, count)]

    def fn(G, mask, base, bar_base, *values):
        grid, access = G.grid, Access(b.ins, G, mask)
        lane = np.broadcast_to(np.arange(32), (G.count, 32))
        offsets = target.offsets(G, base), bar.offsets(G, bar_base)
        numbers, lane, to, at, *values = lanes(G, mask, lane, *offsets, *values)
        data = np.stack([v.astype(kind.raw) for v in values], axis=1).view(np.uint8)
        index = grid.part(Mbarriers).find(at, numbers, b.ins)
        if (grid.shared.block(index * 8) != grid.shared.block(to.astype(np.int64))).any():
            raise access.error("st.async counts on an mbarrier of another block than it stores to")
        grid.part(AsyncStores).issue(access, numbers, lane, to, data, index)

    return b.effect(fn, [], [target.slot, bar.slot, *srcs])
