"""The instructions that the kernels are written in, as functions of addresses and words."""

from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute

CODE_MASK = 0x81C081C0
"""Sign and exponent-mantissa bits of two E2M1 codes placed in a pair of bf16."""
LAST_PAIR_BITS = 0x001B001B
LAST_PAIR_SHIFTS = (1 << 2) + (1 << 7) + (1 << 12)
"""What is left of a word for its fourth pair, and the shifts that bring it into place, as one
multiply: the shifted copies never meet in a bit, so no carry arises."""
ONES = 0x7E807E80
"""A pair of bf16 2^126: brings codes to their values, where the scale needs its own multiply."""

NOT_WRITTEN = 0xFFFFFFFF
"""What no rounded pair of bf16 can be (`round_pair`): marks a word that no block has stored yet."""
ARRIVING_LANES = 1
"""Lanes that arrive at a barrier for their warp, once it has come together: one is enough. A tool
that follows each lane's arrivals apart takes that for a race; for it, kernels are built with 32."""


def _ptx(text, types=(), *arguments):
    return cute.arch.inline_ptx(text, write_only_types=list(types), read_only_args=list(arguments))


def kept(word: Uint32) -> Uint32:
    """The word, which the compiler keeps rather than work it out again wherever it is used."""
    return _ptx("mov.b32 {$w0}, {$r0};", [Uint32], word)


def load_global_4(address: Int64):
    """16 bytes of memory that nothing writes while the kernel runs."""
    return _ptx("ld.global.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", [Uint32] * 4, address)


def load_relaxed_4(address: Int64):
    """16 bytes of memory that other blocks write: each word is some value once written."""
    return _ptx(
        "ld.relaxed.gpu.global.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        [Uint32] * 4,
        address,
    )


def load_global(address: Int64) -> Int32:
    """4 bytes."""
    return _ptx("ld.global.b32 {$w0}, [{$r0}];", [Int32], address)


def load_global_float(address: Int64) -> Float32:
    """One float32."""
    return _ptx("ld.global.f32 {$w0}, [{$r0}];", [Float32], address)


def store_global(address: Int64, word: Uint32):
    """4 bytes."""
    _ptx("st.global.b32 [{$r0}], {$r1};", (), address, word)


def store_global_4(address: Int64, word: Uint32):
    """The same word four times."""
    _ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};", (), address, word)


def store_global_words(address: Int64, words):
    """Four words."""
    _ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", (), address, *words)


def store_relaxed(address: Int64, word: Uint32):
    """4 bytes that other blocks poll."""
    _ptx("st.relaxed.gpu.global.b32 [{$r0}], {$r1};", (), address, word)


def load_shared_4(address: Uint32):
    """16 bytes."""
    return _ptx("ld.shared.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", [Uint32] * 4, address)


def load_shared_volatile_4(address: Uint32):
    """16 bytes, loaded here and nowhere else."""
    return _ptx(
        "ld.volatile.shared.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", [Uint32] * 4, address
    )


def load_shared_2(address: Uint32):
    """8 bytes."""
    return _ptx("ld.shared.v2.u32 {{$w0}, {$w1}}, [{$r0}];", [Uint32] * 2, address)


def load_shared(address: Uint32) -> Int32:
    """4 bytes."""
    return _ptx("ld.shared.b32 {$w0}, [{$r0}];", [Int32], address)


def load_shared_half(address: Uint32) -> Uint32:
    """2 bytes, zero-extended."""
    return _ptx(
        "{ .reg .b16 h; ld.shared.u16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }", [Uint32], address
    )


def load_shared_volatile_half(address: Uint32) -> Uint32:
    """2 bytes, zero-extended, loaded here and nowhere else."""
    return _ptx(
        "{ .reg .b16 h; ld.volatile.shared.u16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }",
        [Uint32],
        address,
    )


def load_shared_float(address: Uint32) -> Float32:
    """One float32."""
    return _ptx("ld.shared.f32 {$w0}, [{$r0}];", [Float32], address)


def load_shared_floats(address: Uint32):
    """Two float32."""
    return _ptx("ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", [Float32] * 2, address)


