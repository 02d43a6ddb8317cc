"""Loads, stores and atomics, and the checks on every access."""

import numpy as np
import pytest

from tests.emulator import (
    GlobalMemory,
    LaunchError,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    ReadOnlyError,
    UninitialisedError,
    UnknownInstructionError,
)
from tests.emulator_tests.harness import apply, kernel, run

ONE = ["u64"]


def once(code, *arrays, threads=32, shared=0, writable=True, **options):
    """Runs code with one address parameter an array; returns the arrays afterwards."""
    memory = GlobalMemory()
    addresses = [memory.allocate(f"array {i}", a, writable) for i, a in enumerate(arrays)]
    device = run(kernel(code, ["u64"] * len(arrays)), threads, addresses, memory, shared=shared,
                 **options)  # fmt: skip
    sizes = [a if isinstance(a, int) else a.nbytes for a in arrays]
    once.device = device
    return [memory.contents(a, n)[0] for a, n in zip(addresses, sizes, strict=True)]


@pytest.mark.parametrize(
    "qualifiers",
    [
        "ld.global",
        "ld.global.nc",
        "ld.volatile.global",
        "ld.relaxed.gpu.global",
        "ld.acquire.sys.global",
        "ld.global.nc.L1::no_allocate",
        "ld.global.L2::128B",
        "ld.global.ca",
        "ld.global.cg",
        "ld.weak.global",
        "ld",
    ],
)
@pytest.mark.parametrize("vector", [1, 2, 4])
def test_loads_of_every_kind(qualifiers, vector):
    rng = np.random.default_rng()
    data = rng.integers(0, 1 << 32, 32 * vector, dtype=np.uint64).astype("u4")
    registers = ", ".join(f"%r{i}" for i in range(vector))
    suffix, braced = (f".v{vector}", f"{{{registers}}}") if vector > 1 else ("", "%r0")
    code = f"""
\tmul.wide.u32 %d0, %lane, {4 * vector};
\tadd.u64 %d1, %d0, %pa0;
\tadd.u64 %d2, %d0, %pa1;
\t{qualifiers}{suffix}.b32 {braced}, [%d1];
\tst.global{suffix}.b32 [%d2], {braced};"""
    _, got = once(code, data, data.nbytes)
    np.testing.assert_array_equal(got.view("u4"), data)


def test_cache_policy_operands():
    data = np.arange(32, dtype=np.uint32)
    code = """
\tcreatepolicy.fractional.L2::evict_first.b64 %d5, 1.0;
\tmul.wide.u32 %d0, %lane, 4;
\tadd.u64 %d1, %d0, %pa0;
\tadd.u64 %d2, %d0, %pa1;
\tprefetch.global.L2 [%d1];
\tld.global.nc.L1::no_allocate.L2::cache_hint.b32 %r0, [%d1], %d5;
\tst.global.L2::cache_hint.b32 [%d2], %r0, %d5;"""
    _, got = once(code, data, data.nbytes)
    np.testing.assert_array_equal(got.view("u4"), data)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("u8", "u1"), ("s8", "i1"), ("u16", "u2"), ("s16", "i2"), ("s32", "i4")]
)
def test_narrow_loads_extend(kind, dtype):
    rng = np.random.default_rng()
    info = np.iinfo(dtype)
    data = rng.integers(info.min, info.max, 32, dtype=dtype, endpoint=True)
    code = f"""
\tmul.wide.u32 %d0, %lane, {data.itemsize};
\tadd.u64 %d0, %d0, %pa0;
\tld.global.{kind} %d1, [%d0];
\tmul.wide.u32 %d2, %lane, 8;
\tadd.u64 %d2, %d2, %pa1;
\tst.global.b64 [%d2], %d1;"""
    _, got = once(code, data, 256)
    np.testing.assert_array_equal(got.view("i8"), data)


def test_narrow_stores_keep_the_neighbours():
    rng = np.random.default_rng()
    words = rng.integers(0, 1 << 32, 32, dtype=np.uint64).astype("u4")
    code = """
\tmul.wide.u32 %d0, %lane, 4;
\tadd.u64 %d1, %d0, %pa0;
\tadd.u64 %d2, %d0, %pa1;
\tld.global.b32 %r0, [%d1];
\tst.global.b8 [%d2+1], %r0;
\tcvt.u16.u32 %h0, %r0;
\tst.global.b16 [%d2+2], %h0;"""
    before = np.full(32, 0x11223344, "u4")
    _, got = once(code, words, before)
    want = (words & 0xFFFF) << 16 | (words & 0xFF) << 8 | 0x44
    np.testing.assert_array_equal(got.view("u4"), want)


