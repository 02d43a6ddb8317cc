"""What the grouped products find ready: routes sorted by expert, their units, permuted tokens.

Two launches, of which the second does its work while the first is still at its own.

Sorting. A cluster of eight blocks sorts routes (token, slot) by expert, and in their own order
within an expert: a counting sort. A block has a contiguous eighth of the routes, each of its warps
a contiguous part of that, a lane every 32nd: the warp ranks 32 routes at a time by ballots and
counts its routes of each expert. Running totals over the warps, then over the blocks, whose totals
all read from each other's shared memory, and over the experts turn ranks into places. The first
block cuts each expert's routes evenly into units of at most `widths[-1]`, and lists them by
descending width: the least of `widths` that holds them.

Permuting. Tokens are copied with each 64 of K in the order of the packed weights: 16-byte piece q
of the copy holds words q, 8 + q, 16 + q and 24 + q of the 32 that 64 elements are. A block that has
copied waits for the end of the sorting launch, so that whoever waits for this one waits for both.

Blocks of the cluster, which is resident as a whole, wait for each other: for their totals, and, at
the end, until theirs have been read. No other block waits for one of its launch, so the kernels
cannot hang.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.experts import kernel_wgmma as wgmma
from k3jax.ops.experts.kernel_grouped import NARROW, RECORD_BYTES, WIDE, header_bytes
from k3jax.ops.experts.kernel_prepare import counted_expert, scan_block
from k3jax.ops.experts.kernel_units import lanes_with
from k3jax.runtime.program import Kernel

_BLOCKS = 8
"""Blocks of the cluster that sorts: as many as every device with clusters takes."""
_THREADS = 1024
_WARPS = _THREADS // 32
_PITCH = 2 * _WARPS + 16
"""Bytes from the counts of an expert to the next one's, so that no bank is met twice."""
_PERMUTE_THREADS = 256
_PIECES = 4
"""16-byte pieces that a thread copies."""


