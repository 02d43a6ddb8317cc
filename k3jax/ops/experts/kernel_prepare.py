"""What the expert kernel finds ready: hidden values marked as not written, and routes grouped.

Blocks above 0 fill the hidden values with words that no rounded
pair of bf16 can be; the next launch waits for data by waiting for these words to go.

Block 0 groups routes (token, slot) into units of at most 8 routes of one expert, experts ascending,
routes of an expert ascending: a counting sort. Each warp takes a contiguous range of routes and
counts experts, 32 routes at a time; running totals over warps and experts turn the counts into
places. The table is put together in shared memory, for its words would reach global memory one by
one.

No block waits for another, so the kernel cannot hang.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.experts.kernel_units import (
    TABLE_HEADER_BYTES,
    UNIT,
    UNIT_BYTES,
    lanes_with,
    record_offset,
    table_bytes,
)
from k3jax.runtime.program import Kernel

_FILL_BYTES = 64
"""Bytes that a thread fills."""


@dataclass(frozen=True)
class PrepareKernel(Kernel):
    """Fills `hidden` and writes the unit table.

    Attributes:
        num_experts: E, at most 1024; ids outside 0 .. E - 1 are dropped.
        max_routes: most routes of a launch.
    """

    num_experts: int
    max_routes: int = 1024

    parameters = (
        ("ids", "address"),
        ("hidden", "address"),
        ("units", "address"),
        ("num_routes", "int32"),
        ("hidden_bytes", "int32"),
    )

    threads = 1024
    """One for each expert."""

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.threads // 32

    @property
    def rounds(self) -> int:
        """Routes of a thread."""
        return -(-self.max_routes // self.threads)

    @property
    def shared_bytes(self) -> int:
        """Totals of each warp, first unit of each expert; counts of both, and later the table."""
        counts = 4 * self.warps * self.num_experts
        table = table_bytes(self.num_experts, self.max_routes)
        return self.counts_offset + max(counts, table)

    @property
    def counts_offset(self) -> int:
        """Shared memory of the counts, whole pieces of 16 bytes in."""
        return -(-4 * (self.warps + self.num_experts) // 16) * 16

    def grid(self, hidden_bytes: int) -> tuple[int, int, int]:
        """Blocks that fill `hidden_bytes`, and one that groups."""
        return -(-hidden_bytes // (self.threads * _FILL_BYTES)) + 1, 1, 1

    @cute.kernel
    def device(
        self, ids: Int64, hidden: Int64, units: Int64, num_routes: Int32, hidden_bytes: Int32
    ):
        """One block of the schedule above."""
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        if block == 0:
            self.group(ids, units, num_routes)
        else:
            self.fill(hidden, block - 1, hidden_bytes)

    @cute.jit
    def fill(self, hidden: Int64, block: Int32, hidden_bytes: Int32):
        """Marks a block's share of the hidden values as not written."""
        thread, _, _ = cute.arch.thread_idx()
        first = block * (self.threads * _FILL_BYTES) + thread * 16
        for step in cutlass.range_constexpr(_FILL_BYTES // 16):
            offset = first + step * (self.threads * 16)
            if offset < hidden_bytes:
                ptx.store_global_4(hidden + Int64(offset), Uint32(ptx.NOT_WRITTEN))

    @cute.jit
    def group(self, ids: Int64, units: Int64, num_routes: Int32):
        """The counting sort."""
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // 32, thread % 32
        totals = Uint32(cute.arch.get_dyn_smem(Uint32, alignment=128).toint())
        bases, counts = totals + Uint32(4 * self.warps), totals + Uint32(self.counts_offset)
        mine = counts + Uint32(warp * (4 * self.num_experts))
        first = warp * (32 * self.rounds) + lane
        experts = [
            counted_expert(ids, first + 32 * turn, num_routes, self.num_experts)
            for turn in range(self.rounds)
        ]
        for index in cutlass.range(lane, self.num_experts, 32, unroll=4):
            ptx.store_shared(mine + Uint32(index * 4), Int32(0))
        cute.arch.sync_warp()
        ranks = [self.rank_among(expert, mine) for expert in experts]
        cute.arch.sync_threads()

        own_units = (self.sum_counts(counts) + UNIT - 1) // UNIT
        (base,), (num_units,) = scan_block([own_units], totals)
        if thread < self.num_experts:
            ptx.store_shared(bases + Uint32(thread * 4), base)
        cute.arch.sync_threads()
        places = [
            self.place(bases, mine, expert, rank)
            for expert, rank in zip(experts, ranks, strict=True)
        ]
        cute.arch.sync_threads()

        # The counts have served: the table is put together in their place, then copied.
        pieces = (TABLE_HEADER_BYTES + num_units * UNIT_BYTES + 15) // 16
        for piece in cutlass.range(thread, pieces, self.threads):
            ptx.store_shared_4(counts + Uint32(piece * 16), [Uint32(0xFFFFFFFF)] * 4)
        cute.arch.sync_threads()
        if thread == 0:
            ptx.store_shared(counts, num_units)
        for unit in cutlass.range(own_units):
            ptx.store_shared(counts + Uint32(record_offset(base + unit)), thread)
        for turn in cutlass.range_constexpr(self.rounds):
            if experts[turn] < self.num_experts:
                ptx.store_shared(counts + Uint32(places[turn]), first + 32 * turn)
        cute.arch.sync_threads()
        for piece in cutlass.range(thread, pieces, self.threads):
            words = ptx.load_shared_4(counts + Uint32(piece * 16))
            ptx.store_global_words(units + Int64(piece) * 16, words)

    @cute.jit
    def place(self, bases: Uint32, counts: Uint32, expert: Int32, rank: Int32) -> Int32:
        """Where in the table a route goes that is its warp's `rank`-th of an expert."""
        offset = Int32(0)
        if expert < self.num_experts:
            rank += ptx.load_shared(counts + Uint32(expert * 4))
            unit = ptx.load_shared(bases + Uint32(expert * 4)) + rank // UNIT
            offset = Int32(record_offset(unit)) + 4 + rank % UNIT * 4
        return offset

    @cute.jit
    def rank_among(self, expert: Int32, counts: Uint32) -> Int32:
        """How many routes of the warp before this lane's have its expert; counts them."""
        peers = lanes_with(expert, expert, self.num_experts)
        lane = cute.arch.lane_idx()
        before = Int32(cute.arch.popc(peers & ((Uint32(1) << Uint32(lane)) - Uint32(1))))
        rank = before
        counter = counts + Uint32(expert * 4)
        counted = expert < self.num_experts
        if counted:
            rank += ptx.load_shared(counter)
        cute.arch.sync_warp()
        if counted & (before == 0):
            ptx.store_shared(counter, rank + Int32(cute.arch.popc(peers)))
        cute.arch.sync_warp()
        return rank

    @cute.jit
    def sum_counts(self, counts: Uint32) -> Int32:
        """Replaces an expert's counts by running totals over warps; returns the whole."""
        thread, _, _ = cute.arch.thread_idx()
        total = Int32(0)
        if thread < self.num_experts:
            place = counts + Uint32(thread * 4)
            offsets = [Uint32(warp * (4 * self.num_experts)) for warp in range(self.warps)]
            loaded = [ptx.load_shared(place + offset) for offset in offsets]
            for warp in cutlass.range_constexpr(self.warps):
                ptx.store_shared(place + offsets[warp], total)
                total += loaded[warp]
        return total


@cute.jit
def counted_expert(ids: Int64, route: Int32, end: Int32, num_experts: cutlass.Constexpr) -> Int32:
    """A route's expert, or `num_experts` where there is no route or its id is out of range."""
    expert = Int32(num_experts)
    if route < end:
        expert = ptx.load_global(ids + Int64(route) * 4)
        if Uint32(expert) >= Uint32(num_experts):
            expert = Int32(num_experts)
    return expert


@cute.jit
def scan_block(values, totals: Uint32):
    """Sums of each of `values` over the threads before this one, and over all 1024 of the block.

    Args:
        values: words of this thread.
        totals: 128 bytes of shared memory for each, which the next scan may use too.
    """
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // 32, thread % 32
    running = [_scan_warp(value) for value in values]
    slots = [totals + Uint32(128 * index) for index in range(len(values))]
    cute.arch.sync_threads()
    if lane == 31:
        for index in cutlass.range_constexpr(len(values)):
            ptx.store_shared(slots[index] + Uint32(warp * 4), running[index])
    cute.arch.sync_threads()
    if warp < len(values):
        of_warp = totals + Uint32(thread * 4)
        ptx.store_shared(of_warp, _scan_warp(ptx.load_shared(of_warp)))
    cute.arch.sync_threads()
    wholes = [ptx.load_shared(slot + Uint32(124)) for slot in slots]
    before = [sums - value for sums, value in zip(running, values, strict=True)]
    if warp > 0:
        for index in cutlass.range_constexpr(len(values)):
            before[index] += ptx.load_shared(slots[index] + Uint32(warp * 4 - 4))
    return before, wholes


@cute.jit
def _scan_warp(value: Int32) -> Int32:
    """Sum of `value` over the lanes up to this one."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            value += below
    return value


REPRESENTATIVES = {
    "prepare and group routes": PrepareKernel(num_experts=896),
    "prepare and group 4096 routes": PrepareKernel(num_experts=896, max_routes=4096),
}