def load_shared_floats_4(address: Uint32):
    """Four float32."""
    return _ptx("ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", [Float32] * 4, address)


def store_shared(address: Uint32, word):
    """4 bytes."""
    _ptx("st.shared.b32 [{$r0}], {$r1};", (), address, word)


def store_shared_half(address: Uint32, value: Uint32):
    """2 bytes, the low half of a word."""
    _ptx("{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.shared.u16 [{$r0}], h; }", (), address, value)


def store_shared_float(address: Uint32, value: Float32):
    """One float32."""
    _ptx("st.shared.f32 [{$r0}], {$r1};", (), address, value)


def store_shared_4(address: Uint32, words):
    """16 bytes."""
    _ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", (), address, *words)


def store_shared_floats(address: Uint32, low: Float32, high: Float32):
    """Two float32."""
    _ptx("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", (), address, low, high)


def barrier_init(address: Uint32, arrivals: int):
    """A shared-memory barrier whose phases end after `arrivals` arrivals."""
    _ptx("mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", (), address, Int32(arrivals))


def barrier_init_warps(address: Uint32, warps: int):
    """A barrier whose phases end after as many warps have arrived (see `arrives`)."""
    barrier_init(address, warps * ARRIVING_LANES)


def arrives(lane):
    """Whether a lane arrives at a barrier of warps."""
    return lane == 0 if ARRIVING_LANES == 1 else lane < ARRIVING_LANES


def barrier_arrive(address: Uint32):
    """One arrival; releases what this thread did before."""
    _ptx("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", (), address)


@cute.jit
def barrier_arrive_warp(address: Uint32):
    """One arrival for the warp, once it has come together."""
    cute.arch.sync_warp()
    if arrives(cute.arch.lane_idx()):
        barrier_arrive(address)


def barrier_arrive_after(address: Uint32, pairs, arrives):
    """One arrival by the lanes that `arrives` names, once the rounded `pairs` are known.

    An arrival may overtake shared-memory loads issued just before it (seen on H200: a buffer was
    refilled while its last load was on the way), so it is made to depend on what was loaded: no
    rounded pair is `NOT_WRITTEN`.
    """
    _ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r3}, 0; setp.ne.and.b32 p, {$r1}, -1, p; "
        "setp.ne.and.b32 p, {$r2}, -1, p; @p mbarrier.arrive.shared::cta.b64 _, [{$r0}]; }",
        (),
        address,
        *pairs,
        Int32(arrives),
    )


def barrier_expect(address: Uint32, num_bytes: Int32):
    """One arrival, and bytes of bulk copies that the phase waits for."""
    _ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};", (), address, num_bytes)


@cute.jit
def barrier_wait(address: Uint32, parity: Uint32):
    """Returns once the phase of that parity has ended."""
    done = Uint32(0)
    while done == Uint32(0):
        done = _ptx(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; "
            "selp.u32 {$w0}, 1, 0, p; }",
            [Uint32],
            address,
            parity,
        )


def barrier_test(address: Uint32, parity: Uint32) -> Uint32:
    """1 if the phase of that parity has ended, else 0."""
    return _ptx(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; "
        "selp.u32 {$w0}, 1, 0, p; }",
        [Uint32],
        address,
        parity,
    )


def evict_first_policy() -> Uint64:
    """Cache policy of bytes that are read once."""
    return _ptx("createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;", [Uint64])


def evict_last_policy() -> Uint64:
    """Cache policy of bytes that are read soon."""
    return _ptx("createpolicy.fractional.L2::evict_last.b64 {$w0}, 1.0;", [Uint64])


def load_hinted_4(address: Int64, policy: Uint64):
    """16 bytes of memory that nothing writes while the kernel runs."""
    return _ptx(
        "ld.global.L2::cache_hint.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}], {$r1};",
        [Uint32] * 4,
        address,
        policy,
    )


def store_hinted_words(address: Int64, words, policy: Uint64):
    """Four words."""
    _ptx(
        "st.global.L2::cache_hint.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, {$r5};",
        (),
        address,
        *words,
        policy,
    )