def test_shared_memory_and_generic_addresses():
    code = """
\tmul.lo.u32 %r0, %lane, 4;
\tadd.u32 %r1, %sm, %r0;
\tmul.lo.u32 %r2, %lane, 3;
\tst.shared.b32 [%r1], %r2;
\tcvt.u64.u32 %d0, %r1;
\tcvta.shared.u64 %d1, %d0;
\tisspacep.shared %p0, %d1;
\tisspacep.global %p1, %pa0;
\tand.pred %p0, %p0, %p1;
\t@!%p0 trap;
\tld.b32 %r3, [%d1];
\tmul.wide.u32 %d2, %lane, 4;
\tadd.u64 %d2, %d2, %pa0;
\tst.b32 [%d2], %r3;"""
    (got,) = once(code, 128, shared=128)
    np.testing.assert_array_equal(got.view("u4"), np.arange(32) * 3)


def test_local_memory_is_private():
    memory = GlobalMemory()
    out = memory.allocate("out", 64 * 4)
    text = kernel(
        """
\tmov.u64 %d1, stack;
\tcvta.local.u64 %d2, %d1;
\tand.b32 %r0, %thread, 3;
\tmul.wide.u32 %d3, %r0, 4;
\tadd.u64 %d4, %d1, %d3;
\tst.local.b32 [%d4], %thread;
\tadd.u64 %d5, %d2, %d3;
\tld.b32 %r1, [%d5];
\tmul.wide.u32 %d6, %thread, 4;
\tadd.u64 %d6, %d6, %pa0;
\tst.global.b32 [%d6], %r1;""",
        ["u64"],
        "\t.local .align 16 .b8 stack[16];",
    )
    run(text, 64, [out], memory)
    np.testing.assert_array_equal(memory.contents(out, 256)[0].view("u4"), np.arange(64))


def test_predicated_accesses_leave_other_lanes_alone():
    data = np.arange(32, dtype=np.uint32)
    code = """
\tsetp.lt.u32 %p0, %lane, 8;
\tmul.wide.u32 %d0, %lane, 4;
\tadd.u64 %d1, %d0, %pa0;
\tadd.u64 %d2, %d0, %pa1;
\tmov.b32 %r0, 99;
\t@%p0 ld.global.b32 %r0, [%d1];
\t@!%p0 add.u32 %r0, %r0, %lane;
\tst.global.b32 [%d2], %r0;"""
    _, got = once(code, data[:8].copy(), 128)
    np.testing.assert_array_equal(got.view("u4"), np.where(data < 8, data, 99 + data))


ATOMICS = {
    "add.u32": lambda old, x: old + x,
    "min.u32": min,
    "max.u32": max,
    "and.b32": lambda old, x: old & x,
    "or.b32": lambda old, x: old | x,
    "xor.b32": lambda old, x: old ^ x,
    "exch.b32": lambda old, x: x,
    "inc.u32": lambda old, x: 0 if old >= x else old + 1,
    "dec.u32": lambda old, x: x if old == 0 or old > x else old - 1,
}


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_with_colliding_lanes(name):
    """Lanes of a warp that meet at one address take turns; each gets what it found."""
    rng = np.random.default_rng()
    values = rng.integers(0, 1 << 32, 32, dtype=np.uint64).astype("u4")
    if name[:3] in ("inc", "dec"):
        values = rng.integers(0, 5, 32).astype("u4")
    start = rng.integers(0, 4, 3).astype("u4")
    op, kind = name.split(".")
    code = f"""
\trem.u32 %r0, %lane, 3;
\tmul.wide.u32 %d0, %r0, 4;
\tadd.u64 %d0, %d0, %pa0;
\tmul.wide.u32 %d1, %lane, 4;
\tadd.u64 %d2, %d1, %pa1;
\tadd.u64 %d3, %d1, %pa2;
\tld.global.b32 %r1, [%d2];
\tatom.global.gpu.relaxed.{op}.{kind} %r2, [%d0], %r1;
\tst.global.b32 [%d3], %r2;""".replace("gpu.relaxed", "relaxed.gpu").replace(
        "atom.global.relaxed.gpu", "atom.relaxed.gpu.global")  # fmt: skip
    target, _, found = once(code, start, values, 128)
    state, old = [int(v) for v in start], []
    for lane in range(32):
        old.append(state[lane % 3])
        state[lane % 3] = ATOMICS[name](old[-1], int(values[lane])) & 0xFFFFFFFF
    np.testing.assert_array_equal(target.view("u4"), state)
    np.testing.assert_array_equal(found.view("u4"), old)


