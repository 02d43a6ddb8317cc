"""Units: at most 8 routes (token, slot) of one expert, the columns of one matrix instruction.

Where units are many, an earlier launch leaves their table in global memory: a header with their
number, then a record of each, its expert and its routes. Up to 128 routes, each block makes the
table for itself in shared memory: experts, then routes, then id and weight of every route.
"""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.ops.experts.kernel_chunks import zeros

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
_FIRSTS_OFFSET = GAINS_OFFSET + 8 * MAX_BLOCK_ROUTES
BLOCK_TABLE_BYTES = -(-(_FIRSTS_OFFSET + MAX_BLOCK_ROUTES // 8) // 128) * 128
"""The table in shared memory."""


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
    ids: Int64,
    weights: Int64,
    num_routes: Int32,
    num_experts: cutlass.Constexpr,
    max_routes: cutlass.Constexpr,
):
    """Fills a block's table, units in order of their first route, before the block's next barrier.

    Thread r stands for route r: lane r % 32 of a word of 32 routes, that of its warp. Ballots over
    the bits of the experts tell which routes of its word and of earlier ones have its expert. Its
    rank among them tells its unit (every 8 make one) and column; how many firsts of a unit come
    before that unit's first is the unit's number.

    Args:
        table: where the table begins in shared memory.
        ids: address of the routes' experts.
        weights: address of the routes' weights.
        num_routes: of this launch.
        num_experts: ids outside 0 .. num_experts - 1 are dropped.
        max_routes: most of a launch, at most 128 and no more than the block's threads.
    """
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // 32, thread % 32
    words = -(-max_routes // 32)
    ballots, peers = zeros(words, Uint32), zeros(words, Uint32)
    own, rank = Int32(-1), Int32(0)
    if warp < words:
        experts = [
            expert_at(ids, 32 * word + lane, num_routes, num_experts) for word in range(words)
        ]
        weight = Int32(0)
        if thread < num_routes:
            weight = ptx.load_global(weights + Int64(thread) * 4)
        for column in cutlass.range_constexpr(0, UNIT, 4):
            place = table + Uint32(ROUTES_OFFSET + (thread * UNIT + column) * 4)
            ptx.store_shared_4(place, [Int32(-1)] * 4)
        for word in cutlass.range_constexpr(words):
            if word == warp:
                own = experts[word]
        for word in cutlass.range_constexpr(words):
            if word <= warp:
                peers[word] = lanes_with(own, experts[word], num_experts)
                before = peers[word]
                if word == warp:
                    before = before & _below(lane)
                rank += Int32(cute.arch.popc(before))
        ballot = Uint32(cute.arch.vote_ballot_sync((own >= 0) & (rank % UNIT == 0)))
        if lane == 0:
            ptx.store_shared(table + Uint32(_FIRSTS_OFFSET + warp * 4), ballot)
        gain = table + Uint32(GAINS_OFFSET + thread * 8)
        ptx.store_shared(gain, own)
        ptx.store_shared(gain + Uint32(4), weight)
        ballots[0] = ballot
    if cutlass.const_expr(words > 1):
        cute.arch.sync_threads()
        for word in cutlass.range_constexpr(words):
            ballots[word] = Uint32(ptx.load_shared(table + Uint32(_FIRSTS_OFFSET + word * 4)))
    cute.arch.sync_warp()
    if own >= 0:
        unit = _unit_number(peers, ballots, rank // UNIT * UNIT, words)
        if rank % UNIT == 0:
            ptx.store_shared(table + Uint32(unit * 4), own)
        place = ROUTES_OFFSET + (unit * UNIT + rank % UNIT) * 4
        ptx.store_shared(table + Uint32(place), thread)


def count_units(table: Uint32, max_routes: int) -> Int32:
    """How many units `group_block` found, once the block has met at a barrier."""
    total = Int32(0)
    for word in range(-(-max_routes // 32)):
        firsts = ptx.load_shared(table + Uint32(_FIRSTS_OFFSET + word * 4))
        total += Int32(cute.arch.popc(Uint32(firsts)))
    return total


@cute.jit
def _unit_number(
    peers: cute.Tensor, ballots: cute.Tensor, left: Int32, words: cutlass.Constexpr
) -> Int32:
    """How many units begin before that whose first route has `left` peers before it."""
    unit, begun, found = Int32(0), Int32(0), Int32(0)
    for word in cutlass.range_constexpr(words):
        same = peers[word]
        count = Int32(cute.arch.popc(same))
        if (found == 0) & (left < count):
            for _ in cutlass.range(left, unroll=1):
                same = same & (same - Uint32(1))
            lowest = same & (Uint32(0) - same)
            unit = begun + Int32(cute.arch.popc(ballots[word] & (lowest - Uint32(1))))
            found = Int32(1)
        left -= count
        begun += Int32(cute.arch.popc(ballots[word]))
    return unit


def _below(lane):
    """The bits of the lanes below."""
    return (Uint32(1) << Uint32(lane)) - Uint32(1)


@cute.jit
def expert_at(ids: Int64, route: Int32, end: Int32, num_experts: cutlass.Constexpr) -> Int32:
    """Expert of a route, -1 where there is no route or its id is out of range."""
    expert = Int32(-1)
    if route < end:
        loaded = ptx.load_global(ids + Int64(route) * 4)
        if Uint32(loaded) < Uint32(num_experts):
            expert = loaded
    return expert


def lanes_with(own: Int32, numbers: Int32, most: int) -> Uint32:
    """The lanes of the warp whose number, 0 to `most`, is this lane's own: a bit each.

    By a ballot a bit of the number; `match` takes several times as long where lanes differ.
    """
    lanes = Uint32(0xFFFFFFFF)
    for bit in range(most.bit_length()):
        ballot = Uint32(cute.arch.vote_ballot_sync(((numbers >> bit) & 1) != 0))
        lanes = lanes & (ballot ^ (Uint32((own >> bit) & 1) - Uint32(1)))
    return lanes
