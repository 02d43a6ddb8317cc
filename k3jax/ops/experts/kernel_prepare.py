"""What the expert kernel finds ready: hidden values marked as not written, and routes grouped.

Blocks above 0 (or all, if nothing is grouped) fill the hidden values with words that no rounded
pair of bf16 can be; the next launch waits for data by waiting for these words to go.

Block 0 groups routes (token, slot) into units of at most 8 routes of one expert, experts ascending,
routes of an expert ascending: a counting sort. Each warp takes a contiguous range of routes and
counts experts, 32 routes at a time; running totals over warps and experts turn the counts into
places; a second pass over the same routes writes them.

No block waits for another, so the kernel cannot hang.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.experts.kernel_decode import NOT_WRITTEN
from k3jax.ops.experts.kernel_units import UNIT, record_offset
from k3jax.runtime.program import Kernel

_FILL_BYTES = 64
"""Bytes that a thread fills."""


@dataclass(frozen=True)
class PrepareKernel(Kernel):
    """Fills `hidden`, and if `groups` writes the unit table.

    Attributes:
        num_experts: E, at most 1024; ids outside 0 .. E - 1 are dropped.
        groups: whether block 0 groups.
    """

    num_experts: int
    groups: bool

    parameters = (
        ("ids", "address"),
        ("hidden", "address"),
        ("units", "address"),
        ("num_routes", "int32"),
        ("hidden_bytes", "int32"),
    )

    @property
    def threads(self) -> int:
        """One for each expert when grouping."""
        return 1024 if self.groups else 256

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.threads // 32

    @property
    def shared_bytes(self) -> int:
        """Counts of each warp and expert, first unit of each expert, totals of each warp."""
        return 4 * ((self.warps + 1) * self.num_experts + self.warps) if self.groups else 0

    def grid(self, hidden_bytes: int) -> tuple[int, int, int]:
        """Blocks that fill `hidden_bytes`, and one that groups."""
        return -(-hidden_bytes // (self.threads * _FILL_BYTES)) + self.groups, 1, 1

    @cute.kernel
    def device(
        self, ids: Int64, hidden: Int64, units: Int64, num_routes: Int32, hidden_bytes: Int32
    ):
        """One block of the schedule above."""
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.groups):
            if block == 0:
                self.group(ids, units, num_routes)
            else:
                self.fill(hidden, block - 1, hidden_bytes)
        else:
            self.fill(hidden, block, hidden_bytes)

    @cute.jit
    def fill(self, hidden: Int64, block: Int32, hidden_bytes: Int32):
        """Marks a block's share of the hidden values as not written."""
        thread, _, _ = cute.arch.thread_idx()
        first = block * (self.threads * _FILL_BYTES) + thread * 16
        for step in cutlass.range_constexpr(_FILL_BYTES // 16):
            offset = first + step * (self.threads * 16)
            if offset < hidden_bytes:
                ptx.store_global_4(hidden + Int64(offset), Uint32(NOT_WRITTEN))

    @cute.jit
    def group(self, ids: Int64, units: Int64, num_routes: Int32):
        """The counting sort."""
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // 32, thread % 32
        counts = Uint32(cute.arch.get_dyn_smem(Uint32, alignment=128).toint())
        bases = counts + Uint32(4 * self.warps * self.num_experts)
        mine = counts + Uint32(warp * (4 * self.num_experts))
        for index in cutlass.range(thread, self.warps * self.num_experts, self.threads):
            ptx.store_shared(counts + Uint32(index * 4), Int32(0))
        cute.arch.sync_threads()

        share = (num_routes + self.threads - 1) // self.threads * 32
        begin, end = warp * share, cutlass.min(warp * share + share, num_routes)
        for first in cutlass.range(begin, end, 32):
            self.rank(ids, mine, first + lane, end)
        cute.arch.sync_threads()

        total = self.sum_counts(counts)
        own_units = (total + UNIT - 1) // UNIT
        base = self.scan(own_units, bases + Uint32(4 * self.num_experts), units)
        if thread < self.num_experts:
            ptx.store_shared(bases + Uint32(thread * 4), base)
            for index in cutlass.range(own_units):
                record = units + record_offset(base + index)
                ptx.store_global(record, thread)
                for column in cutlass.range_constexpr(UNIT):
                    if index * UNIT + column >= total:
                        ptx.store_global(record + 4 + column * 4, Int32(-1))
        cute.arch.sync_threads()

        for first in cutlass.range(begin, end, 32):
            expert, rank = self.rank(ids, mine, first + lane, end)
            if expert < self.num_experts:
                unit = ptx.load_shared(bases + Uint32(expert * 4)) + rank // UNIT
                ptx.store_global(units + record_offset(unit) + 4 + rank % UNIT * 4, first + lane)

    @cute.jit
    def rank(self, ids: Int64, counts: Uint32, route: Int32, end: Int32):
        """Expert of this lane's route, and its place among the expert's; counts it.

        The expert is `num_experts` where there is no route or its id is out of range.
        """
        expert = Int32(self.num_experts)
        if route < end:
            expert = ptx.load_global(ids + Int64(route) * 4)
            if Uint32(expert) >= Uint32(self.num_experts):
                expert = Int32(self.num_experts)
        peers = Uint32(0xFFFFFFFF)
        for bit in cutlass.range_constexpr(self.num_experts.bit_length()):
            here = (expert >> bit) & 1
            ballot = Uint32(cute.arch.vote_ballot_sync(here != 0))
            peers = peers & (ballot ^ Uint32(here - 1))
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
        return expert, rank

    @cute.jit
    def sum_counts(self, counts: Uint32) -> Int32:
        """Replaces an expert's counts by running totals over warps; returns the whole."""
        thread, _, _ = cute.arch.thread_idx()
        total = Int32(0)
        if thread < self.num_experts:
            for warp in cutlass.range_constexpr(self.warps):
                counter = counts + Uint32(thread * 4 + warp * (4 * self.num_experts))
                count = ptx.load_shared(counter)
                ptx.store_shared(counter, total)
                total += count
        return total

    @cute.jit
    def scan(self, value: Int32, totals: Uint32, units: Int64) -> Int32:
        """Sum of `value` over the threads before this one; the whole sum heads the table."""
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // 32, thread % 32
        running = value
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(running, 1 << step, mask_and_clamp=0)
            if lane >= 1 << step:
                running += below
        if lane == 31:
            ptx.store_shared(totals + Uint32(warp * 4), running)
        cute.arch.sync_threads()
        base = running - value
        for other in cutlass.range(warp):
            base += ptx.load_shared(totals + Uint32(other * 4))
        if thread == self.threads - 1:
            ptx.store_global(units, base + value)
        return base


REPRESENTATIVES = {
    "prepare, few routes": PrepareKernel(num_experts=896, groups=False),
    "prepare and group routes": PrepareKernel(num_experts=896, groups=True),
}
