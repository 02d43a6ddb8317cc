"""Integer, logic and bit-field instructions against Python integers."""

import numpy as np
import pytest

from tests.emulator import UnknownInstructionError
from tests.emulator_tests.harness import apply, integers

COUNT = 512


def signed(x, bits):
    return x - (1 << bits) if x >> (bits - 1) else x


def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def bit_field(x, pos, length, bits, is_signed):
    """PTX's definition of bfe, bit by bit."""
    pos, length = pos & 0xFF, length & 0xFF
    sign = 0
    if is_signed and length:
        sign = x >> min(pos + length - 1, bits - 1) & 1
    result = 0
    for i in range(bits):
        inside = i < length and pos + i < bits
        result |= (x >> (pos + i) & 1 if inside else sign) << i
    return result


def insert(a, b, pos, length, bits):
    pos, length = pos & 0xFF, length & 0xFF
    for i in range(length):
        if pos + i < bits:
            b = b & ~(1 << (pos + i)) | (a >> i & 1) << (pos + i)
    return b


def permute(a, b, selector):
    both = (a | b << 32).to_bytes(8, "little")
    out = []
    for i in range(4):
        pick = selector >> 4 * i & 0xF
        byte = both[pick & 7]
        out.append((0xFF if byte & 0x80 else 0) if pick & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def truth(table, a, b, c):
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i
               for i in range(32))  # fmt: skip


def find(x, bits, is_signed):
    if is_signed and x >> (bits - 1):
        x = ~x & ((1 << bits) - 1)
    return x.bit_length() - 1


def saturated(x):
    return min(max(x, -(1 << 31)), (1 << 31) - 1)


