"""Asynchronous copies: results, and every way to forget a wait."""

import numpy as np
import pytest

from tests.emulator import (
    DeadlockError,
    EmulationError,
    GlobalMemory,
    InFlightError,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    UninitialisedError,
)
from tests.emulator_tests.harness import kernel, run

SEEDS = [None, 1, 2, 3]


def copy_in(code, data, out_bytes, threads=32, **options):
    memory = GlobalMemory()
    source, out = memory.allocate("source", data), memory.allocate("out", out_bytes)
    run(kernel(code, ["u64", "u64"]), threads, [source, out], memory, shared=4096, patience=30,
        **options)  # fmt: skip
    return memory.contents(out, out_bytes)[0].view("u4")


PER_THREAD = """
\tmul.wide.u32 %d0, %lane, 16;
\tadd.u64 %d1, %d0, %pa0;
\tmad.lo.u32 %r0, %lane, 16, %sm;
\tcp.async.cg.shared.global [%r0], [%d1], 16;
\tcp.async.commit_group;
\tcp.async.ca.shared.global [%r0+1024], [%d1+512], 8, {size};
\tcp.async.commit_group;
\t{first}
\tbar.warp.sync -1;
\txor.b32 %r1, %lane, 1;
\tmad.lo.u32 %r1, %r1, 16, %sm;
\tld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r1];
\t{second}
\tld.shared.v2.b32 {{%r6, %r7}}, [%r0+1024];
\tadd.u32 %r2, %r2, %r6;
\tadd.u32 %r3, %r3, %r7;
\tadd.u64 %d2, %d0, %pa1;
\tst.global.v4.b32 [%d2], {{%r2, %r3, %r4, %r5}};
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_per_thread(seed):
    data = np.random.default_rng().integers(0, 1 << 30, 256).astype("u4")
    code = PER_THREAD.format(size=4, first="cp.async.wait_group 1;", second="cp.async.wait_all;")
    got = copy_in(code, data, 512, seed=seed).reshape(32, 4)
    want = data[:128].reshape(16, 2, 4)[:, ::-1].reshape(32, 4).copy()
    want[:, 0] += data[128:].reshape(32, 4)[:, 0]  # 4 of 8 bytes, the rest zeros
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("", "cp.async.wait_all;"),
        ("cp.async.wait_group 2;", "cp.async.wait_all;"),
        ("cp.async.wait_group 1;", ""),
    ],
)
def test_dropped_wait_for_a_group(first, second):
    code = PER_THREAD.format(size=8, first=first, second=second)
    with pytest.raises(InFlightError, match="nothing waited for"):
        copy_in(code, np.zeros(256, "u4"), 512)


def test_exit_with_a_copy_in_flight():
    code = "\tcp.async.ca.shared.global [%sm], [%pa0], 4;\n\tcp.async.commit_group;"
    with pytest.raises(InFlightError, match="exits while"):
        copy_in("\tsetp.ne.u32 %p0, %thread, 0;\n\t@%p0 ret;\n" + code, np.zeros(4, "u4"), 4)


def test_source_out_of_bounds():
    code = PER_THREAD.format(size=8, first="cp.async.wait_all;", second="")
    with pytest.raises(OutOfBoundsError, match="source"):
        copy_in(code, np.zeros(200, "u4"), 512)


BULK = """
\tsetp.eq.u32 %p0, %thread, 0;
\t@!%p0 bra READY;
\tmbarrier.init.shared::cta.b64 [%sm], 1;
\tfence.mbarrier_init.release.cluster;
\tmbarrier.arrive.expect_tx.shared::cta.b64 %d0, [%sm], {expected};
\tcp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
\t [%sm+128], [%pa0+{skew}], 256, [%sm];
\tcp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
\t [%sm+384], [%pa0+256], 256, [%sm];
READY:
\tbar.sync 0;
WAIT:
\t{wait}
\tmad.lo.u32 %r0, %thread, 4, %sm;
\tld.shared.b32 %r1, [%r0+128];
\tmul.wide.u32 %d1, %thread, 4;
\tadd.u64 %d1, %d1, %pa1;
\tst.global.b32 [%d1], %r1;
"""
WAIT = "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%sm], 0;\n\t@!%p1 bra WAIT;"


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_copy_completes_on_an_mbarrier(seed):
    data = np.random.default_rng().integers(0, 1 << 32, 128, dtype=np.uint64).astype("u4")
    code = BULK.format(expected=512, skew=0, wait=WAIT)
    np.testing.assert_array_equal(copy_in(code, data, 512, threads=128, seed=seed), data)


BULK_FAULTS = {
    "no wait": ((512, 0, ""), (InFlightError, RaceError)),
    "wait for half the bytes": ((256, 0, WAIT), EmulationError),
    "wait for more than comes": ((528, 0, WAIT), DeadlockError),
    "misaligned source": ((512, 4, WAIT), MisalignedError),
    "source past the end": ((512, 272, WAIT), OutOfBoundsError),
}  # fmt: skip


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("name", BULK_FAULTS)
def test_bulk_copy_faults(name, seed):
    (expected, skew, wait), error = BULK_FAULTS[name]
    code = BULK.format(expected=expected, skew=skew, wait=wait)
    with pytest.raises(error):
        copy_in(code, np.zeros(128, "u4"), 512, threads=128, seed=seed)


STORE = """
\tmad.lo.u32 %r0, %thread, 4, %sm;
\tmul.lo.u32 %r1, %thread, 3;
\tst.shared.b32 [%r0], %r1;
\t{fence}
\tbar.sync 0;
\tsetp.ne.u32 %p0, %thread, 0;
\t@%p0 bra END;
\tcp.async.bulk.global.shared::cta.bulk_group [%pa1], [%sm], 512;
\tcp.async.bulk.commit_group;
\t{wait}
END:
"""
FENCE = "fence.proxy.async.shared::cta;"
READ = "cp.async.bulk.wait_group.read 0;"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("wait", [READ, "cp.async.bulk.wait_group 0;"])
def test_bulk_store(wait, seed):
    code = STORE.format(fence=FENCE, wait=wait)
    got = copy_in(code, np.zeros(1, "u4"), 512, threads=128, seed=seed)
    np.testing.assert_array_equal(got, np.arange(128) * 3)


def test_bulk_store_without_a_proxy_fence():
    with pytest.raises(RaceError, match=r"fence\.proxy\.async"):
        copy_in(STORE.format(fence="", wait=READ), np.zeros(1, "u4"), 512, threads=128)


def test_bulk_store_without_a_barrier():
    code = STORE.format(fence=FENCE, wait=READ).replace("\tbar.sync 0;\n", "")
    with pytest.raises((RaceError, UninitialisedError)):
        copy_in(code, np.zeros(1, "u4"), 512, threads=128)


def test_buffer_overwritten_before_the_copy_has_read_it():
    code = STORE.format(fence=FENCE, wait="st.shared.b32 [%sm], 5;\n\t" + READ)
    with pytest.raises(InFlightError):
        copy_in(code, np.zeros(1, "u4"), 512, threads=128)


def test_exit_before_the_copy_has_read():
    with pytest.raises(InFlightError, match="exits while its bulk copy"):
        copy_in(STORE.format(fence=FENCE, wait=""), np.zeros(1, "u4"), 512, threads=128)


def test_refill_before_the_readers_are_done():
    """The second copy into a slot must wait for a release of the slot by its readers."""
    body = BULK.format(expected=512, skew=0, wait=WAIT)
    refill = """
