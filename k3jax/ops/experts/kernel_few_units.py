"""Units of a few tokens: the distinct experts, each with the tokens that chose it.

The columns of the matrix instruction are the tokens themselves, so an expert is one unit whatever
chose it, and a token that lists an expert twice has one row for both slots: that of the first, the
row's leading route. One warp makes the table in shared memory, without a barrier:

    number of units | expert and first route of each unit | leading route of each unit and token, or
    -1 | leading route of each route, or -1
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx

_HEADER_BYTES = 16


@dataclass(frozen=True)
class UnitTable:
    """Where everything lies in the table, and how it is made.

    Attributes:
        num_experts: E; ids outside 0 .. E - 1 are dropped.
        top_k: slots a token.
        max_tokens: most tokens of a launch.
    """

    num_experts: int
    top_k: int
    max_tokens: int

    @property
    def max_routes(self) -> int:
        """Most routes, and most units."""
        return self.max_tokens * self.top_k

    @property
    def num_bytes(self) -> int:
        """The whole table."""
        return -(-(self._leading_offset + 4 * self.max_routes) // 128) * 128

    @property
    def _tokens_offset(self) -> int:
        return _HEADER_BYTES + 8 * self.max_routes

    @property
    def _leading_offset(self) -> int:
        return self._tokens_offset + 4 * self.max_routes * self.max_tokens

    def num_units(self, table):
        """How many units there are, the same in all lanes."""
        return cute.arch.make_warp_uniform(ptx.load_shared(table))

    def expert(self, table, unit):
        """The expert of a unit."""
        return ptx.load_shared(table + Uint32(_HEADER_BYTES + unit * 8))

    def first_route(self, table, unit):
        """The first route of a unit."""
        return ptx.load_shared(table + Uint32(_HEADER_BYTES + 4 + unit * 8))

    def route(self, table, unit, token):
        """The leading route of a token that chose the unit's expert, else -1."""
        place = self._tokens_offset + (unit * self.max_tokens + token) * 4
        return ptx.load_shared(table + Uint32(place))

    def leading(self, table, route):
        """The route whose row serves this one, or -1 if its id was dropped."""
        return ptx.load_shared(table + Uint32(self._leading_offset + route * 4))

    @cute.jit
    def make(self, table: Uint32, ids: Int64, num_tokens: Int32):
        """One warp: fills the table. Lane l stands for routes l, 32 + l and so on."""
        lane = cute.arch.lane_idx()
        words = -(-self.max_routes // 32)
        for index in cutlass.range(lane, self.max_routes * self.max_tokens, 32):
            ptx.store_shared(table + Uint32(self._tokens_offset + index * 4), Int32(-1))
        experts = cute.make_rmem_tensor((words,), Int32)
        for word in cutlass.range_constexpr(words):
            experts[word] = self._load_id(ids, lane + 32 * word, num_tokens * self.top_k)
        peers = self._peers(experts, words)
        leaders = cute.make_rmem_tensor((words,), Uint32)
        bases = cute.make_rmem_tensor((words,), Int32)
        num_units = Int32(0)
        for word in cutlass.range_constexpr(words):
            earlier = peers[word * words + word] & _below(lane)
            for other in cutlass.range_constexpr(word):
                earlier = earlier | peers[word * words + other]
            first = (experts[word] >= 0) & (earlier == Uint32(0))
            leaders[word] = Uint32(cute.arch.vote_ballot_sync(first))
            bases[word] = num_units
            num_units += Int32(cute.arch.popc(leaders[word]))
        if lane == 0:
            ptx.store_shared(table, num_units)
        cute.arch.sync_warp()
        for word in cutlass.range_constexpr(words):
            self._store(table, word, experts, peers, leaders, bases)

    @cute.jit
    def _load_id(self, ids: Int64, route: Int32, num_routes: Int32) -> Int32:
        """Expert of a route, -1 where there is none."""
        expert = Int32(-1)
        if route < num_routes:
            loaded = ptx.load_global(ids + Int64(route) * 4)
            if Uint32(loaded) < Uint32(self.num_experts):
                expert = loaded
        return expert

    @cute.jit
    def _peers(self, experts: cute.Tensor, words: cutlass.Constexpr) -> cute.Tensor:
        """For words i and j <= i, the lanes whose word j has the expert of this lane's word i."""
        peers = cute.make_rmem_tensor((words * words,), Uint32)
        for index in cutlass.range_constexpr(words * words):
            peers[index] = Uint32(0xFFFFFFFF)
        for bit in cutlass.range_constexpr(self.num_experts.bit_length()):
            for other in cutlass.range_constexpr(words):
                ballot = Uint32(cute.arch.vote_ballot_sync(((experts[other] >> bit) & 1) != 0))
                for word in cutlass.range_constexpr(other, words):
                    mine = Uint32((experts[word] >> bit) & 1) - Uint32(1)
                    peers[word * words + other] = peers[word * words + other] & (ballot ^ mine)
        return peers

    @cute.jit
    def _store(
        self,
        table: Uint32,
        word: cutlass.Constexpr,
        experts: cute.Tensor,
        peers: cute.Tensor,
        leaders: cute.Tensor,
        bases: cute.Tensor,
    ):
        """What the routes of one word contribute."""
        words = -(-self.max_routes // 32)
        lane = cute.arch.lane_idx()
        route = lane + 32 * word
        token = route // self.top_k
        unit, leading = Int32(0), Int32(-1)
        # Backwards, so that what the earliest peers say stays.
        for step in cutlass.range_constexpr(word + 1):
            other = word - step
            same = peers[word * words + other]
            if same != Uint32(0):
                before = leaders[other] & _below_lowest(same)
                unit = bases[other] + Int32(cute.arch.popc(before))
            start = cutlass.max(token * self.top_k - 32 * other, 0)
            if start < 32:
                own = same >> Uint32(start) << Uint32(start)
                if own != Uint32(0):
                    leading = 32 * other + Int32(cute.arch.popc(_below_lowest(own)))
        if experts[word] < 0:
            leading = Int32(-1)
        if route < self.max_routes:
            ptx.store_shared(table + Uint32(self._leading_offset + route * 4), leading)
        if (leaders[word] & (Uint32(1) << Uint32(lane))) != Uint32(0):
            place = table + Uint32(_HEADER_BYTES + unit * 8)
            ptx.store_shared(place, experts[word])
            ptx.store_shared(place + Uint32(4), route)
        if (leading == route) & (experts[word] >= 0):
            place = self._tokens_offset + (unit * self.max_tokens + token) * 4
            ptx.store_shared(table + Uint32(place), route)


def _below(lane):
    """The bits of the lanes below."""
    return (Uint32(1) << Uint32(lane)) - Uint32(1)


def _below_lowest(bits):
    """The bits below the lowest of some."""
    return (bits & (Uint32(0) - bits)) - Uint32(1)
