"""Barriers of every kind, the race detector, and what happens when they are misused."""

import numpy as np
import pytest

from tests.emulator import BarrierError, DeadlockError, GlobalMemory, RaceError
from tests.emulator_tests.harness import kernel, run

EXCHANGE = """
\tmul.lo.u32 %r0, %thread, 4;
\tadd.u32 %r0, %r0, %sm;
\tst.shared.b32 [%r0], %thread;
{between}
\txor.b32 %r1, %thread, 32;
\tmul.lo.u32 %r1, %r1, 4;
\tadd.u32 %r1, %r1, %sm;
\tld.shared.b32 %r2, [%r1];
\tmad.lo.u32 %r3, %block, 128, %thread;
\tmul.wide.u32 %d0, %r3, 4;
\tadd.u64 %d0, %d0, %pa0;
\tst.global.b32 [%d0], %r2;
"""


def exchange(between, grid=3, after="", **options):
    memory = GlobalMemory()
    out = memory.allocate("out", 4 * 128 * grid)
    code = EXCHANGE.format(between=between) + after
    run(kernel(code, ["u64"]), 128, [out], memory, grid=grid, shared=1024, **options)
    return memory.contents(out, 512 * grid)[0].view("u4").reshape(grid, 128)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize(
    "barrier",
    ["\tbar.sync 0;", "\tbarrier.cta.sync.aligned 3;", "\tbar.sync 1, 128;", "\tbarrier.sync 2;"],
)
def test_block_barrier_orders(barrier, seed):
    np.testing.assert_array_equal(exchange(barrier, seed=seed), [np.arange(128) ^ 32] * 3)


@pytest.mark.parametrize("seed", [None, 5])
def test_missing_barrier_is_a_race(seed):
    with pytest.raises(RaceError, match=r"reads what warp|overwrites what warp|never"):
        exchange("", seed=seed, after="\tbar.sync 0;")


def test_missing_barrier_before_the_buffer_is_used_again():
    again = "\tst.shared.b32 [%r0], 7;"
    with pytest.raises(RaceError, match="overwrites what warp"):
        exchange("\tbar.sync 0;", after=again)
    exchange("\tbar.sync 0;", after="\tbar.sync 0;\n" + again)


def test_pairs_of_warps_on_their_own_barriers():
    """Named barriers of 64 threads, one for each pair that exchanges."""
    code = "\tshr.u32 %r9, %thread, 6;\n\tadd.u32 %r9, %r9, 1;\n\tbar.sync %r9, 64;"
    np.testing.assert_array_equal(exchange(code), [np.arange(128) ^ 32] * 3)


def test_producer_arrives_consumer_waits():
    """Warp 0 produces and arrives without waiting; warp 1 waits."""
    code = """
\tsetp.ne.u32 %p0, %warp, 0;
\tmul.lo.u32 %r0, %lane, 4;
\tadd.u32 %r0, %r0, %sm;
\t@%p0 bra CONSUME;
\tst.shared.b32 [%r0], %lane;
\tbar.arrive 4, 64;
\tbra END;
CONSUME:
\tbar.sync 4, 64;
\tld.shared.b32 %r1, [%r0];
\tmul.wide.u32 %d0, %lane, 4;
\tadd.u64 %d0, %d0, %pa0;
\tst.global.b32 [%d0], %r1;
END:"""
    memory = GlobalMemory()
    out = memory.allocate("out", 128)
    run(kernel(code, ["u64"]), 64, [out], memory, shared=128)
    np.testing.assert_array_equal(memory.contents(out, 128)[0].view("u4"), np.arange(32))