\t@!%p0 bra END;
\tmbarrier.arrive.expect_tx.shared::cta.b64 %d0, [%sm], 256;
\tcp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%sm+384], [%pa0], 256, [%sm];
WAIT2:
\tmbarrier.try_wait.parity.shared::cta.b64 %p1, [%sm], 1;
\t@!%p1 bra WAIT2;
END:"""
    data = np.arange(128, dtype=np.uint32)
    with pytest.raises(RaceError, match="overwrites what warp"):
        copy_in(body + refill, data, 512, threads=128)
    copy_in(body + "\tbar.sync 0;" + refill, data, 512, threads=128)


def test_arrival_triggered_by_thread_copies():
    code = """
\tsetp.eq.u32 %p0, %thread, 0;
\t@%p0 mbarrier.init.shared.b64 [%sm], 64;
\tbar.sync 0;
\tmul.wide.u32 %d0, %thread, 4;
\tadd.u64 %d1, %d0, %pa0;
\tmad.lo.u32 %r0, %thread, 4, %sm;
\tcp.async.ca.shared.global [%r0+64], [%d1], 4;
\tcp.async.mbarrier.arrive.noinc.shared.b64 [%sm];
WAIT:
\tmbarrier.try_wait.parity.shared.b64 %p1, [%sm], 0;
\t@!%p1 bra WAIT;
\txor.b32 %r1, %thread, 32;
\tmad.lo.u32 %r1, %r1, 4, %sm;
\tld.shared.b32 %r2, [%r1+64];
\tadd.u64 %d1, %d0, %pa1;
\tst.global.b32 [%d1], %r2;"""
    data = np.arange(64, dtype=np.uint32) * 5
    np.testing.assert_array_equal(copy_in(code, data, 256, threads=64), data[np.arange(64) ^ 32])
