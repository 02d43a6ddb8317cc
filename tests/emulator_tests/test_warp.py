"""Warp-synchronous instructions, and divergence."""

import numpy as np
import pytest

from tests.emulator import BarrierError, DeadlockError, GlobalMemory
from tests.emulator_tests.harness import apply, kernel, run

COUNT = 256


def random_words(rng):
    return rng.integers(0, 1 << 32, COUNT, dtype=np.uint64).astype("u4")


def shuffled(mode, value, lane_operand, clamp):
    """PTX's definition, lane by lane."""
    out, inside = [], []
    for lane in range(32):
        b, c = int(lane_operand[lane]) & 31, clamp & 31
        segment = clamp >> 8 & 31
        top = (lane & segment) | (c & ~segment)
        low = lane & segment
        source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b,
                  "idx": low | (b & ~segment)}[mode]  # fmt: skip
        fine = source >= top if mode == "up" else source <= top
        inside.append(fine)
        out.append(value[source if fine else lane])
    return out, inside


@pytest.mark.parametrize("clamp", [31, 0, 0x1F1F - 0x1F00 + 0x1800, 0x101F, 0x1C07, 0x1807])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl(mode, clamp):
    rng = np.random.default_rng()
    value, lane = random_words(rng), rng.integers(0, 40, COUNT).astype("u4")
    code = f"\tshfl.sync.{mode}.b32 %z0|%p0, %a0, %a1, {clamp}, -1;\n\tselp.b32 %z1, 1, 0, %p0;"
    got, inside = apply(code, [value, lane], [np.dtype("u4")] * 2)
    for w in range(0, COUNT, 32):
        want, flags = shuffled(mode, value[w : w + 32], lane[w : w + 32], clamp)
        np.testing.assert_array_equal(got[w : w + 32], want)
        np.testing.assert_array_equal(inside[w : w + 32], flags)