def test_bytes_of_one_word_do_not_race():
    """Two warps write different bytes of the same words."""
    code = """
\tmul.lo.u32 %r0, %lane, 4;
\tadd.u32 %r0, %r0, %sm;
\tadd.u32 %r1, %r0, %warp;
\tst.shared.b8 [%r1], %thread;
\tbar.sync 0;
\tld.shared.u16 %r2, [%r0];
\tmul.wide.u32 %d0, %lane, 4;
\tadd.u64 %d0, %d0, %pa0;
\tst.global.b32 [%d0], %r2;"""
    memory = GlobalMemory()
    out = memory.allocate("out", 128)
    run(kernel(code, ["u64"]), 64, [out], memory, shared=128)
    lanes = np.arange(32)
    np.testing.assert_array_equal(
        memory.contents(out, 128)[0].view("u4"), lanes | (lanes + 32) << 8
    )


MISUSES = {
    "a warp that never comes": (
        "\tsetp.eq.u32 %p0, %warp, 1;\n\t@%p0 ret;\n\tbar.sync 0;",
        DeadlockError,
        r"barrier 0: 32 of 64 threads arrived \(warps \[0\]\)",
    ),
    "two different counts": (
        "\tsetp.eq.u32 %p0, %warp, 1;\n\t@%p0 bra B;\n\tbar.sync 1, 64;\n\tret;\n"
        "B:\n\tbar.sync 1, 96;",
        BarrierError,
        "different thread counts",
    ),
    "arriving twice": (
        "\tbar.arrive 1, 128;\n\tbar.arrive 1, 128;",
        BarrierError,
        "arrives twice",
    ),
    "half a warp at an aligned barrier": (
        "\tsetp.lt.u32 %p0, %lane, 16;\n\t@%p0 bra B;\n\tbar.sync 1;\n\tret;\nB:\n\tbar.sync 2;",
        DeadlockError,
        "waits for lanes",
    ),
    "barrier 16": ("\tbar.sync 16;", BarrierError, "barrier 16 of 16"),
    "no mbarrier there": (
        "\tmbarrier.arrive.shared.b64 %d0, [%sm];",
        BarrierError,
        "no mbarrier at shared memory of block 0",
    ),
    "initialised twice": (
        "\tsetp.ne.u32 %p0, %thread, 0;\n\t@%p0 ret;\n\tmbarrier.init.shared.b64 [%sm], 1;\n"
        "\tmbarrier.init.shared.b64 [%sm], 1;",
        BarrierError,
        "live mbarrier",
    ),
    "too many arrivals": (
        "\tsetp.ne.u32 %p0, %warp, 0;\n\t@%p0 ret;\n\tsetp.eq.u32 %p0, %thread, 0;\n"
        "\t@%p0 mbarrier.init.shared.b64 [%sm], 5;\n\tbar.warp.sync -1;\n"
        "\tmbarrier.arrive.shared.b64 %d0, [%sm];",
        BarrierError,
        "more arrivals than the 5",
    ),
    "an arrival too few": (
        "\tsetp.eq.u32 %p0, %thread, 0;\n\t@%p0 mbarrier.init.shared.b64 [%sm], 65;\n"
        "\tbar.sync 0;\n"
        "\tmbarrier.arrive.shared.b64 %d0, [%sm];\nW:\n"
        "\tmbarrier.try_wait.parity.shared.b64 %p1, [%sm], 0;\n\t@!%p1 bra W;",
        DeadlockError,
        "phase 0 lacks 1 of 65 arrivals",
    ),
    "data where an mbarrier lies": (
        "\tsetp.ne.u32 %p0, %thread, 0;\n\t@%p0 ret;\n\tmbarrier.init.shared.b64 [%sm], 1;\n"
        "\tst.shared.b32 [%sm], 1;",
        Exception,
        "shared memory of block 0",
    ),
    "waiting at the cluster barrier without arriving": (
        "\tbarrier.cluster.wait;",
        BarrierError,
        "without arriving",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    code, error, message = MISUSES[name]
    with pytest.raises(error, match=message):
        run(kernel(code, []), 64, [], GlobalMemory(), shared=256, patience=20)


RING = """
\tsetp.eq.u32 %p0, %thread, 0;
\t@!%p0 bra READY;
\tmbarrier.init.shared::cta.b64 [%sm], 1;
\tmbarrier.init.shared::cta.b64 [%sm+8], 1;
\tmbarrier.init.shared::cta.b64 [%sm+16], 32;
\tmbarrier.init.shared::cta.b64 [%sm+24], 32;
READY:
\tbar.sync 0;
\tmov.b32 %r0, 0;
\tsetp.eq.u32 %p1, %warp, 0;
LOOP:
\tand.b32 %r1, %r0, 1;
\tshr.u32 %r2, %r0, 1;
\tand.b32 %r2, %r2, 1;
\tmad.lo.u32 %r3, %r1, 8, %sm;
\tmad.lo.u32 %r4, %r1, 128, %sm;
\tmad.lo.u32 %r4, %lane, 4, %r4;
\t@!%p1 bra CONSUME;
\txor.b32 %r5, %r2, 1;
PW:
\tmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3+16], %r5;
\t@!%p2 bra PW;
\tmad.lo.u32 %r6, %r0, 100, %lane;
\tst.shared.b32 [%r4+64], %r6;
\tbar.warp.sync -1;
\tsetp.eq.u32 %p3, %lane, 0;
\t{signal}
\tbra NEXT;
CONSUME:
CW:
\t{wait}
\tld.shared.b32 %r6, [%r4+64];
\tmbarrier.arrive.shared::cta.b64 %d1, [%r3+16];
\tmad.lo.u32 %r7, %r0, 32, %lane;
\tmul.wide.u32 %d0, %r7, 4;
\tadd.u64 %d0, %d0, %pa0;
\tst.global.b32 [%d0], %r6;
NEXT:
\tadd.u32 %r0, %r0, 1;
\tsetp.lt.u32 %p4, %r0, 7;
\t@%p4 bra LOOP;
"""
SIGNAL = "@%p3 mbarrier.arrive.release.cta.shared::cta.b64 %d1, [%r3];"
WAIT = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], %r2;\n\t@!%p2 bra CW;"


def ring(signal=SIGNAL, wait=WAIT, **options):
    memory = GlobalMemory()
    out = memory.allocate("out", 7 * 128)
    code = RING.replace("{signal}", signal).replace("{wait}", wait)
    run(kernel(code, ["u64"]), 64, [out], memory, shared=1024, patience=50, **options)
    return memory.contents(out, 7 * 128)[0].view("u4").reshape(7, 32)


@pytest.mark.parametrize("seed", [None, 1, 2, 3, 4])
def test_ring_of_mbarriers(seed):
    want = np.arange(7)[:, None] * 100 + np.arange(32)
    np.testing.assert_array_equal(ring(seed=seed), want)


def test_test_wait_spins():
    wait = WAIT.replace("try_wait", "test_wait")
    np.testing.assert_array_equal(ring(wait=wait)[:, 0], np.arange(7) * 100)


@pytest.mark.parametrize("seed", [None, 1])
def test_ring_with_a_dropped_wait(seed):
    with pytest.raises((RaceError, BarrierError)):
        ring(wait="", seed=seed)


def test_ring_with_a_dropped_signal():
    with pytest.raises(DeadlockError, match=r"phase 0 lacks 1 of 1 arrivals"):
        ring(signal="")


def test_waiting_for_a_token():
    code = """
\tsetp.eq.u32 %p0, %thread, 0;
\t@%p0 mbarrier.init.shared.b64 [%sm], 64;
\tbar.sync 0;
\tmul.lo.u32 %r0, %thread, 4;
\tadd.u32 %r0, %r0, %sm;
\tst.shared.b32 [%r0+64], %thread;
\tmbarrier.arrive.shared.b64 %d0, [%sm];
W:
\tmbarrier.try_wait.shared.b64 %p1, [%sm], %d0, 1000;
\t@!%p1 bra W;
\txor.b32 %r1, %r0, 128;
\tmul.lo.u32 %r1, %thread, 4;
\txor.b32 %r1, %r1, 128;
\tadd.u32 %r1, %r1, %sm;
\tld.shared.b32 %r2, [%r1+64];
\tmul.wide.u32 %d1, %thread, 4;
\tadd.u64 %d1, %d1, %pa0;
\tst.global.b32 [%d1], %r2;"""
    memory = GlobalMemory()
    out = memory.allocate("out", 256)
    run(kernel(code, ["u64"]), 64, [out], memory, shared=512)
    np.testing.assert_array_equal(memory.contents(out, 256)[0].view("u4"), np.arange(64) ^ 32)


def test_flag_in_shared_memory_orders():
    """A volatile flag published after a fence: the detector takes it as order."""
    code = """
\tsetp.eq.u32 %p0, %thread, 0;
\t@%p0 st.shared.b32 [%sm], 0;
\tbar.sync 0;
\tsetp.eq.u32 %p1, %warp, 0;
\tmul.lo.u32 %r0, %lane, 4;
\tadd.u32 %r0, %r0, %sm;
\t@!%p1 bra W;
\tst.shared.b32 [%r0+64], %lane;
\tmembar.cta;
\tbar.warp.sync -1;
\t@%p0 st.volatile.shared.b32 [%sm], 1;
\tret;
W:
\tld.volatile.shared.b32 %r1, [%sm];
\tsetp.eq.u32 %p2, %r1, 0;
\t@%p2 bra W;
\tld.shared.b32 %r2, [%r0+64];
\tmul.wide.u32 %d1, %lane, 4;
\tadd.u64 %d1, %d1, %pa0;
\tst.global.b32 [%d1], %r2;"""
    memory = GlobalMemory()
    out = memory.allocate("out", 128)
    run(kernel(code, ["u64"]), 64, [out], memory, shared=512)
    np.testing.assert_array_equal(memory.contents(out, 128)[0].view("u4"), np.arange(32))


WITHIN = """
\tsetp.eq.u32 %p0, %thread, 0;
\t@%p0 mbarrier.init.shared.b64 [%sm], 1;
\tbar.sync 0;
\tmad.lo.u32 %r0, %lane, 4, %sm;
\tsetp.eq.u32 %p1, %warp, 0;
\t@!%p1 bra WAIT;
\tst.shared.b32 [%r0+64], %lane;
\t{order}
\t@%p0 mbarrier.arrive.shared.b64 %d0, [%sm];
\tret;
WAIT:
\tmbarrier.try_wait.parity.shared.b64 %p2, [%sm], 0;
\t@!%p2 bra WAIT;
\tld.shared.b32 %r1, [%r0+64];
\tmul.wide.u32 %d1, %lane, 4;
\tadd.u64 %d1, %d1, %pa0;
\tst.global.b32 [%d1], %r1;"""


def within(order):
    memory = GlobalMemory()
    out = memory.allocate("out", 128)
    run(kernel(WITHIN.replace("{order}", order), ["u64"]), 64, [out], memory, shared=512)
    return memory.contents(out, 128)[0].view("u4")


def test_one_lane_arrives_for_its_warp():
    np.testing.assert_array_equal(within("bar.warp.sync -1;"), np.arange(32))


def test_one_lane_arrives_without_a_warp_barrier():
    with pytest.raises(RaceError, match="lane 1 reads what warp 0"):
        within("")


SWAP = """
\tmad.lo.u32 %r0, %lane, 4, %sm;
\tst.shared.b32 [%r0], %lane;
\t{first}
\txor.b32 %r1, %r0, 4;
\tld.shared.b32 %r2, [%r1];
\t{second}
\tst.shared.b32 [%r0], %r2;"""


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [("", "bar.warp.sync -1;", "reads what lane 1 of the same warp wrote"),
     ("bar.warp.sync -1;", "", "overwrites what lane 1 of the same warp read"),
     ("bar.warp.sync -1;", "bar.warp.sync -1;", None)],
)  # fmt: skip
def test_lanes_of_one_warp(first, second, message):
    text = kernel(SWAP.replace("{first}", first).replace("{second}", second), [])
    if message is None:
        run(text, 32, [], GlobalMemory(), shared=128)
        return
    with pytest.raises(RaceError, match=message):
        run(text, 32, [], GlobalMemory(), shared=128)