S24, S32, S64 = (lambda x, bits=bits: signed(x % (1 << bits), bits) for bits in (24, 32, 64))
CASES = {
    "add.u32": ([32, 32], 32, lambda a, b: a + b),
    "add.s64": ([64, 64], 64, lambda a, b: a + b),
    "add.u16": ([16, 16], 16, lambda a, b: a + b),
    "add.sat.s32": ([32, 32], 32, lambda a, b: saturated(S32(a) + S32(b))),
    "sub.s32": ([32, 32], 32, lambda a, b: a - b),
    "sub.sat.s32": ([32, 32], 32, lambda a, b: saturated(S32(a) - S32(b))),
    "mul.lo.u32": ([32, 32], 32, lambda a, b: a * b),
    "mul.lo.s64": ([64, 64], 64, lambda a, b: a * b),
    "mul.lo.s16": ([16, 16], 16, lambda a, b: a * b),
    "mul.hi.u32": ([32, 32], 32, lambda a, b: a * b >> 32),
    "mul.hi.s32": ([32, 32], 32, lambda a, b: S32(a) * S32(b) >> 32),
    "mul.hi.u64": ([64, 64], 64, lambda a, b: a * b >> 64),
    "mul.hi.s64": ([64, 64], 64, lambda a, b: S64(a) * S64(b) >> 64),
    "mul.wide.u32": ([32, 32], 64, lambda a, b: a * b),
    "mul.wide.s32": ([32, 32], 64, lambda a, b: S32(a) * S32(b)),
    "mul.wide.u16": ([16, 16], 32, lambda a, b: a * b),
    "mul24.lo.u32": ([32, 32], 32, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    "mul24.lo.s32": ([32, 32], 32, lambda a, b: S24(a) * S24(b)),
    "mad.lo.s32": ([32, 32, 32], 32, lambda a, b, c: a * b + c),
    "mad.hi.u32": ([32, 32, 32], 32, lambda a, b, c: (a * b >> 32) + c),
    "mad.wide.s32": ([32, 32, 64], 64, lambda a, b, c: S32(a) * S32(b) + c),
    "mad.wide.u32": ([32, 32, 64], 64, lambda a, b, c: a * b + c),
    "min.s32": ([32, 32], 32, lambda a, b: min(S32(a), S32(b))),
    "min.u64": ([64, 64], 64, min),
    "max.s64": ([64, 64], 64, lambda a, b: max(S64(a), S64(b))),
    "max.u32": ([32, 32], 32, max),
    "max.relu.s32": ([32, 32], 32, lambda a, b: max(S32(a), S32(b), 0)),
    "abs.s32": ([32], 32, lambda a: abs(S32(a))),
    "neg.s64": ([64], 64, lambda a: -a),
    "sad.s32": ([32, 32, 32], 32, lambda a, b, c: c + abs(S32(a) - S32(b))),
    "sad.u32": ([32, 32, 32], 32, lambda a, b, c: c + abs(a - b)),
    "and.b32": ([32, 32], 32, lambda a, b: a & b),
    "or.b64": ([64, 64], 64, lambda a, b: a | b),
    "xor.b16": ([16, 16], 16, lambda a, b: a ^ b),
    "not.b32": ([32], 32, lambda a: ~a),
    "cnot.b32": ([32], 32, lambda a: int(a == 0)),
    "popc.b32": ([32], 32, int.bit_count),
    "popc.b64": ([64], 32, int.bit_count),
    "clz.b32": ([32], 32, lambda a: 32 - a.bit_length()),
    "clz.b64": ([64], 32, lambda a: 64 - a.bit_length()),
    "bfind.u32": ([32], 32, lambda a: find(a, 32, False)),
    "bfind.s32": ([32], 32, lambda a: find(a, 32, True)),
    "bfind.s64": ([64], 32, lambda a: find(a, 64, True)),
    "bfind.shiftamt.u32": ([32], 32, lambda a: 31 - find(a, 32, False) if a else -1),
    "brev.b32": ([32], 32, lambda a: int(f"{a:032b}"[::-1], 2)),
    "brev.b64": ([64], 64, lambda a: int(f"{a:064b}"[::-1], 2)),
    "prmt.b32": ([32, 32, 32], 32, permute),
    "dp4a.u32.u32": ([32, 32, 32], 32, lambda a, b, c: c + sum(
        (a >> 8 * i & 255) * (b >> 8 * i & 255) for i in range(4))),
    "dp4a.s32.u32": ([32, 32, 32], 32, lambda a, b, c: c + sum(
        signed(a >> 8 * i & 255, 8) * (b >> 8 * i & 255) for i in range(4))),
}  # fmt: skip


def check(code, widths, out_bits, expected, values=None):
    rng = np.random.default_rng()
    values = values or [integers(bits, COUNT, rng) for bits in widths]
    (got,) = apply(code, values, [np.dtype(f"u{out_bits // 8}")])
    mask = (1 << out_bits) - 1
    want = [expected(*map(int, row)) & mask for row in zip(*values, strict=True)]
    wrong = [i for i in range(len(want)) if want[i] != int(got[i])]
    assert not wrong, [
        ([hex(int(v[i])) for v in values], hex(want[i]), hex(got[i])) for i in wrong
    ][:3]


@pytest.mark.parametrize("name", CASES)
def test_definition(name):
    widths, out_bits, expected = CASES[name]
    sources = ", ".join(f"%a{i}" for i in range(len(widths)))
    check(f"\t{name} %z0, {sources};", widths, out_bits, expected)


@pytest.mark.parametrize(
    ("kind", "bits"), [("u32", 32), ("s32", 32), ("u64", 64), ("s64", 64), ("s16", 16)]
)
@pytest.mark.parametrize("op", ["div", "rem"])
def test_division_truncates(op, kind, bits):
    rng = np.random.default_rng()
    a, b = integers(bits, COUNT, rng), integers(bits, COUNT, rng)
    b[b == 0] = 7
    see = (lambda x: signed(x, bits)) if kind[0] == "s" else int

    def expected(x, y):
        q = quotient(see(x), see(y))
        return q if op == "div" else see(x) - q * see(y)

    check(f"\t{op}.{kind} %z0, %a0, %a1;", [bits, bits], bits, expected, [a, b])


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
def test_shift_left_clamps(kind):
    bits = int(kind[1:])
    rng = np.random.default_rng()
    values = [integers(bits, COUNT, rng), rng.integers(0, 80, COUNT).astype(np.uint32)]
    check(f"\tshl.{kind} %z0, %a0, %a1;", None, bits, lambda a, n: a << n, values)


@pytest.mark.parametrize("kind", ["u16", "b32", "u64", "s16", "s32", "s64"])
def test_shift_right_clamps(kind):
    bits = int(kind[1:])
    rng = np.random.default_rng()
    values = [integers(bits, COUNT, rng), rng.integers(0, 80, COUNT).astype(np.uint32)]
    see = (lambda x: signed(x, bits)) if kind[0] == "s" else int
    check(f"\tshr.{kind} %z0, %a0, %a1;", None, bits, lambda a, n: see(a) >> n, values)


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
@pytest.mark.parametrize("side", ["l", "r"])
def test_funnel_shift(side, mode):
    rng = np.random.default_rng()
    values = [
        *(integers(32, COUNT, rng) for _ in range(2)),
        rng.integers(0, 70, COUNT).astype("u4"),
    ]

    def expected(low, high, n):
        n = min(n, 32) if mode == "clamp" else n & 31
        both = low | high << 32
        return both << n >> 32 if side == "l" else both >> n

    check(f"\tshf.{side}.{mode}.b32 %z0, %a0, %a1, %a2;", None, 32, expected, values)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(kind):
    bits = int(kind[1:])
    rng = np.random.default_rng()
    values = [integers(bits, COUNT, rng), *(rng.integers(0, 300, COUNT).astype("u4") for _ in "ab")]
    values[1][::2] %= bits
    values[2][::2] %= bits + 1
    check(f"\tbfe.{kind} %z0, %a0, %a1, %a2;", None, bits,
          lambda x, p, n: bit_field(x, p, n, bits, kind[0] == "s"), values)  # fmt: skip


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_field_insert(bits):
    rng = np.random.default_rng()
    values = [*(integers(bits, COUNT, rng) for _ in "ab"),
              *(rng.integers(0, 300, COUNT).astype("u4") for _ in "ab")]  # fmt: skip
    values[2][::2] %= bits
    values[3][::2] %= bits + 1
    check(f"\tbfi.b{bits} %z0, %a0, %a1, %a2, %a3;", None, bits,
          lambda a, b, p, n: insert(a, b, p, n, bits), values)  # fmt: skip


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_bit_mask(mode):
    rng = np.random.default_rng()
    values = [rng.integers(0, 80, COUNT).astype("u4") for _ in "ab"]

    def expected(pos, n):
        pos, n = (min(pos, 32), min(n, 32)) if mode == "clamp" else (pos & 31, n & 31)
        return ((1 << n) - 1) << pos

    check(f"\tbmsk.{mode}.b32 %z0, %a0, %a1;", None, 32, expected, values)


@pytest.mark.parametrize("table", [0xEA, 0xF8, 0x96, 0xCA, 0x80, 0xFE, 0x1D, 0x00, 0xFF, 0x6C])
def test_lop3_truth_table(table):
    check(f"\tlop3.b32 %z0, %a0, %a1, %a2, {table};", [32] * 3, 32,
          lambda a, b, c: truth(table, a, b, c))  # fmt: skip


def test_immediates_and_negatives():
    check("\tadd.s32 %z0, %a0, -5;\n\tand.b32 %z0, %z0, 0xFFFF;", [32], 32,
          lambda a: (a - 5) & 0xFFFF)  # fmt: skip


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("frobnicate.b32 %z0, %a0;", "frobnicate"),
        ("add.wrong.u32 %z0, %a0, %a0;", "wrong"),
        ("add.u8 %z0, %a0, %a0;", "u8"),
        ("add.u32 %z0, %a0, %nosuch;", "nosuch"),
        ("add.u64 %z0, %a0, %a0;", "32 bits where 64"),
    ],
)
def test_unknown_is_an_error_with_its_line(code, named):
    with pytest.raises(UnknownInstructionError, match=named) as caught:
        apply("\t" + code, [np.zeros(1, np.uint32)], [np.dtype("u4")])
    assert "PTX line" in str(caught.value)
