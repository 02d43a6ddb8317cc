"""Units: at most 8 routes (token, slot) of one expert, the columns of one matrix instruction.

Where units are many, an earlier launch leaves their table in global memory: a header with their
number, then a record of each, its expert and its routes. Up to 128 routes, each block makes the
table for itself in shared memory: experts, then routes, then id and weight of every route.
"""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx

UNIT = 8
"""Routes of a unit: columns of the matrix instruction."""
TABLE_HEADER_BYTES = 4 * UNIT
"""Before the units: their number, then nothing."""
UNIT_BYTES = 4 * (1 + UNIT)
"""A unit: its expert, then its routes, -1 where there is none."""

MAX_BLOCK_ROUTES = 128
"""Most routes that a block groups for itself."""
ROUTES_OFFSET = 4 * MAX_BLOCK_ROUTES
GAINS_OFFSET = ROUTES_OFFSET + 4 * UNIT * MAX_BLOCK_ROUTES
BLOCK_TABLE_BYTES = GAINS_OFFSET + 8 * MAX_BLOCK_ROUTES
"""The table in shared memory."""


def scratch_bytes(num_experts: int) -> int:
    """Shared memory that `group_block` works in: counts, then numbers of units."""
    return 16 + 4 * num_experts * (MAX_BLOCK_ROUTES // UNIT)


def table_bytes(num_experts: int, num_routes: int) -> int:
    """Most bytes of the table in global memory, whole pieces of 16."""
    units = min(num_routes, num_experts + num_routes // UNIT)
    return -(-(TABLE_HEADER_BYTES + units * UNIT_BYTES) // 16) * 16


def record_offset(unit):
    """Where a unit stands in the table in global memory."""
    return TABLE_HEADER_BYTES + unit * UNIT_BYTES


@cute.jit
def group_block(
    table: Uint32,
    scratch: Uint32,
    ids: Int64,
    weights: Int64,
    num_routes: Int32,
    num_experts: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> Int32:
    """Fills a block's table, units in order of their first route; returns how many there are.

    Thread r below 128 stands for route r. Its rank among the routes of its expert tells its unit
    (every 8 make one) and column; the first of a unit finds the unit's number by counting the
    firsts before it, and leaves it where the others look it up. The caller synchronises the block
    before it reads the table.

    Args:
        table: where the table begins in shared memory.
        scratch: shared memory, `scratch_bytes` of it.
        ids: address of the routes' experts.
        weights: address of the routes' weights.
        num_routes: at most 128.
        num_experts: ids outside 0 .. num_experts - 1 are dropped.
        threads: of the block, at least 128.
    """
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % 32
    routes, gain = table + Uint32(ROUTES_OFFSET), table + Uint32(GAINS_OFFSET + thread * 8)
    for word in cutlass.range(thread, MAX_BLOCK_ROUTES * UNIT, threads):
        ptx.store_shared(routes + Uint32(word * 4), Int32(-1))
    expert, weight = Int32(-1), Int32(0)
    if thread < num_routes:
        expert = ptx.load_global(ids + Int64(thread) * 4)
        weight = ptx.load_global(weights + Int64(thread) * 4)
    valid = Uint32(expert) < Uint32(num_experts)
    if thread < MAX_BLOCK_ROUTES:
        ptx.store_shared(gain, expert)
        ptx.store_shared(gain + Uint32(4), weight)
    cute.arch.sync_threads()

    rank = Int32(0)
    if thread < MAX_BLOCK_ROUTES:
        rank = _rank(table + Uint32(GAINS_OFFSET), expert, num_routes)
    first = valid & (rank % UNIT == 0)
    ballot = Uint32(cute.arch.vote_ballot_sync(first))
    if (lane == 0) & (thread < MAX_BLOCK_ROUTES):
        ptx.store_shared(scratch + Uint32(thread // 32 * 4), Int32(cute.arch.popc(ballot)))
    cute.arch.sync_threads()

    unit, num_units = Int32(0), Int32(0)
    for other in cutlass.range_constexpr(MAX_BLOCK_ROUTES // 32):
        total = ptx.load_shared(scratch + Uint32(other * 4))
        num_units += total
        if other < thread // 32:
            unit += total
    unit += Int32(cute.arch.popc(ballot & ((Uint32(1) << Uint32(lane)) - Uint32(1))))
    number = scratch + Uint32(16 + (rank // UNIT * num_experts + expert) * 4)
    if first:
        ptx.store_shared(number, unit)
        ptx.store_shared(table + Uint32(unit * 4), expert)
    cute.arch.sync_threads()
    if valid:
        unit = ptx.load_shared(number)
        ptx.store_shared(routes + Uint32((unit * UNIT + rank % UNIT) * 4), thread)
    return num_units


@cute.jit
def _rank(gains: Uint32, expert: Int32, num_routes: Int32) -> Int32:
    """How many routes before this thread's have its expert."""
    thread, _, _ = cute.arch.thread_idx()
    rank = Int32(0)
    for first in cutlass.range(0, num_routes, 4, unroll=4):
        for pair in cutlass.range_constexpr(2):
            others = ptx.load_shared_4(gains + Uint32((first + 2 * pair) * 8))
            for step in cutlass.range_constexpr(2):
                same = Int32(Int32(others[2 * step]) == expert)
                rank += same & Int32(first + 2 * pair + step < thread)
    return rank
