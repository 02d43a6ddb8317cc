"""What the grouped products find ready: routes sorted by expert, their units, permuted tokens.

Two launches, of which the second does its work while the first is still at its own.

Sorting. The first block cuts each expert's routes evenly into units of at most `widths[-1]`, and
lists them by descending width: the least of `widths` that holds them. Each of the others sorts 1024
routes (token, slot): by expert, and in their own order within an expert. Every block counts the
routes of each expert, and those before its own, so that none waits for another; its own are ranked
within their warp and by running totals over the warps.

Permuting. Tokens are copied with each 64 of K in the order of the packed weights: 16-byte piece q
of the copy holds words q, 8 + q, 16 + q and 24 + q of the 32 that 64 elements are. A block that has
copied waits for the end of the sorting launch, so that whoever waits for this one waits for both.

No block waits for another of its launch, so the kernels cannot hang.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.experts import kernel_wgmma as wgmma
from k3jax.ops.experts.kernel_grouped import NARROW, RECORD_BYTES, WIDE, header_bytes
from k3jax.ops.experts.kernel_prepare import PrepareKernel, scan_block
from k3jax.runtime.program import Kernel

_THREADS = 1024
_LOADS = 8
"""Routes whose ids a thread loads at once."""
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
        for step in cutlass.range_constexpr(_PIECES):
            index = (block * _PIECES + step) * self.threads + thread
            token, piece = index // (self.latent // 8), index % (self.latent // 8)
            if token < num_tokens:
                self.permute(z, permuted, token, piece)
                if cutlass.const_expr(self.clears):
                    self.clear_dropped(ids, rows, token, piece)
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def permute(self, z: Int64, permuted: Int64, token: Int32, piece: Int32):
        """One piece of a token's copy."""
        token = Int64(token) * (2 * self.latent)
        source = z + token + Int64(piece // 8 * wgmma.ROW_BYTES + piece % 8 * 4)
        words = [ptx.load_global(source + 32 * word) for word in range(4)]
        wgmma.store_piece(permuted + token + Int64(piece * 16), words)

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
    """

    num_experts: int
    widths: tuple[int, ...]

    parameters = (
        ("ids", "address"),
        ("order", "address"),
        ("units", "address"),
        ("num_routes", "int32"),
    )
    threads = _THREADS

    @property
    def sorter(self) -> PrepareKernel:
        """The kernel whose ranking of routes this one shares."""
        return PrepareKernel(self.num_experts, groups=True)

    @property
    def shared_bytes(self) -> int:
        """Counts of each warp and expert, of all routes, of earlier routes; totals of each warp."""
        return 4 * ((_THREADS // 32 + 2) * self.num_experts + _THREADS // 32)

    def grid(self, num_routes: int) -> tuple[int, int, int]:
        """A block that lists, then blocks that sort."""
        return 1 + -(-num_routes // _THREADS), 1, 1

    @cute.kernel
    def device(self, ids: Int64, order: Int64, units: Int64, num_routes: Int32):
        """One block of the schedule above."""
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        counts = Uint32(cute.arch.get_dyn_smem(Uint32, alignment=128).toint())
        totals = counts + Uint32(4 * (_THREADS // 32) * self.num_experts)
        for index in cutlass.range(thread, (_THREADS // 32 + 2) * self.num_experts, _THREADS):
            ptx.store_shared(counts + Uint32(index * 4), Int32(0))
        cute.arch.sync_threads()
        if block == 0:
            self.list_units(ids, units, totals, num_routes)
        else:
            self.sort(ids, order, counts, totals, (block - 1) * _THREADS, num_routes)

    @cute.jit
    def sort(self, ids: Int64, order: Int64, counts: Uint32, totals: Uint32, first, num_routes):
        """Places a block's routes, from `first` on."""
        thread, _, _ = cute.arch.thread_idx()
        earlier = totals + Uint32(4 * self.num_experts)
        self.count_routes(ids, totals, earlier, first, num_routes)
        mine = counts + Uint32(thread // 32 * (4 * self.num_experts))
        expert, rank = self.sorter.rank(ids, mine, first + thread, num_routes)
        cute.arch.sync_threads()

        self.sorter.sum_counts(counts)
        base, _ = scan_block(self.total(totals), earlier + Uint32(4 * self.num_experts))
        if thread < self.num_experts:
            start = earlier + Uint32(thread * 4)
            ptx.store_shared(start, ptx.load_shared(start) + base)
        cute.arch.sync_threads()

        if expert < self.num_experts:
            start = ptx.load_shared(earlier + Uint32(expert * 4))
            place = start + ptx.load_shared(mine + Uint32(expert * 4)) + rank
            ptx.store_global(order + Int64(place) * 4, first + thread)

    @cute.jit
    def total(self, totals: Uint32) -> Int32:
        """Routes of this thread's expert, if it has one."""
        thread, _, _ = cute.arch.thread_idx()
        total = Int32(0)
        if thread < self.num_experts:
            total = ptx.load_shared(totals + Uint32(thread * 4))
        return total

    @cute.jit
    def count_routes(self, ids, totals, earlier, first, num_routes):
        """Counts routes of each expert: all, and those before `first`."""
        thread, _, _ = cute.arch.thread_idx()
        for start in cutlass.range(thread, num_routes, _LOADS * _THREADS):
            # All loads first: each would wait for the counting of the one before.
            experts = [
                ptx.load_global(ids + Int64(cutlass.min(route, num_routes - 1)) * 4)
                for route in _every_thread(start)
            ]
            for index, route in enumerate(_every_thread(start)):
                expert = experts[index]
                if (route < num_routes) & (Uint32(expert) < Uint32(self.num_experts)):
                    wgmma.count_shared(totals + Uint32(expert * 4))
                    if route < first:
                        wgmma.count_shared(earlier + Uint32(expert * 4))

    @cute.jit
    def list_units(self, ids: Int64, units: Int64, totals: Uint32, num_routes: Int32):
        """The table: a thread lists its expert's routes in even units of whole eights."""
        thread, _, _ = cute.arch.thread_idx()
        sums = totals + Uint32(4 * 2 * self.num_experts)
        self.count_routes(ids, totals, totals, Int32(0), num_routes)
        cute.arch.sync_threads()
        total = self.total(totals)
        base, _ = scan_block(total, sums)
        widest = self.widths[-1]
        equal = (total + widest - 1) // widest - 1
        size = ((total + equal) // cutlass.max(equal + 1, 1) + 7) // 8 * 8
        rest = total - cutlass.max(equal, 0) * size
        listed = Int32(0)
        for index in cutlass.range_constexpr(len(self.widths)):
            width = self.widths[-1 - index]
            least = (0, *self.widths)[-2 - index]
            equals = Int32(0)
            if (equal > 0) & (size > least) & (size <= width):
                equals = equal
            last = Int32((rest > least) & (rest <= width))
            before, of_width = scan_block(equals + last, sums)
            record = units + header_bytes(self.widths) + Int64(listed + before) * RECORD_BYTES
            for unit in cutlass.range(equals):
                words = (thread, base + unit * size, size, Int32(0))
                wgmma.store_piece(record + Int64(unit * RECORD_BYTES), words)
            if last == 1:
                words = (thread, base + (total - rest), rest, Int32(0))
                wgmma.store_piece(record + Int64(equals * RECORD_BYTES), words)
            listed += of_width
            if thread == 0:
                ptx.store_global(units + 4 * index, listed)


def _every_thread(start):
    """A thread's next routes."""
    return [start + step * _THREADS for step in range(_LOADS)]


REPRESENTATIVES = {
    f"grouped, sort routes, {name}": SortKernel(num_experts=896, widths=shape.widths)
    for name, shape in (("narrow", NARROW), ("wide", WIDE))
} | {
    f"grouped, permute tokens for the {result}": PermuteKernel(
        num_experts=896, latent=3584, top_k=16, clears=clears
    )
    for result, clears in (("sum", False), ("rows", True))
}
