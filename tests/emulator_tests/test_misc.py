"""Moves, special registers and the instructions that do nothing here but must be accepted."""

import numpy as np
import pytest

from tests.emulator import GlobalMemory, UnknownInstructionError
from tests.emulator_tests.exact import F32
from tests.emulator_tests.harness import apply, floats, kernel, run

COUNT = 256


def words(count=COUNT):
    return np.random.default_rng().integers(0, 1 << 32, count, dtype=np.uint64).astype("u4")


def test_pack_and_unpack():
    a, b = words(), words()
    code = (
        "\tmov.b64 %d9, {%a0, %a1};\n\tmov.b64 {%r0, %z0}, %d9;\n"
        "\tmov.b32 {%h0, %h1}, %a0;\n\tmov.b32 %z1, {%h1, %h0};"
    )
    high, swapped = apply(code, [a, b], [np.dtype("u4")] * 2)
    np.testing.assert_array_equal(high, b)
    np.testing.assert_array_equal(swapped, a >> 16 | a << 16)


TESTS = {
    "finite": lambda x: not F32.is_nan(x) and not F32.is_infinite(x),
    "infinite": F32.is_infinite,
    "number": lambda x: not F32.is_nan(x),
    "notanumber": F32.is_nan,
    "normal": lambda x: 0x00800000 <= x & 0x7FFFFFFF < 0x7F800000,
    "subnormal": lambda x: 0 < x & 0x7FFFFFFF < 0x00800000,
}


@pytest.mark.parametrize("test", TESTS)
def test_testp(test):
    x = floats(32, 23, COUNT, np.random.default_rng())
    (got,) = apply(
        f"\ttestp.{test}.f32 %p0, %a0;\n\tselp.b32 %z0, 1, 0, %p0;", [x], [np.dtype("u4")]
    )
    np.testing.assert_array_equal(got, [int(TESTS[test](int(v))) for v in x])


def test_copysign_takes_the_sign_of_its_first_operand():
    a, b = words(), words()
    (got,) = apply("\tcopysign.f32 %z0, %a0, %a1;", [a, b], [np.dtype("u4")])
    np.testing.assert_array_equal(got, (a & 0x80000000) | (b & 0x7FFFFFFF))


@pytest.mark.parametrize(("into", "true"), [("u32", 0xFFFFFFFF), ("f32", 0x3F800000)])
def test_set(into, true):
    a, b = words(), words()
    (got,) = apply(f"\tset.lt.{into}.s32 %z0, %a0, %a1;", [a, b], [np.dtype("u4")])
    np.testing.assert_array_equal(got, np.where(a.view("i4") < b.view("i4"), true, 0))


def test_mad24():
    a, b, c = words(), words(), words()
    (got,) = apply("\tmad24.lo.u32 %z0, %a0, %a1, %a2;", [a, b, c], [np.dtype("u4")])
    np.testing.assert_array_equal(got, (a & 0xFFFFFF) * (b & 0xFFFFFF) + c)


SPECIALS = {
    "%laneid": lambda t, b: t % 32,
    "%warpid": lambda t, b: t // 32,
    "%nwarpid": lambda t, b: 2,
    "%ntid.x": lambda t, b: 64,
    "%nctaid.x": lambda t, b: 4,
    "%clusterid.x": lambda t, b: b // 2,
    "%nclusterid.x": lambda t, b: 2,
    "%cluster_ctarank": lambda t, b: b % 2,
    "%cluster_nctarank": lambda t, b: 2,
    "%cluster_ctaid.x": lambda t, b: b % 2,
    "%lanemask_lt": lambda t, b: (1 << (t % 32)) - 1,
    "%lanemask_ge": lambda t, b: 0xFFFFFFFF & ~((1 << (t % 32)) - 1),
    "%lanemask_eq": lambda t, b: 1 << (t % 32),
    "%dynamic_smem_size": lambda t, b: 96,
    "%is_explicit_cluster": lambda t, b: 1,
}


@pytest.mark.parametrize("name", SPECIALS)
def test_special_registers(name):
    read = f"\tmov.u32 %r0, {name};"
    if name == "%is_explicit_cluster":
        read = f"\tmov.pred %p0, {name};\n\tselp.u32 %r0, 1, 0, %p0;"
    code = (
        f"{read}\n\tmad.lo.u32 %r1, %block, 64, %thread;\n\tmul.wide.u32 %d0, %r1, 4;\n"
        "\tadd.u64 %d0, %d0, %pa0;\n\tst.global.b32 [%d0], %r0;"
    )
    memory = GlobalMemory()
    out = memory.allocate("out", 4 * 256)
    run(kernel(code, ["u64"]), 64, [out], memory, grid=4, cluster=2, shared=96)
    got = memory.contents(out, 1024)[0].view("u4").reshape(4, 64)
    want = [[SPECIALS[name](t, b) for t in range(64)] for b in range(4)]
    np.testing.assert_array_equal(got, want)


def test_rank_of_a_mapped_address():
    code = (
        "\tmov.b32 %r0, 1;\n\tmapa.shared::cluster.u32 %r1, %sm, %r0;\n"
        "\tgetctarank.shared::cluster.u32 %r2, %r1;\n\tsetp.ne.u32 %p0, %r2, 1;\n\t@%p0 trap;"
    )
    run(kernel(code, []), 32, [], GlobalMemory(), grid=2, cluster=2, shared=64)


def test_active_lanes_of_a_branch():
    code = (
        "\tmov.b32 %z0, 0;\n\tsetp.gt.u32 %p0, %lane, 9;\n\t@%p0 bra END;\n"
        "\tactivemask.b32 %z0;\nEND:"
    )
    (got,) = apply(code, [np.zeros(32, "u4")], [np.dtype("u4")])
    np.testing.assert_array_equal(got, np.where(np.arange(32) < 10, 0x3FF, 0))


@pytest.mark.parametrize("code", [
    "setmaxnreg.inc.sync.aligned.u32 160;", "setmaxnreg.dec.sync.aligned.u32 40;",
    "fence.acq_rel.gpu;", "fence.sc.cta;", "membar.gl;", "fence.proxy.async.global;",
    "fence.mbarrier_init.release.cluster;", "pmevent 3;", "nanosleep.u32 20;",
    "prefetch.global.L1 [%pa0];", "fence.proxy.alias;",
])  # fmt: skip
def test_accepted_without_effect(code):
    memory = GlobalMemory()
    address = memory.allocate("data", np.zeros(4, "u4"))
    run(kernel(f"\t{code}", ["u64"]), 128, [address], memory)


@pytest.mark.parametrize("code", [
    "discard.global.L2 [%pa0], 128;", "st.async.weak.global.b32 [%pa0], %r0, [%sm];",
    "multimem.ld_reduce.global.add.f32 %r0, [%pa0];", "tcgen05.wait::ld.sync.aligned;",
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[%sm], [%pa0, {%r0, %r1}], [%sm];",
])  # fmt: skip
def test_not_implemented_says_so(code):
    with pytest.raises(UnknownInstructionError, match="PTX line"):
        run(kernel(f"\t{code}", ["u64"]), 32, [0], GlobalMemory(), shared=64)
