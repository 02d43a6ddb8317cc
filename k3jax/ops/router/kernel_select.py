"""Sigmoid, bias, top-k and weights of one token a block.

Candidates are ordered by one 64-bit rank: the biased score as order-preserving bits above, the
complement of the expert's index below. Ranks are distinct and larger is better, so ties go to the
lowest index and every result is determined, whatever the timing. Non-finite logits have score bits
0, below all others; their order is by index, as the specification wants.

1. Each thread sums the slices of its experts' logits in ascending order, scores them and keeps the
   ranks in registers. The best rank of each of 32 groups (index mod 32) goes to shared memory.
2. Warp 0 takes the top_k-th best of the 32 group winners as threshold. Each of these top_k winners
   is an expert of its own, so at least top_k experts reach the threshold, and no expert below it
   can be among the top_k.
3. Experts that reach the threshold (about 20 of 896) are appended to a list in shared memory, in
   whatever order they come, and each finds its place by counting the better ones in the list.
4. Warp 0 turns the top_k scores into weights; the sum is a fixed butterfly.

Waits are block barriers only, reached by all threads, so the kernel cannot hang. Bias, which does
not depend on the previous kernel, is loaded before `griddepcontrol.wait`.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute

from k3jax.runtime.program import Kernel

GROUPS = 32
"""Groups of experts whose winners give the threshold, one a lane."""


class _Shared(NamedTuple):
    """Byte offsets in shared memory."""

    winners: int
    """Best rank of each thread, then of each group."""
    threshold: int
    count: int
    """Entries of the list of candidates."""
    ranks: int
    scores: int
    chosen_ranks: int
    """The top_k, best first."""
    chosen_scores: int
    end: int


@dataclass(frozen=True)
class SelectKernel(Kernel):
    """Chooses experts by sigmoid(logit) + bias and weighs them by sigmoid(logit).

    Attributes:
        num_experts: experts, E.
        top_k: experts a token, at most min(E, 32).
        num_partials: slices that a logit is the sum of; the input is [num_partials, T, E].
        renormalize: whether weights are divided by their sum.
        scaling_factor: factor on the weights.
        experts_per_thread: 1 is fastest for one token, 2 for thousands.
    """

    num_experts: int
    top_k: int
    num_partials: int
    renormalize: bool
    scaling_factor: float
    experts_per_thread: int

    parameters = (
        ("partials", "address"),
        ("bias", "address"),
        ("ids", "address"),
        ("weights", "address"),
        ("num_tokens", "int32"),
    )

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return math.ceil(self.num_experts / (32 * self.experts_per_thread))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def layout(self) -> _Shared:
        """Where things lie in shared memory, 8-byte entries first."""
        sizes = [8 * self.threads, 8, 8, 8 * self.num_experts, 4 * self.num_experts]
        sizes[4] += sizes[4] % 8
        sizes += [8 * self.top_k, 4 * self.top_k]
        return _Shared(*(sum(sizes[:i]) for i in range(len(sizes) + 1)))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self.layout.end

    @cute.jit
    def load_bias(self, bias: Int64):
        """The bias of each expert of this thread; 0 past the last expert."""
        thread, _, _ = cute.arch.thread_idx()
        values = []
        for i in cutlass.range_constexpr(self.experts_per_thread):
            expert = thread + i * self.threads
            value = Float32(0.0)
            if expert < self.num_experts:
                value = _load_global(bias + Int64(expert) * 4)
            values.append(value)
        return values

    @cute.jit
    def load_logits(self, partials: Int64, num_tokens: Int32):
        """The logit of each expert of this thread; NaN past the last expert."""
        thread, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        values = []
        for i in cutlass.range_constexpr(self.experts_per_thread):
            expert = thread + i * self.threads
            value = Float32(float("nan"))
            if expert < self.num_experts:
                first = partials + (Int64(token) * self.num_experts + expert) * 4
                stride = Int64(num_tokens) * (self.num_experts * 4)
                value = _load_global(first)
                for split in cutlass.range_constexpr(1, self.num_partials):
                    value += _load_global(first + split * stride)
            values.append(value)
        return values

    @cute.kernel
    def device(self, partials: Int64, bias: Int64, ids: Int64, weights: Int64, num_tokens: Int32):
        """One token."""
        thread, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        warp, lane = thread // 32, thread % 32
        layout = self.layout
        shared = Uint32(cute.arch.get_dyn_smem(Uint32, alignment=128).toint())
        biases = self.load_bias(bias)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        logits = self.load_logits(partials, num_tokens)

        scores, ranks = [], []
        best = Uint64(0)
        for i in cutlass.range_constexpr(self.experts_per_thread):
            expert = thread + i * self.threads
            score, rank = _score(logits[i], biases[i], expert)
            if expert >= self.num_experts:
                rank = Uint64(0)
            scores.append(score)
            ranks.append(rank)
            best = _larger(best, rank)
        _store_shared64(shared + layout.winners + Uint32(thread * 8), best)
        if thread == 0:
            _store_shared32(shared + layout.count, Uint32(0))
        cute.arch.sync_threads()

        if warp == 0:
            self.find_threshold(shared, lane)
        cute.arch.sync_threads()

        threshold = _load_shared64(shared + layout.threshold)
        for i in cutlass.range_constexpr(self.experts_per_thread):
            if ranks[i] >= threshold:
                self.append(shared, ranks[i], scores[i])
        cute.arch.sync_threads()

        count = Int32(_load_shared32(shared + layout.count))
        for candidate in cutlass.range(thread, count, self.threads):
            self.place(shared, candidate, count)
        cute.arch.sync_threads()

        if warp == 0:
            row = Int64(token) * (self.top_k * 4)
            self.store(shared, lane, ids + row, weights + row)

    @cute.jit
    def find_threshold(self, shared: Uint32, lane: Int32):
        """The top_k-th best of the group winners; lane is the group."""
        winners = shared + self.layout.winners
        best = Uint64(0)
        for warp in cutlass.range_constexpr(self.warps):
            best = _larger(best, _load_shared64(winners + Uint32((warp * 32 + lane) * 8)))
        cute.arch.sync_warp()
        _store_shared64(winners + Uint32(lane * 8), best)
        cute.arch.sync_warp()
        if _count_better(winners, Int32(GROUPS), best) == self.top_k - 1:
            _store_shared64(shared + self.layout.threshold, best)

    @cute.jit
    def append(self, shared: Uint32, rank: Uint64, score: Float32):
        """Adds a candidate to the list."""
        slot = cute.arch.inline_ptx(
            "atom.shared.add.u32 {$w0}, [{$r0}], 1;",
            write_only_types=[Uint32],
            read_only_args=[shared + self.layout.count],
        )
        _store_shared64(shared + self.layout.ranks + slot * 8, rank)
        _store_shared32(shared + self.layout.scores + slot * 4, score.bitcast(Uint32))

    @cute.jit
    def place(self, shared: Uint32, candidate: Int32, count: Int32):
        """Counts the candidates better than this one: its place, if among the top_k."""
        ranks = shared + self.layout.ranks
        rank = _load_shared64(ranks + Uint32(candidate * 8))
        place = _count_better(ranks, count, rank)
        if place < self.top_k:
            score = _load_shared32(shared + self.layout.scores + Uint32(candidate * 4))
            _store_shared64(shared + self.layout.chosen_ranks + Uint32(place * 8), rank)
            _store_shared32(shared + self.layout.chosen_scores + Uint32(place * 4), score)

    @cute.jit
    def store(self, shared: Uint32, lane: Int32, ids: Int64, weights: Int64):
        """Writes the ids and weights of the token, a lane each."""
        chosen = cutlass.min(lane, self.top_k - 1)
        rank = _load_shared64(shared + self.layout.chosen_ranks + Uint32(chosen * 8))
        score = _load_shared32(shared + self.layout.chosen_scores + Uint32(chosen * 4))
        weight = score.bitcast(Float32)
        any_finite = cute.arch.vote_any_sync((rank >> Uint64(32)) != Uint64(0))
        if cutlass.const_expr(self.renormalize):
            total = Float32(0.0)
            if lane < self.top_k:
                total = weight
            for distance in (16, 8, 4, 2, 1):
                total += cute.arch.shuffle_sync_bfly(total, distance)
            weight = _divide(weight, total + Float32(1e-20))
        weight = weight * Float32(self.scaling_factor)
        if not any_finite:
            weight = Float32(1.0 / self.top_k if self.renormalize else 0.0)
        if lane < self.top_k:
            offset = Int64(lane) * 4
            _store_global(ids + offset, ~Uint32(rank & Uint64(0xFFFFFFFF)))
            _store_global(weights + offset, weight.bitcast(Uint32))


def _score(logit, bias, expert):
    """The sigmoid of a logit (0 if not finite) and the rank of its expert."""
    finite = (logit.bitcast(Uint32) & Uint32(0x7FFFFFFF)) < Uint32(0x7F800000)
    score = Float32(cutlass.select_(finite, _sigmoid(logit), Float32(0.0)))
    bits = (score + bias).bitcast(Uint32)
    flip = Uint32(
        cutlass.select_(bits < Uint32(0x80000000), Uint32(0x80000000), Uint32(0xFFFFFFFF))
    )
    key = Uint32(cutlass.select_(finite, bits ^ flip, Uint32(0)))
    return score, (Uint64(key) << Uint64(32)) | Uint64(~Uint32(expert))


_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e4p-1"), float.fromhex("0x1.7f7d1cp-20")
"""ln(2) as a float32 whose products with small integers are exact, plus the float32 rest."""


def _sigmoid(x):
    """1 / (1 + exp(-x)), correctly rounded in all but about one case in a thousand.

    Two experts whose scores lie within a few units in the last place would swap places under a
    sigmoid that is a unit off. So exp and the sum are carried as unevaluated pairs (high + low, a
    good 30 bits), and only the last operation rounds. Scores below the smallest normal float32
    count as 0.
    """
    y = cute.arch.fmin(cute.arch.fmax(-x, Float32(-80.0)), Float32(88.0))
    # exp(y) = 2^n exp(r + r_low), |r| <= ln(2) / 2.
    n = cute.arch.inline_ptx(
        "cvt.rni.s32.f32 {$w0}, {$r0};",
        write_only_types=[Int32],
        read_only_args=[y * Float32(math.log2(math.e))],
    )
    minus_n = -n.to(Float32)
    rest = _fma(minus_n, Float32(_LN2_HIGH), y)
    r = _fma(minus_n, Float32(_LN2_LOW), rest)
    r_low = _fma(minus_n, Float32(_LN2_LOW), rest - r)
    # exp(r + r_low) = 1 + r + r^2 / 2 + small, with small about 2^-7 and correct to 2^-31.
    series = Float32(1 / math.factorial(9))
    for degree in range(8, 2, -1):
        series = _fma(series, r, Float32(1 / math.factorial(degree)))
    square = r * r
    small = _fma(_fma(r, r, -square), Float32(0.5), _fma(r_low, r, _fma(square * r, series, r_low)))
    high, low = _two_sum(Float32(1.0), r)
    high, more = _two_sum(high, square * Float32(0.5))
    scale = ((n + 127) << 23).bitcast(Float32)
    # 1 + exp(-x), then its reciprocal by one Newton step from an approximate one.
    high, more_low = _two_sum(Float32(1.0), high * scale)
    high, low = _two_sum(high, more_low + (low + more + small) * scale)
    guess = cute.arch.inline_ptx(
        "rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[high]
    )
    residual = _fma(-guess, low, _fma(-guess, high, Float32(1.0)))
    score = _fma(guess, residual, guess)
    return Float32(cutlass.select_(x < Float32(-87.33), Float32(0.0), score))


def _two_sum(a, b):
    """a + b as a rounded sum and what rounding lost, whichever is larger."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def _fma(a, b, c):
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def _divide(a, b):
    return cute.arch.inline_ptx(
        "div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


@cute.jit
def _count_better(ranks: Uint32, count: Int32, rank: Uint64):
    """How many of the `count` ranks in shared memory are larger than `rank`."""
    better = Int32(0)
    for i in cutlass.range(count, unroll=8):
        other = _load_shared64(ranks + Uint32(i * 8))
        better += Int32(cutlass.select_(other > rank, Int32(1), Int32(0)))
    return better


def _larger(a, b):
    return Uint64(cutlass.select_(a > b, a, b))


def _load_global(address):
    return cute.arch.inline_ptx(
        "ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


def _store_global(address, value):
    cute.arch.inline_ptx("st.global.u32 [{$r0}], {$r1};", read_only_args=[address, value])


def _load_shared32(address):
    return cute.arch.inline_ptx(
        "ld.shared.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address]
    )


def _load_shared64(address):
    return cute.arch.inline_ptx(
        "ld.shared.u64 {$w0}, [{$r0}];", write_only_types=[Uint64], read_only_args=[address]
    )


def _store_shared32(address, value):
    cute.arch.inline_ptx("st.shared.u32 [{$r0}], {$r1};", read_only_args=[address, value])


def _store_shared64(address, value):
    cute.arch.inline_ptx("st.shared.u64 [{$r0}], {$r1};", read_only_args=[address, value])


REPRESENTATIVES = {
    f"top-16 of 896, {label}": SelectKernel(
        num_experts=896,
        top_k=16,
        num_partials=num_partials,
        renormalize=True,
        scaling_factor=1.0,
        experts_per_thread=experts_per_thread,
    )
    for label, num_partials, experts_per_thread in (("few tokens", 8, 1), ("many tokens", 1, 2))
}
