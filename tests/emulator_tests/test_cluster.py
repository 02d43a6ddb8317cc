"""Clusters: distributed shared memory, remote mbarriers, multicast copies."""

import numpy as np
import pytest

from tests.emulator import (
    DeadlockError,
    EmulationError,
    GlobalMemory,
    InFlightError,
    OutOfBoundsError,
    RaceError,
    UninitialisedError,
)
from tests.emulator_tests.harness import kernel, run

RING = """
\tmov.u32 %r0, %cluster_ctarank;
\tmov.u32 %r1, %cluster_nctarank;
\tmad.lo.u32 %r2, %lane, 4, %sm;
\tmad.lo.u32 %r3, %block, 100, %lane;
\tst.shared.b32 [%r2], %r3;
\t{first}
\tadd.u32 %r4, %r0, 1;
\trem.u32 %r4, %r4, %r1;
\tmapa.shared::cluster.u32 %r5, %r2, %r4;
\tld.shared::cluster.b32 %r6, [%r5];
\tmad.lo.u32 %r7, %block, 32, %lane;
\tmul.wide.u32 %d0, %r7, 4;
\tadd.u64 %d0, %d0, %pa0;
\tst.global.b32 [%d0], %r6;
\t{last}
"""
SYNC = "barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;"


def ring(first=SYNC, last=SYNC, grid=8, cluster=4, **options):
    memory = GlobalMemory()
    out = memory.allocate("out", 128 * grid)
    run(kernel(RING.format(first=first, last=last), ["u64"]), 32, [out], memory, grid=grid,
        cluster=cluster, shared=512, patience=20, **options)  # fmt: skip
    return memory.contents(out, 128 * grid)[0].view("u4").reshape(grid, 32)


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_neighbours_shared_memory(cluster, seed):
    blocks = np.arange(8)
    neighbour = blocks // cluster * cluster + (blocks + 1) % cluster
    want = neighbour[:, None] * 100 + np.arange(32)
    np.testing.assert_array_equal(ring(cluster=cluster, seed=seed), want)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_missing_cluster_barrier(seed):
    with pytest.raises((RaceError, UninitialisedError)):
        ring(first="", seed=seed)


def test_barrier_that_a_block_never_reaches():
    skip = "setp.eq.u32 %p5, %r0, 2;\n\t@%p5 ret;\n\t" + SYNC
    with pytest.raises(DeadlockError, match="the cluster barrier: 3 of 4 warps"):
        ring(first=skip, last="")


def test_rank_outside_the_cluster():
    with pytest.raises(OutOfBoundsError, match="outside the cluster"):
        ring(first=SYNC + "\n\tmov.u32 %r1, 9;", cluster=4)


REMOTE = """
\tmov.u32 %r0, %cluster_ctarank;
\tsetp.eq.u32 %p0, %thread, 0;
\t@%p0 mbarrier.init.shared.b64 [%sm], 1;
\tbarrier.cluster.arrive;
\tbarrier.cluster.wait;
\txor.b32 %r1, %r0, 1;
\tmapa.shared::cluster.u32 %r2, %sm, %r1;
\tmad.lo.u32 %r3, %lane, 4, %r2;
\tmad.lo.u32 %r4, %block, 100, %lane;
\tst.shared::cluster.b32 [%r3+64], %r4;
\tbar.warp.sync -1;
\t@%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
WAIT:
\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%sm], 0;
\t@!%p1 bra WAIT;
\tmad.lo.u32 %r5, %lane, 4, %sm;
\tld.shared.b32 %r6, [%r5+64];
\tmad.lo.u32 %r7, %block, 32, %lane;
\tmul.wide.u32 %d0, %r7, 4;
\tadd.u64 %d0, %d0, %pa0;
\tst.global.b32 [%d0], %r6;
"""


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_remote_store_and_remote_arrival(seed):
    memory = GlobalMemory()
    out = memory.allocate("out", 128 * 4)
    run(kernel(REMOTE, ["u64"]), 32, [out], memory, grid=4, cluster=2, shared=512, seed=seed)
    got = memory.contents(out, 512)[0].view("u4").reshape(4, 32)
    np.testing.assert_array_equal(got, (np.arange(4) ^ 1)[:, None] * 100 + np.arange(32))


