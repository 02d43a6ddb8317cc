"""The tail's memory accesses: words that peers poll, and words of other blocks of a cluster."""

from cutlass import Float32, Int32, Int64, Uint32, cute

from k3jax.runtime.workspace import ARMED

NAN_PAIR = 0x7FFF7FFF
"""What stands for a word that never came."""


def _ptx(text, types=(), *arguments):
    return cute.arch.inline_ptx(text, write_only_types=list(types), read_only_args=list(arguments))


def load_weights(address: Int64):
    """16 bytes that no kernel writes; the L2 fetches 128, the rest being the warp's next loads."""
    return _ptx(
        "ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        [Uint32] * 4,
        address,
    )


def load_if(condition: Int32, address: Int64):
    """16 bytes where the condition is not negative, else zeros and no access."""
    return _ptx(
        "{ .reg .pred p; setp.ge.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; "
        "mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        "@p ld.global.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }",
        [Uint32] * 4,
        address,
        condition,
    )


def load_word(address: Int64) -> Uint32:
    """4 bytes of an operand."""
    return _ptx("ld.global.u32 {$w0}, [{$r0}];", [Uint32], address)


def load_peer_words(address: Int64, offset: int = 0):
    """16 bytes that other blocks or devices write: each word is old or new."""
    return _ptx(
        f"ld.relaxed.sys.global.v4.u32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{offset}];",
        [Uint32] * 4,
        address,
    )


def load_peer_word(address: Int64, offset: int = 0) -> Uint32:
    """4 bytes that other blocks or devices write."""
    return _ptx(f"ld.relaxed.sys.global.u32 {{$w0}}, [{{$r0}}+{offset}];", [Uint32], address)


def load_peer(address: Int64, offset: int, count: int):
    """1 or 4 words that other blocks or devices write."""
    return load_peer_words(address, offset) if count == 4 else [load_peer_word(address, offset)]


def load_address(address: Int64) -> Int64:
    """8 bytes that no kernel writes."""
    return _ptx("ld.global.u64 {$w0}, [{$r0}];", [Int64], address)


def store_peer(address: Int64, words):
    """1 or 4 words that somebody polls, here or on another device."""
    if len(words) == 4:
        store_peer_words(address, words)
    else:
        store_peer_word(address, words[0])


def store_peer_words(address: Int64, words):
    """16 bytes that somebody polls, here or on another device."""
    _ptx("st.relaxed.sys.global.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", (), address, *words)


def store_peer_word(address: Int64, word: Uint32):
    """4 bytes that somebody polls, here or on another device."""
    _ptx("st.relaxed.sys.global.u32 [{$r0}], {$r1};", (), address, word)


def store_multicast(address: Int64, words):
    """1 or 4 words into every memory behind a multicast address."""
    if len(words) == 4:
        vector = "multimem.st.relaxed.sys.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
        _ptx(vector, (), address, *[_as_float(word) for word in words])
    else:
        _ptx("multimem.st.relaxed.sys.global.u32 [{$r0}], {$r1};", (), address, *words)


def _as_float(word: Uint32) -> Float32:
    return _ptx("mov.b32 {$w0}, {$r0};", [Float32], word)


def store_words(address: Int64, words):
    """16 bytes of a result."""
    _ptx("st.global.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", (), address, *words)


def store_shared_words(address: Uint32, words):
    """16 bytes of this block's shared memory."""
    _ptx("st.shared.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", (), address, *words)


def load_shared_address(address: Uint32) -> Int64:
    """8 bytes."""
    return _ptx("ld.shared.u64 {$w0}, [{$r0}];", [Int64], address)


def store_async(address: Uint32, block: Int32, values, barrier: Uint32):
    """1 or 4 float32 into the shared memory of a block of the cluster, counted on its barrier.

    Nobody waits for stores here: a cluster barrier that releases them would wait until all that a
    thread has ever stored, over NVLink too, has arrived.
    """
    vector = ".v4" if len(values) == 4 else ""
    names = ", ".join(f"{{$r{3 + i}}}" for i in range(len(values)))
    _ptx(
        "{ .reg .b32 a, b; mapa.shared::cluster.u32 a, {$r0}, {$r2}; "
        "mapa.shared::cluster.u32 b, {$r1}, {$r2}; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes"
        f"{vector}.f32 [a], {f'{{{names}}}' if vector else names}, [b]; }}",
        (),
        address,
        barrier,
        block,
        *values,
    )


def load_four_floats(address: Uint32):
    """Four float32 of shared memory."""
    return _ptx("ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", [Float32] * 4, address)


def fence_barrier_init():
    """Makes an initialised shared-memory barrier visible to bulk copies."""
    _ptx("fence.mbarrier_init.release.cluster;")


def cluster_arrive():
    """Says that this thread's block has begun; releases nothing but initialised barriers."""
    _ptx("barrier.cluster.arrive.relaxed;")


def cluster_wait():
    """Waits until every thread of the cluster has arrived."""
    _ptx("barrier.cluster.wait.acquire;")


def atomic_add(address: Int64, value: Uint32) -> Uint32:
    """The old word; orders nothing."""
    return _ptx("atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], {$r1};", [Uint32], address, value)


def replace_zero(address: Int64, value: Uint32) -> Uint32:
    """Stores a value where there was zero, and returns what there was."""
    return _ptx(
        "{ .reg .b32 z; mov.b32 z, 0; atom.relaxed.sys.global.cas.b32 {$w0}, [{$r0}], z, {$r1}; }",
        [Uint32],
        address,
        value,
    )


def canonical(word: Uint32) -> Uint32:
    """A bf16 pair with each half of -0 made +0."""
    return _ptx(
        "{ .reg .pred p; .reg .b32 h; and.b32 h, {$r0}, 0xFFFF; setp.eq.u32 p, h, 0x8000; "
        "and.b32 h, {$r0}, 0xFFFF0000; selp.b32 {$w0}, h, {$r0}, p; "
        "and.b32 h, {$w0}, 0xFFFF0000; setp.eq.u32 p, h, 0x80000000; "
        "and.b32 h, {$w0}, 0xFFFF; selp.b32 {$w0}, h, {$w0}, p; }",
        [Uint32],
        word,
    )


def least(word: Uint32, smallest: Int32) -> Int32:
    """The smaller one, as signed: an armed word is the smallest there is."""
    return _ptx("min.s32 {$w0}, {$r0}, {$r1};", [Int32], word, smallest)


def is_armed(word) -> Int32:
    """1 for the word that nobody publishes; a comparison of bits."""
    return _ptx(
        f"{{ .reg .pred p; setp.eq.u32 p, {{$r0}}, {ARMED}; selp.s32 {{$w0}}, 1, 0, p; }}",
        [Int32],
        word,
    )


def nan_if_armed(word: Uint32) -> Uint32:
    """A word that never came, as NaN; any other word as it is."""
    return _ptx(
        f"{{ .reg .pred p; setp.eq.u32 p, {{$r0}}, {ARMED}; selp.b32 {{$w0}}, {NAN_PAIR}, "
        "{$r0}, p; }",
        [Uint32],
        word,
    )


def reciprocal_root(x: Float32) -> Float32:
    """1 / sqrt(x)."""
    return _ptx("rsqrt.approx.f32 {$w0}, {$r0};", [Float32], x)


def warp_sum(value: Float32) -> Float32:
    """The sum over a warp's lanes, the same bits in all of them."""
    for distance in (16, 8, 4, 2, 1):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=distance)
    return value