def test_compare_and_swap_takes_one_lane():
    code = """
\tatom.global.cas.b32 %r0, [%pa0], 0, %lane;
\tmul.wide.u32 %d1, %lane, 4;
\tadd.u64 %d1, %d1, %pa1;
\tst.global.b32 [%d1], %r0;"""
    target, found = once(code, np.zeros(1, "u4"), 128)
    assert target.view("u4")[0] == 1  # lane 0 swaps 0 for 0, lane 1 then wins
    np.testing.assert_array_equal(found.view("u4"), [0, 0] + [1] * 30)


def test_reductions_of_floats():
    values = np.arange(1, 33, dtype=np.float32)
    code = """
\tmul.wide.u32 %d0, %lane, 4;
\tadd.u64 %d0, %d0, %pa0;
\tld.global.b32 %r0, [%d0];
\tred.global.add.f32 [%pa1], %r0;
\tred.shared.add.u32 [%sm], 1;"""
    code = "\tst.shared.b32 [%sm], 0;\n\tbar.sync 0;\n" + code
    _, total = once(code, values, np.zeros(1, "f4"), shared=16)
    assert total.view("f4")[0] == values.sum()


def test_packed_atomic_rounds_each_half():
    code = "\tmov.b32 %r0, 0x3F803F80;\n\tred.global.add.noftz.bf16x2 [%pa0], %r0;"
    (got,) = once(code, np.zeros(1, "u4"))
    assert got.view("u4")[0] == 0x42004200  # 32.0 twice


# Findings.


def test_out_of_bounds_names_array_byte_and_lane():
    code = "\tmul.wide.u32 %d0, %lane, 4;\n\tadd.u64 %d0, %d0, %pa0;\n\tld.global.b32 %r0, [%d0+4];"
    with pytest.raises(
        OutOfBoundsError, match=r"array 0\[byte 128 of 128\] by block 0, warp 0, lane 31"
    ):
        once(code, np.zeros(32, "u4"))


@pytest.mark.parametrize("address", ["%d9", "%pa0"])
def test_wild_addresses(address):
    code = f"\tmov.b64 %d9, 8;\n\tst.global.b8 [{address}+-1], 1;"
    with pytest.raises(OutOfBoundsError):
        once(code, np.zeros(32, "u4"))


def test_misaligned_vector():
    with pytest.raises(MisalignedError, match="multiple of 16"):
        once("\tld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%pa0+8];", np.zeros(32, "u4"))


def test_shared_out_of_bounds():
    with pytest.raises(OutOfBoundsError, match="shared memory of block 0"):
        once("\tst.shared.b32 [%sm+64], 1;", shared=64)


def test_write_to_an_operand():
    with pytest.raises(ReadOnlyError, match="array 0"):
        once("\tst.global.b32 [%pa0], 1;", np.zeros(1, "u4"), writable=False)


def test_undefined_value_decides_a_branch():
    code = "\tld.global.b32 %r0, [%pa0];\n\tsetp.eq.u32 %p0, %r0, 0;\n\t@%p0 trap;"
    with pytest.raises(UninitialisedError, match="memory that nothing wrote"):
        once(code, 16)


def test_undefined_value_becomes_an_address():
    code = "\tld.shared.b32 %r0, [%sm];\n\tadd.u32 %r1, %r0, %sm;\n\tst.shared.b32 [%r1], 1;"
    with pytest.raises(UninitialisedError, match=r"ld\.shared"):
        once(code, shared=64)