ASYNC = """
\tmov.u32 %r0, %cluster_ctarank;
\tsetp.eq.u32 %p0, %thread, 0;
\t@%p0 mbarrier.init.shared.b64 [%sm], 1;
\tfence.mbarrier_init.release.cluster;
\tbarrier.cluster.arrive.relaxed;
\tbarrier.cluster.wait;
\t@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%sm], {expected};
\txor.b32 %r1, %r0, 1;
\tmapa.shared::cluster.u32 %r2, %sm, %r1;
\tmad.lo.u32 %r3, %lane, 16, %r2;
\tmad.lo.u32 %r4, %block, 100, %lane;
\tadd.u32 %r8, %r4, 1000;
\tst.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r3+64],
\t    {{%r4, %r8, %r4, %r8}}, [{barrier}];
{early}
WAIT:
\tmbarrier.try_wait.parity.shared::cta.b64 %p1, [%sm], 0;
\t@!%p1 bra WAIT;
\tmad.lo.u32 %r5, %lane, 16, %sm;
\tld.shared.v4.b32 {{%r6, %r7, %r9, %r10}}, [%r5+64];
\tsub.u32 %r7, %r7, %r10;
\tadd.u32 %r6, %r6, %r7;
\tmad.lo.u32 %r7, %block, 32, %lane;
\tmul.wide.u32 %d0, %r7, 4;
\tadd.u64 %d0, %d0, %pa0;
\tst.global.b32 [%d0], %r6;
"""


def exchange(seed=None, expected=512, barrier="%r2", early=""):
    memory = GlobalMemory()
    out = memory.allocate("out", 128 * 4)
    code = ASYNC.format(expected=expected, barrier=barrier, early=early)
    run(kernel(code, ["u64"]), 32, [out], memory, grid=4,
        cluster=2, shared=1024, seed=seed, patience=20)  # fmt: skip
    return memory.contents(out, 512)[0].view("u4").reshape(4, 32)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_asynchronous_store_to_a_neighbour(seed):
    want = (np.arange(4) ^ 1)[:, None] * 100 + np.arange(32)
    np.testing.assert_array_equal(exchange(seed), want)


def test_asynchronous_store_that_more_bytes_are_expected_of():
    with pytest.raises(DeadlockError, match="lacks 0 of 1 arrivals and 16 bytes"):
        exchange(expected=528)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_asynchronous_store_read_before_it_arrives(seed):
    with pytest.raises((InFlightError, RaceError, UninitialisedError)):
        exchange(seed, expected=0)


def test_asynchronous_store_counted_elsewhere():
    with pytest.raises(EmulationError, match="an mbarrier of another block"):
        exchange(barrier="%sm")


def test_block_that_exits_before_it_has_what_others_store():
    with pytest.raises(InFlightError, match="exits while an asynchronous store"):
        exchange(early="\tret;")


def test_multicast_copy_reaches_every_block():
    code = """
\tmov.u32 %r0, %cluster_ctarank;
\tsetp.eq.u32 %p0, %thread, 0;
\t@%p0 mbarrier.init.shared.b64 [%sm], 1;
\t@%p0 mbarrier.arrive.expect_tx.shared.b64 %d1, [%sm], 128;
\tbarrier.cluster.arrive;
\tbarrier.cluster.wait;
\tsetp.eq.and.u32 %p2, %r0, 1, %p0;
\tmov.b16 %h0, 0x7;
\t@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
\t [%sm+128], [%pa0], 128, [%sm], %h0;
\tsetp.eq.u32 %p3, %r0, 3;
\t@%p3 bra END;
WAIT:
\tmbarrier.try_wait.parity.shared.b64 %p1, [%sm], 0;
\t@!%p1 bra WAIT;
\tmad.lo.u32 %r5, %lane, 4, %sm;
\tld.shared.b32 %r6, [%r5+128];
\tmad.lo.u32 %r7, %r0, 32, %lane;
\tmul.wide.u32 %d0, %r7, 4;
\tadd.u64 %d0, %d0, %pa1;
\tst.global.b32 [%d0], %r6;
END:
\tbarrier.cluster.arrive;
\tbarrier.cluster.wait;"""
    memory = GlobalMemory()
    data = np.arange(32, dtype=np.uint32) * 9
    source, out = memory.allocate("source", data), memory.allocate("out", 128 * 3)
    run(kernel(code, ["u64", "u64"]), 32, [source, out], memory, grid=4, cluster=4, shared=512)
    got = memory.contents(out, 384)[0].view("u4").reshape(3, 32)
    np.testing.assert_array_equal(got, [data] * 3)