def bulk_copy(target: Uint32, source: Int64, num_bytes: Int32, barrier: Uint32, policy: Uint64):
    """Starts a copy of whole 16-byte pieces into shared memory, counted on `barrier`."""
    _ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        (),
        target,
        source,
        num_bytes,
        barrier,
        policy,
    )


def multiply_add(a, b, c):
    """mma.sync m16n8k16: weights a (16 rows) times tokens b (8 columns) plus c, float32."""
    return _ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        [Float32] * 4,
        *a,
        *b,
        *c,
    )


def dequantize(word: Uint32, factor: Uint32):
    """Four bf16 pairs out of a word of eight codes, each times `factor`.

    Masked into place, a code is value * 2^-126: its exponent field is the code's own, and 0.5, the
    format's subnormal, is a subnormal of bf16 too. `factor` carries the missing 2^126.
    """
    turn = "{ .reg .b32 v, f; shf.r.wrap.b32 v, {$r0}, {$r0}, %d; and.b32 v, v, %d; "
    # The move takes a factor that is a constant, which the multiply does not.
    scale = "mov.b32 f, {$r1}; mul.rn.bf16x2 {$w0}, v, f; }"
    first = "{ .reg .b32 v, f; and.b32 v, {$r0}, %d; "
    last = "{ .reg .b32 v, f; and.b32 v, {$r0}, %d; mul.lo.u32 v, v, %d; and.b32 v, v, %d; "
    pairs = (
        first % CODE_MASK,
        turn % (3, CODE_MASK),
        turn % (6, CODE_MASK),
        last % (LAST_PAIR_BITS, LAST_PAIR_SHIFTS, CODE_MASK),
    )
    return [_ptx(place + scale, [Uint32], word, factor) for place in pairs]


def any_lane(word: Uint32) -> Int32:
    """1 if some lane's word is not 0, else 0."""
    return _ptx(
        "{ .reg .pred p; setp.ne.u32 p, {$r0}, 0; vote.sync.any.pred p, p, -1; "
        "selp.s32 {$w0}, 1, 0, p; }",
        [Int32],
        word,
    )


def cluster_arrive():
    """Releases what this thread wrote to the threads of the cluster that wait for all."""
    _ptx("barrier.cluster.arrive.release.aligned;")


def cluster_arrive_relaxed():
    """Arrives for those who wait for all of the cluster; releases nothing."""
    _ptx("barrier.cluster.arrive.relaxed.aligned;")


def cluster_wait():
    """Returns once every thread of the cluster has arrived."""
    _ptx("barrier.cluster.wait.acquire.aligned;")


def load_shared_of(address: Uint32, block: Int32):
    """16 bytes of the shared memory of a block of the cluster."""
    return _ptx(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, {$r1}; "
        "ld.shared::cluster.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [a]; }",
        [Uint32] * 4,
        address,
        block,
    )


def spread_byte(word: Uint32, index: int) -> Uint32:
    """Byte `index` of a word, in both halves."""
    selector = str(0x4040 | index | index << 8)
    return _ptx("prmt.b32 {$w0}, {$r0}, 0, " + selector + ";", [Uint32], word)