def test_undefined_value_crosses_a_shuffle_and_memory():
    """Only lane 3 loads nothing's value; it goes to lane 2, to memory, and into a guard."""
    code = """
\tmov.b32 %r0, 1;
\tsetp.eq.u32 %p0, %lane, 3;
\t@%p0 ld.shared.b32 %r0, [%sm];
\tshfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;
\tmul.lo.u32 %r2, %lane, 4;
\tadd.u32 %r2, %r2, %sm;
\tst.shared.b32 [%r2+256], %r1;
\tld.shared.b32 %r3, [%r2+256];
\tsetp.eq.u32 %p1, %r3, 5;
\t@%p1 st.shared.b32 [%r2+256], 0;"""
    with pytest.raises(UninitialisedError, match="lane 2 depends"):
        once(code, shared=512)


def test_undefined_values_may_be_loaded_and_dropped():
    """A vector load past the data, a select and a matrix column that nobody looks at."""
    code = """
\tld.shared.b32 %r0, [%sm];
\tsetp.eq.u32 %p0, %lane, 99;
\tselp.b32 %r1, %r0, %lane, %p0;
\tmov.b32 %r9, 0;
\tsetp.lt.u32 %p1, %lane, 4;
\tselp.b32 %r2, %r0, %r9, %p1;
\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r3, %r4, %r5, %r6}, {%r9, %r9, %r9, %r9},
\t {%r2, %r9}, {%r9, %r9, %r9, %r9};
\tadd.u32 %r1, %r1, %r4;
\tmul.wide.u32 %d0, %lane, 4;
\tadd.u64 %d0, %d0, %pa0;
\tand.b32 %r7, %lane, 3;
\tsetp.ne.u32 %p2, %r7, 0;
\t@%p2 st.global.b32 [%d0], %r1;"""
    (got,) = once(code, np.zeros(32, "u4"), shared=16)
    lanes = np.arange(32)
    np.testing.assert_array_equal(got.view("u4"), np.where(lanes % 4, lanes, 0))


def test_lanes_storing_different_values_to_one_place():
    with pytest.raises(RaceError, match="different values"):
        once("\tst.global.b32 [%pa0], %lane;", np.zeros(1, "u4"))


def test_results_nobody_wrote_are_known():
    memory = GlobalMemory()
    address = memory.allocate("out", 16)
    run(kernel("\tst.global.b32 [%pa0+4], 7;", ONE), 1, [address], memory)
    data, written = memory.contents(address, 16)
    assert data.view("u4")[1] == 7
    np.testing.assert_array_equal(written, [False] * 4 + [True] * 4 + [False] * 8)


def test_counters_of_banks_and_sectors():
    code = """
\tmul.lo.u32 %r0, %lane, {stride};
\tadd.u32 %r0, %r0, %sm;
\tst.shared.b32 [%r0], %lane;
\tmul.wide.u32 %d0, %lane, {stride};
\tadd.u64 %d0, %d0, %pa0;
\tst.global.b32 [%d0], %lane;"""
    for stride, wavefronts, sectors in ((4, 1, 4), (8, 2, 8), (128, 32, 32)):
        once(code.format(stride=stride), 4096, shared=4096, count=True)
        counters = once.device.counters
        assert list(counters.wavefronts.values()) == [[1, wavefronts]]
        assert list(counters.sectors.values()) == [[1, sectors]]


@pytest.mark.parametrize(
    ("parameters", "args", "grid", "message"),
    [(ONE, [], 1, "takes 1 arguments"), (ONE, [0], 3, "whole clusters")],
)
def test_bad_launches(parameters, args, grid, message):
    with pytest.raises(LaunchError, match=message):
        run(kernel("", parameters), 32, args, GlobalMemory(), grid=grid, cluster=2)


def test_too_much_shared_memory():
    with pytest.raises(LaunchError, match="shared memory"):
        run(kernel("", []), 32, [], GlobalMemory(), shared=240 * 1024)


def test_required_block_size():
    with pytest.raises(LaunchError, match="requires blocks of"):
        run(kernel("", [], directives=".reqntid 64, 1, 1"), 32, [], GlobalMemory())


def test_unknown_state_space_operation():
    with pytest.raises(UnknownInstructionError, match="PTX line"):
        apply("\tld.const.b32 %z0, [%pa0];", [np.zeros(1, "u4")], [np.dtype("u4")])