@dataclass(frozen=True)
class PermuteKernel(Kernel):
    """Copies the tokens in the order of K that the products read.

    Attributes:
        num_experts: E; ids outside 0 .. E - 1 are dropped.
        latent: L, a multiple of 64.
        top_k: slots a token.
        clears: whether to write zeros to the rows of dropped routes.
    """

    num_experts: int
    latent: int
    top_k: int
    clears: bool

    parameters = (
        ("z", "address"),
        ("ids", "address"),
        ("permuted", "address"),
        ("rows", "address"),
        ("num_tokens", "int32"),
    )
    threads = _PERMUTE_THREADS

    def grid(self, num_tokens: int) -> tuple[int, int, int]:
        """Blocks of a launch."""
        return -(-num_tokens * (self.latent // 8) // (_PIECES * self.threads)), 1, 1

    @cute.kernel
    def device(self, z: Int64, ids: Int64, permuted: Int64, rows: Int64, num_tokens: Int32):
        """One block of the schedule above."""
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first = block * (_PIECES * self.threads) + thread
        places = [self.place(first + step * self.threads) for step in range(_PIECES)]
        # All loads first: each would wait for the store of the one before.
        words = [self.load(z, cutlass.min(token, num_tokens - 1), at) for token, at in places]
        for step in cutlass.range_constexpr(_PIECES):
            token, piece = places[step]
            if token < num_tokens:
                target = permuted + Int64(token) * (2 * self.latent) + Int64(piece * 16)
                wgmma.store_piece(target, words[step])
                if cutlass.const_expr(self.clears):
                    self.clear_dropped(ids, rows, token, piece)
        cute.arch.griddepcontrol_wait()

    def place(self, index):
        """Token and piece of a copy."""
        return index // (self.latent // 8), index % (self.latent // 8)

    def load(self, z, token, piece):
        """One piece of a token's copy."""
        source = z + Int64(token) * (2 * self.latent)
        source += Int64(piece // 8 * wgmma.ROW_BYTES + piece % 8 * 4)
        return [ptx.load_global(source + 32 * word) for word in range(4)]

    @cute.jit
    def clear_dropped(self, ids: Int64, rows: Int64, token: Int32, piece: Int32):
        """Zeros in one piece of the rows of the token's dropped routes."""
        for slot in cutlass.range(self.top_k):
            route = Int64(token) * self.top_k + slot
            if Uint32(ptx.load_global(ids + route * 4)) >= Uint32(self.num_experts):
                target = rows + route * (2 * self.latent) + Int64(piece * 16)
                ptx.store_global_4(target, Uint32(0))


@dataclass(frozen=True)
class SortKernel(Kernel):
    """Fills the sorted routes and the unit table.

    Attributes:
        num_experts: E, at most 1024; ids outside 0 .. E - 1 are dropped.
        widths: those of the products.
        max_routes: most routes of a launch.
    """

    num_experts: int
    widths: tuple[int, ...]
    max_routes: int

    parameters = (
        ("ids", "address"),
        ("order", "address"),
        ("units", "address"),
        ("num_routes", "int32"),
    )
    threads = _THREADS
    cluster = (_BLOCKS, 1, 1)

    @property
    def groups(self) -> int:
        """Clusters, which all count but share the placing."""
        return min(self.rounds, _BLOCKS)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of a launch."""
        return _BLOCKS * self.groups, 1, 1

    @property
    def rounds(self) -> int:
        """Routes of a thread."""
        return -(-self.max_routes // (_BLOCKS * _THREADS))

    @property
    def scans(self) -> int:
        """Words that are summed over the experts: routes, and units of two widths in each."""
        return 1 + -(-len(self.widths) // 2)

    @property
    def pieces(self) -> int:
        """16-byte pieces of the totals of a block, two bytes an expert."""
        return -(-self.num_experts // 8)

    @property
    def totals_offset(self) -> int:
        """Shared memory of the block's routes of each expert, after the counts of each warp."""
        return _PITCH * self.num_experts

    @property
    def gathered_offset(self) -> int:
        """Shared memory of a copy of the totals of all blocks."""
        return self.totals_offset + 16 * self.pieces

    @property
    def starts_offset(self) -> int:
        """Shared memory of the place of an expert's first route of the block."""
        return self.gathered_offset + _BLOCKS * 16 * self.pieces

    @property
    def sums_offset(self) -> int:
        """Shared memory of the sums over threads."""
        return self.starts_offset + 4 * self.num_experts

    @property
    def shared_bytes(self) -> int:
        """Everything."""
        return self.sums_offset + 4 * _WARPS * self.scans

    @cute.kernel
    def device(self, ids: Int64, order: Int64, units: Int64, num_routes: Int32):
        """One block of the schedule above."""
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        group, block = block // _BLOCKS, block % _BLOCKS
        thread, _, _ = cute.arch.thread_idx()
        shared = Uint32(cute.arch.get_dyn_smem(Uint32, alignment=128).toint())
        mine = shared + Uint32(thread * _PITCH)
        totals = shared + Uint32(self.totals_offset)
        starts = shared + Uint32(self.starts_offset)
        warp, lane = thread // 32, thread % 32
        first = (block * _WARPS + warp) * (32 * self.rounds) + lane
        experts = [
            counted_expert(ids, first + 32 * turn, num_routes, self.num_experts)
            for turn in range(self.rounds)
        ]
        for offset in cutlass.range(thread * 16, self.totals_offset, _THREADS * 16):
            wgmma.clear_piece(shared + Uint32(offset))
        cute.arch.sync_threads()
        # Expert and rank share a word, for want of registers where routes are many.
        routes = [expert | (self.rank(shared, expert) << 16) for expert in experts]
        cute.arch.sync_threads()

        if thread < 8 * self.pieces:
            ptx.store_shared_half(totals + Uint32(thread * 2), self.sum_counts(mine))
        ptx.cluster_arrive()
        ptx.cluster_wait()
        total, earlier = self.sum_blocks(shared, block)
        equal, size = self.cut(total)
        counts = [total, *self.count_units(total, equal, size)]
        before, wholes = scan_block(counts, shared + Uint32(self.sums_offset))
        if thread < self.num_experts:
            ptx.store_shared(starts + Uint32(thread * 4), before[0] + earlier)
        # What was read of the other blocks has been used: nothing needs to be released.
        ptx.cluster_arrive_relaxed()
        cute.arch.sync_threads()
        for turn in cutlass.range_constexpr(self.rounds):
            expert, rank = routes[turn] & 0xFFFF, routes[turn] >> 16
            if (expert < self.num_experts) & (turn % self.groups == group):
                place = ptx.load_shared(starts + Uint32(expert * 4)) + rank
                place += Int32(ptx.load_shared_half(self.counter(shared, expert)))
                ptx.store_global(order + Int64(place) * 4, first + 32 * turn)
        if (group == 0) & (thread // (_THREADS // _BLOCKS) == block):
            self.list_units(units, (total, equal, size), before, wholes)
        # Others may still read this block's totals.
        ptx.cluster_wait()

    def counter(self, shared, expert):
        """Where this warp's routes of an expert are counted."""
        thread, _, _ = cute.arch.thread_idx()
        return shared + Uint32(expert * _PITCH + thread // 32 * 2)

    @cute.jit
    def rank(self, shared: Uint32, expert: Int32) -> Int32:
        """How many routes of the warp before this lane's have its expert; counts them."""
        lane = cute.arch.lane_idx()
        counter, peers = self.counter(shared, expert), lanes_with(expert, expert, self.num_experts)
        below = peers & ((Uint32(1) << Uint32(lane)) - Uint32(1))
        rank = Int32(cute.arch.popc(below))
        counted = expert < self.num_experts
        leads = counted & (below == Uint32(0))
        if counted:
            rank += Int32(ptx.load_shared_half(counter))
        cute.arch.sync_warp()
        if leads:
            ptx.store_shared_half(counter, Uint32(rank + Int32(cute.arch.popc(peers))))
        cute.arch.sync_warp()
        return rank

    @cute.jit
    def sum_counts(self, mine: Uint32) -> Uint32:
        """Replaces an expert's counts by running totals over warps; returns the whole."""
        thread, _, _ = cute.arch.thread_idx()
        total = Uint32(0)
        if thread < self.num_experts:
            pieces = [mine + Uint32(16 * piece) for piece in range(_WARPS // 8)]
            counts = [ptx.load_shared_4(piece) for piece in pieces]
            for piece, pairs in zip(pieces, counts, strict=True):
                words = []
                for pair in pairs:
                    words.append(total * Uint32(0x10001) + (pair << Uint32(16)))
                    total += (pair & Uint32(0xFFFF)) + (pair >> Uint32(16))
                ptx.store_shared_4(piece, words)
        return total

    @cute.jit
    def sum_blocks(self, shared: Uint32, block: Int32):
        """Routes of this thread's expert: all, and those of earlier blocks."""
        thread, _, _ = cute.arch.thread_idx()
        totals = shared + Uint32(self.totals_offset)
        gathered = shared + Uint32(self.gathered_offset)
        if thread < _BLOCKS * self.pieces:
            piece = totals + Uint32(thread % self.pieces * 16)
            words = ptx.load_shared_of(piece, thread // self.pieces)
            ptx.store_shared_4(gathered + Uint32(thread * 16), words)
        cute.arch.sync_threads()
        total, earlier = Int32(0), Int32(0)
        if thread < self.num_experts:
            for other in cutlass.range_constexpr(_BLOCKS):
                here = gathered + Uint32(other * 16 * self.pieces + thread * 2)
                routes = Int32(ptx.load_shared_half(here))
                total += routes
                earlier += routes * Int32(other < block)
        return total, earlier

    @cute.jit
    def cut(self, total: Int32):
        """How many equal units of whole eights come before an expert's last, and their size."""
        units = cutlass.max((Uint32(total) + self.widths[-1] - 1) // self.widths[-1], 1)
        size = ((Uint32(total) + units - 1) // units + 7) // 8 * 8
        return Int32(units) - 1, Int32(size)

    @cute.jit
    def count_units(self, total: Int32, equal: Int32, size: Int32):
        """An expert's units of each width, widest first, two widths a word."""
        rest = total - equal * size
        counts = [Int32(0)] * (self.scans - 1)
        for index in cutlass.range_constexpr(len(self.widths)):
            count = Int32(self.has_width(rest, index))
            if self.has_width(size, index):
                count += equal
            counts[index // 2] = counts[index // 2] + (count << (index % 2 * 16))
        return counts

    def has_width(self, routes, index):
        """Whether units of that many routes have the `index`-th widest width."""
        width, less = self.widths[-1 - index], (0, *self.widths)[-2 - index]
        return (routes > less) & (routes <= width)

    @cute.jit
    def list_units(self, units: Int64, expert, before, wholes):
        """The table: a thread lists its expert's routes, `expert` as (total, equal, size)."""
        thread, _, _ = cute.arch.thread_idx()
        total, equal, size = expert
        rest = total - equal * size
        # Where the equal units go, and the last: without a branch for each width.
        place, last, listed = Int32(0), Int32(0), Int32(0)
        for index in cutlass.range_constexpr(len(self.widths)):
            word, shift = 1 + index // 2, index % 2 * 16
            here = listed + (before[word] >> shift & 0xFFFF)
            equals = Int32(self.has_width(size, index))
            place += here * equals
            last += (here + equal * equals) * Int32(self.has_width(rest, index))
            listed += wholes[word] >> shift & 0xFFFF
            if thread == 0:
                ptx.store_global(units + 4 * index, listed)
        table = units + header_bytes(self.widths)
        for unit in cutlass.range(equal):
            record = table + Int64(place + unit) * RECORD_BYTES
            wgmma.store_piece(record, (thread, before[0] + unit * size, size, Int32(0)))
        if rest > 0:
            record = table + Int64(last) * RECORD_BYTES
            wgmma.store_piece(record, (thread, before[0] + equal * size, rest, Int32(0)))


REPRESENTATIVES = {
    f"grouped, sort routes, {name}": SortKernel(
        num_experts=896, widths=shape.widths, max_routes=routes
    )
    for name, shape, routes in (("narrow", NARROW, 8192), ("wide", WIDE, 131072))
} | {
    f"grouped, permute tokens for the {result}": PermuteKernel(
        num_experts=896, latent=3584, top_k=16, clears=clears
    )
    for result, clears in (("sum", False), ("rows", True))
}