def power_of_byte(words, index: int) -> Uint32:
    """A pair of bf16 2^(q - 127) * 2^126, q being byte `index` of some words and at most 127.

    Its exponent is q + 126. The multiply spreads q too: of one by a power of two the compiler makes
    a shift, on the pipe that dequantising fills.
    """
    selector, bias = str(0x4440 | index % 4), str(126 * 0x00800080)
    return _ptx(
        "{ .reg .b32 q; prmt.b32 q, {$r0}, 0, " + selector + "; "
        "mad.lo.u32 {$w0}, q, 0x00800080, " + bias + "; }",
        [Uint32],
        words[index // 4],
    )


def scale_pair(pair: Uint32, factor: Uint32) -> Uint32:
    """A bf16 pair times a bf16 pair."""
    return _ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", [Uint32], pair, factor)


def round_pair(low: Float32, high: Float32) -> Uint32:
    """Two float32 rounded to a bf16 pair; NaN becomes 0x7FFF."""
    return _ptx("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", [Uint32], low, high)


def low_float(pair: Uint32) -> Float32:
    """The low bf16 of a pair."""
    return _ptx("{ .reg .b32 v; shl.b32 v, {$r0}, 16; mov.b32 {$w0}, v; }", [Float32], pair)


def high_float(pair: Uint32) -> Float32:
    """The high bf16 of a pair."""
    return _ptx("{ .reg .b32 v; and.b32 v, {$r0}, 0xFFFF0000; mov.b32 {$w0}, v; }", [Float32], pair)


def fused(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once."""
    return _ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", [Float32], a, b, c)


_LOG2_E = 1.4426950408889634
_LARGE = 2.0**60
"""Past what changes a sum with 1, far from infinity."""


def _exp(x: Float32, factor: float) -> Float32:
    """e^(factor x), to a few ulp of the exponent's error."""
    return _ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", [Float32], x * Float32(factor * _LOG2_E))


def _reciprocal(x: Float32) -> Float32:
    return _ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", [Float32], x)


def _least(x: Float32, limit: float) -> Float32:
    return _ptx("min.NaN.f32 {$w0}, {$r0}, {$r1};", [Float32], x, Float32(limit))


def _if_below(x: Float32, limit: float, if_true: Float32, if_false: Float32) -> Float32:
    """`if_true` where |x| is less than the limit, else (and for NaN) `if_false`."""
    return _ptx(
        "{ .reg .pred p; .reg .f32 a; abs.f32 a, {$r0}; setp.lt.f32 p, a, {$r1}; "
        "selp.f32 {$w0}, {$r2}, {$r3}, p; }",
        [Float32],
        x,
        Float32(limit),
        if_true,
        if_false,
    )


def _capped_near_zero(x: Float32, cap: float) -> Float32:
    """cap tanh(x / cap) to 2e-6 where |x| < cap / 16, where the exponential forms cancel."""
    return x * fused(x * x, Float32(-1 / (3 * cap * cap)), Float32(1.0))


def _capped(x: Float32, cap: float) -> Float32:
    """cap tanh(x / cap)."""
    far = _reciprocal(_exp(x, 2 / cap) + Float32(1.0))
    far = fused(far, Float32(-2 * cap), Float32(cap))
    return _if_below(x, cap / 16, _capped_near_zero(x, cap), far)


def _gated(gate: Float32, beta: float) -> Float32:
    """beta tanh(gate / beta) sigmoid(gate), the quotients of both as one."""
    q = _least(_exp(gate, -2 / beta), _LARGE)
    power = q * q if beta == 4 else _exp(gate, -1.0)  # e^-gate
    above = q + Float32(1.0)
    near = _capped_near_zero(gate, beta) * above
    far = fused(q, Float32(-beta), Float32(beta))
    below = _reciprocal(above * (power + Float32(1.0)))
    return _if_below(gate, beta / 16, near, far) * below


def situ(gate: Float32, up: Float32, beta: float, linear_beta: float | None) -> Float32:
    """beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), to about 1e-5.

    That is little beside the rounding to bfloat16 that follows.
    """
    if linear_beta is not None:
        up = _capped(up, linear_beta)
    return _gated(gate, beta) * up


def load_scales(address, chunks):
    """A lane's scale bytes of a group: two for each chunk."""
    if chunks == 4:
        return list(load_shared_2(address))
    if chunks == 2:
        return [Uint32(load_shared(address))]
    return [load_shared_half(address)]


def scale_byte(scales, index):
    """Scale byte `index` in both halves of a word."""
    return spread_byte(scales[index // 4], index % 4)


@cute.jit
def scale_value(pair: Uint32) -> Uint32:
    """A pair of bf16 2^(q - 127) for q in both halves; NaN for 255."""
    bits = pair << Uint32(7)
    if pair == Uint32(0):
        bits = Uint32(0x00400040)
    if pair == Uint32(0x00FF00FF):
        bits = Uint32(0x7FFF7FFF)
    return bits