def test_vote():
    rng = np.random.default_rng()
    value = rng.random(COUNT) < np.repeat(rng.choice([0.0, 0.1, 0.5, 0.9, 1.0], COUNT // 32), 32)
    value = value.astype("u4")
    code = (
        "\tsetp.ne.u32 %p0, %a0, 0;\n\tvote.sync.ballot.b32 %z0, %p0, -1;\n"
        "\tvote.sync.all.pred %p1, %p0, -1;\n\tvote.sync.any.pred %p2, !%p0, -1;\n"
        "\tvote.sync.uni.pred %p3, %p0, -1;\n"
        "\tselp.b32 %z1, 1, 0, %p1;\n\tselp.b32 %z2, 1, 0, %p2;\n\tselp.b32 %z3, 1, 0, %p3;"
    )
    ballot, every, some_not, same = apply(code, [value], [np.dtype("u4")] * 4)
    rows = value.reshape(-1, 32).astype(bool)
    bits = (rows * (1 << np.arange(32, dtype=np.uint64))).sum(1)
    np.testing.assert_array_equal(ballot.reshape(-1, 32), bits[:, None] * np.ones(32, int))
    np.testing.assert_array_equal(every.reshape(-1, 32)[:, 5], rows.all(1))
    np.testing.assert_array_equal(some_not.reshape(-1, 32)[:, 9], (~rows).any(1))
    np.testing.assert_array_equal(same.reshape(-1, 32)[:, 0], rows.all(1) | ~rows.any(1))


def test_match():
    rng = np.random.default_rng()
    value = rng.integers(0, 4, COUNT).astype("u4")
    value[32:64] = 7
    code = (
        "\tmatch.any.sync.b32 %z0, %a0, -1;\n\tmatch.all.sync.b32 %z1|%p0, %a0, -1;\n"
        "\tselp.b32 %z2, 1, 0, %p0;"
    )
    some, every, agreed = apply(code, [value], [np.dtype("u4")] * 3)
    for i in range(COUNT):
        first = i // 32 * 32
        row = value[first : first + 32]
        assert some[i] == sum(1 << j for j in range(32) if row[j] == value[i])
        assert agreed[i] == (row == row[0]).all()
        assert every[i] == (0xFFFFFFFF if agreed[i] else 0)


@pytest.mark.parametrize(
    "name", ["add.u32", "add.s32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32"]
)
def test_redux(name):
    rng = np.random.default_rng()
    value = random_words(rng)
    (got,) = apply(f"\tredux.sync.{name} %z0, %a0, -1;", [value], [np.dtype("u4")])
    op, kind = name.split(".")
    rows = value.reshape(-1, 32).view("i4" if kind == "s32" else "u4")
    reduce = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
              "or": np.bitwise_or, "xor": np.bitwise_xor}[op].reduce  # fmt: skip
    want = np.array([int(reduce(row.astype(object) if op == "add" else row)) for row in rows])
    np.testing.assert_array_equal(
        got.reshape(-1, 32), (want[:, None] & 0xFFFFFFFF) * np.ones(32, int)
    )


def test_elect_names_one_lane():
    code = "\telect.sync %z0|%p0, -1;\n\tselp.b32 %z1, 1, 0, %p0;"
    leader, chosen = apply(code, [np.zeros(64, "u4")], [np.dtype("u4")] * 2)
    assert (chosen.reshape(-1, 32).sum(1) == 1).all()
    assert (chosen.reshape(-1, 32)[np.arange(2), leader.reshape(-1, 32)[:, 0]] == 1).all()


def test_member_mask_of_half_a_warp():
    """Both halves shuffle among themselves in one instruction, each with its own mask."""
    value = np.arange(64, dtype=np.uint32)
    code = (
        "\tsetp.lt.u32 %p0, %lane, 16;\n\tselp.b32 %r0, 0xFFFF, 0xFFFF0000, %p0;\n"
        "\tshfl.sync.bfly.b32 %z0, %a0, 15, 31, %r0;"
    )
    (got,) = apply(code, [value], [np.dtype("u4")])
    np.testing.assert_array_equal(got, np.arange(64) ^ 15)


def test_lanes_of_a_diverged_warp_meet_again():
    """Different branches and loop counts, then a shuffle that needs the whole warp."""
    value = np.arange(128, dtype=np.uint32)
    code = """
\tand.b32 %r0, %a0, 7;
\tmov.b32 %r1, 0;
LOOP:
\tsetp.ge.u32 %p0, %r1, %r0;
\t@%p0 bra DONE;
\tadd.u32 %r1, %r1, 1;
\tbra LOOP;
DONE:
\tand.b32 %r2, %a0, 1;
\tsetp.eq.u32 %p1, %r2, 0;
\t@%p1 bra EVEN;
\tmul.lo.u32 %r3, %r1, 100;
\tbra JOIN;
EVEN:
\tadd.u32 %r3, %r1, 1000;
JOIN:
\tshfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;
\tadd.u32 %z0, %r3, %r4;"""
    (got,) = apply(code, [value], [np.dtype("u4")])
    own = np.where(value % 2, (value & 7) * 100, (value & 7) + 1000)
    np.testing.assert_array_equal(got, own + own.reshape(-1, 2)[:, ::-1].ravel())


def test_indexed_branch_and_local_labels():
    value = np.arange(128, dtype=np.uint32)
    code = """
\tand.b32 %r0, %a0, 3;
T: .branchtargets L0, L1, L2, L0;
\tbrx.idx %r0, T;
L0:
\tmov.b32 %z0, 10;
\tbra END;
L1:
\t{ .reg .b32 t; .reg .pred q;
\tmov.b32 t, 20;
\tsetp.gt.u32 q, %a0, 64;
\t@q bra L0;
\tadd.u32 t, t, 1;
L0:
\tmov.b32 %z0, t; }
\tbra END;
L2:
\tmov.b32 %z0, 30;
END:"""
    (got,) = apply(code, [value], [np.dtype("u4")])
    want = np.where(value % 4 == 1, np.where(value > 64, 20, 21), np.where(value % 4 == 2, 30, 10))
    np.testing.assert_array_equal(got, want)


def test_shuffle_from_a_lane_that_is_not_there():
    code = (
        "\tsetp.gt.u32 %p0, %lane, 15;\n\t@%p0 ret;\n\tshfl.sync.idx.b32 %z0, %a0, 20, 31, 0xFFFF;"
    )
    with pytest.raises(BarrierError, match="reads lane 20"):
        apply(code, [np.zeros(32, "u4")], [np.dtype("u4")])


def test_shuffle_by_a_lane_outside_its_member_mask():
    with pytest.raises(BarrierError, match="leaves out"):
        apply(
            "\tshfl.sync.idx.b32 %z0, %a0, 0, 31, 0xFFFF;", [np.zeros(32, "u4")], [np.dtype("u4")]
        )


def test_warp_barrier_that_one_lane_never_reaches():
    code = """
\tsetp.eq.u32 %p0, %lane, 3;
\t@%p0 bra SPIN;
\tbar.warp.sync -1;
\tret;
SPIN:
\tld.volatile.global.b32 %r0, [%pa0];
\tsetp.eq.u32 %p1, %r0, 0;
\t@%p1 bra SPIN;"""
    memory = GlobalMemory()
    address = memory.allocate("flag", np.zeros(1, "u4"))
    with pytest.raises(DeadlockError, match=r"waits for lanes \[3\]"):
        run(kernel(code, ["u64"]), 32, [address], memory, patience=20)


def test_a_lane_may_wait_for_another_lane_of_its_warp():
    """Forward progress inside a warp: lane 0 spins until lane 31 has stored."""
    code = """
\tsetp.eq.u32 %p0, %lane, 31;
\t@%p0 bra STORE;
SPIN:
\tld.volatile.global.b32 %r0, [%pa0];
\tsetp.eq.u32 %p1, %r0, 0;
\t@%p1 bra SPIN;
\tbra END;
STORE:
\tst.volatile.global.b32 [%pa0], 5;
END:"""
    memory = GlobalMemory()
    address = memory.allocate("flag", np.zeros(1, "u4"))
    run(kernel(code, ["u64"]), 32, [address], memory)
    assert memory.contents(address, 4)[0].view("u4")[0] == 5
