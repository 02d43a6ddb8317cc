"""`cvt` against exact rational arithmetic."""

from fractions import Fraction

import numpy as np
import pytest

from tests.emulator import UnknownInstructionError
from tests.emulator_tests import exact
from tests.emulator_tests.exact import BF16, E2M1, E4M3, E5M2, F16, F32, F64
from tests.emulator_tests.harness import apply, floats, integers

COUNT = 1024
FORMATS = {"f32": F32, "f64": F64, "f16": F16, "bf16": BF16}


def codes(name, count=COUNT):
    fmt = FORMATS[name]
    bits = 1 + fmt.exponent_bits + fmt.mantissa_bits
    return floats(bits, fmt.mantissa_bits, count, np.random.default_rng())


def check(code, values, dtype, expected, mask=None):
    target = "sm_100a" if "e2m1" in code or "ue8m0" in code else "sm_90a"
    (got,) = apply(code, values, [np.dtype(dtype)], target=target)
    want = [expected(*map(int, row)) for row in zip(*values, strict=True)]
    if mask is not None:
        got = got & np.dtype(dtype).type(mask)
    wrong = [i for i in range(len(want)) if want[i] != int(got[i])]
    assert not wrong, [
        ([hex(int(v[i])) for v in values], hex(want[i]), hex(got[i])) for i in wrong
    ][:3]


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "s16", "u8"])
def test_float_to_integer_saturates(kind, mode):
    bits = int(kind[1:])
    low, high = (
        (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    )

    def expected(code):
        if F32.is_nan(code):
            return 1 << 63 if bits == 64 else 0
        if F32.is_infinite(code):
            return (low if F32.negative(code) else high) & ((1 << max(bits, 16)) - 1)
        value = F32.value(code)
        floor = value.numerator // value.denominator
        ceiling = -(-value.numerator // value.denominator)
        nearest = floor if value - floor < Fraction(1, 2) else ceiling
        if value - floor == Fraction(1, 2):
            nearest = floor if floor % 2 == 0 else ceiling
        rounded = {"rni": nearest, "rmi": floor, "rpi": ceiling,
                   "rzi": floor if value >= 0 else ceiling}[mode]  # fmt: skip
        return min(max(rounded, low), high) & ((1 << max(bits, 16)) - 1)

    rng = np.random.default_rng()
    values = rng.uniform(-70000, 70000, COUNT).astype("f4")
    values[: COUNT // 2] = codes("f32", COUNT // 2).view("f4")
    values[-200:] = rng.integers(-300, 300, 200) + 0.5
    dtype = f"u{max(bits, 16) // 8}"
    check(f"\tcvt.{mode}.{kind}.f32 %z0, %a0;", [values.view("u4")], dtype, expected)


@pytest.mark.parametrize("target", ["f32", "f64", "bf16", "f16"])
@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "u8", "s16"])
def test_integer_to_float(kind, target):
    bits = int(kind[1:])
    if (kind, target) == ("u8", "bf16"):
        return  # PTX has no such conversion
    fmt = FORMATS[target]
    values = integers(max(bits, 16), 300, np.random.default_rng())

    def expected(x):
        x &= (1 << bits) - 1
        if kind[0] == "s" and x >> (bits - 1):
            x -= 1 << bits
        return fmt.round(Fraction(x))

    dtype = f"u{(1 + fmt.exponent_bits + fmt.mantissa_bits) // 8}"
    check(f"\tcvt.rn.{target}.{kind} %z0, %a0;", [values], dtype, expected)


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_integer_to_float_directed(mode):
    values = integers(32, 300, np.random.default_rng())
    check(f"\tcvt.{mode}.f32.u32 %z0, %a0;", [values], "u4", lambda x: F32.round(Fraction(x), mode))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("u32", "u8"),
        ("s32", "s8"),
        ("s64", "s32"),
        ("u64", "u32"),
        ("u16", "u32"),
        ("s32", "s16"),
        ("u32", "u64"),
    ],
)
def test_integer_widths(kind, source):
    bits, from_bits = int(kind[1:]), int(source[1:])
    values = integers(max(from_bits, 16), COUNT, np.random.default_rng())

    def expected(x):
        x &= (1 << from_bits) - 1
        if source[0] == "s" and x >> (from_bits - 1):
            x -= 1 << from_bits
        return x & ((1 << bits) - 1)

    check(f"\tcvt.{kind}.{source} %z0, %a0;", [values], f"u{bits // 8}", expected)


@pytest.mark.parametrize(
    ("kind", "source"),
    [("s8", "s32"), ("u8", "s32"), ("u16", "s32"), ("s32", "s64"), ("u32", "s64")],
)
def test_integer_saturation(kind, source):
    bits, from_bits = int(kind[1:]), int(source[1:])
    low, high = (
        (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    )
    values = integers(from_bits, COUNT, np.random.default_rng())

    def expected(x):
        x -= (1 << from_bits) if x >> (from_bits - 1) else 0
        return min(max(x, low), high) & ((1 << max(bits, 16)) - 1)

    check(f"\tcvt.sat.{kind}.{source} %z0, %a0;", [values], f"u{max(bits, 16) // 8}", expected)


@pytest.mark.parametrize(
    ("to", "source", "mode"),
    [
        ("f16", "f32", "rn"),
        ("f16", "f32", "rz"),
        ("bf16", "f32", "rn"),
        ("bf16", "f32", "rz"),
        ("f32", "f64", "rn"),
        ("f32", "f64", "rz"),
        ("f32", "f64", "rm"),
        ("f32", "f64", "rp"),
    ],
)
def test_float_narrowing(to, source, mode):
    fmt = FORMATS[to]
    values = codes(source)
    if source == "f32":
        values[::2] = (codes(to, values[::2].size).astype("u4") << 16) + np.uint32(0x8000)
    dtype = f"u{(1 + fmt.exponent_bits + fmt.mantissa_bits) // 8}"
    check(f"\tcvt.{mode}.{to}.{source} %z0, %a0;", [values], dtype,
          lambda x: exact.convert(FORMATS[source], fmt, x, mode))  # fmt: skip


@pytest.mark.parametrize(("to", "source"), [("f32", "f16"), ("f32", "bf16"), ("f64", "f32")])
def test_float_widening(to, source):
    fmt = FORMATS[to]
    dtype = f"u{(1 + fmt.exponent_bits + fmt.mantissa_bits) // 8}"
    check(f"\tcvt.{to}.{source} %z0, %a0;", [codes(source)], dtype,
          lambda x: exact.convert(FORMATS[source], fmt, x))  # fmt: skip


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_float_to_integral_float(mode):
    rng = np.random.default_rng()
    values = rng.uniform(-1000, 1000, COUNT).astype("f4")
    values[::5] = rng.integers(-50, 50, values[::5].size) + 0.5
    functions = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    (got,) = apply(f"\tcvt.{mode}.f32.f32 %z0, %a0;", [values.view("u4")], [np.dtype("u4")])
    np.testing.assert_array_equal(got.view("f4"), functions[mode](values))


def relu(fmt, bits):
    return 0 if fmt.negative(bits) and not fmt.is_nan(bits) else bits


@pytest.mark.parametrize("options", ["rn", "rz", "rn.relu", "rn.satfinite"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_pairs(name, options):
    fmt = FORMATS[name]
    mode = options[:2]

    def one(x):
        result = exact.convert(F32, fmt, x, mode, "satfinite" in options)
        return relu(fmt, result) if "relu" in options else result

    check(f"\tcvt.{options}.{name}x2.f32 %z0, %a0, %a1;", [codes("f32"), codes("f32")], "u4",
          lambda high, low: one(low) | one(high) << 16)  # fmt: skip


SMALL = {"e4m3": (E4M3, 8), "e5m2": (E5M2, 8), "e2m1": (E2M1, 4)}


def near(fmt, count=COUNT):
    """float32 around and between the values of a small format, its midpoints included."""
    rng = np.random.default_rng()
    values = np.array([float(fmt.value(c)) for c in range(fmt.finite_top + 1)])
    middles = (values[1:] + values[:-1]) / 2
    pool = np.concatenate(
        [values, middles, np.nextafter(middles.astype("f4"), np.float32(0)), values * 3]
    )
    picked = rng.choice(pool, count) * rng.choice([-1, 1], count)
    picked[: count // 4] = rng.normal(size=count // 4) * float(values[-1])
    picked[:4] = [np.inf, -np.inf, np.nan, 0.0]
    return picked.astype("f4").view("u4")


@pytest.mark.parametrize("with_relu", ["", ".relu"])
@pytest.mark.parametrize("name", SMALL)
def test_small_floats_saturate_and_round_to_even(name, with_relu):
    fmt, width = SMALL[name]

    def one(x):
        if F32.is_infinite(x):
            code = fmt.finite_top | (fmt.sign if F32.negative(x) else 0)
        else:
            code = exact.convert(F32, fmt, x, saturate=True)
        negative = with_relu and F32.negative(x) and not F32.is_nan(x)
        return 0 if negative else code

    code = f"\tcvt.rn.satfinite{with_relu}.{name}x2.f32 %z0, %a0, %a1;"
    if width == 4:
        code = "\t{ .reg .b8 t;\n" + code.replace("%z0", "t") + "\n\tcvt.u16.u8 %z0, t; }"
    check(code, [near(fmt), near(fmt)], "u2", lambda high, low: one(low) | one(high) << width,
          mask=(1 << 2 * width) - 1)  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_small_floats_widen_exactly(name):
    fmt, width = SMALL[name]
    values = np.arange(1 << 2 * width, dtype=np.uint64).astype("u2")

    def one(code):
        return exact.convert(fmt, F16, code) if fmt.nan is None or not fmt.is_nan(code) else F16.nan

    code = f"\tcvt.rn.f16x2.{name}x2 %z0, %a0;"
    if width == 4:
        code = "\t{ .reg .b8 t;\n\tcvt.u8.u16 t, %a0;\n" + code.replace("%a0", "t") + "\n\t}"
    mask = (1 << width) - 1
    check(code, [values], "u4", lambda x: one(x & mask) | one(x >> width) << 16)


@pytest.mark.parametrize("mode", ["rz", "rp"])
@pytest.mark.parametrize("source", ["f32", "bf16x2"])
def test_power_of_two_scales(source, mode):
    fmt = F32 if source == "f32" else BF16

    def one(x):
        if fmt.is_nan(x):
            return 255
        if fmt.is_infinite(x):
            return 254
        value = abs(fmt.value(x))
        if value == 0:
            return 0
        power = exact.floor_log2(value)
        if mode == "rp" and value != Fraction(2) ** power:
            power += 1
        return min(max(power + 127, 0), 254)

    if source == "f32":
        values = [codes("f32"), codes("f32")]
        check(f"\tcvt.{mode}.satfinite.ue8m0x2.f32 %z0, %a0, %a1;", values, "u2",
              lambda high, low: one(low) | one(high) << 8)  # fmt: skip
    else:
        low, high = codes("bf16").astype("u4"), codes("bf16").astype("u4")
        check(f"\tcvt.{mode}.satfinite.ue8m0x2.bf16x2 %z0, %a0;", [low | high << 16], "u2",
              lambda x: one(x & 0xFFFF) | one(x >> 16) << 8)  # fmt: skip


def test_scales_widen_exactly():
    values = np.arange(1 << 16, dtype=np.uint32)[::7].astype("u2")

    def one(code):
        return BF16.nan if code == 255 else BF16.round(Fraction(2) ** (code - 127))

    check("\tcvt.rn.bf16x2.ue8m0x2 %z0, %a0;", [values], "u4",
          lambda x: one(x & 255) | one(x >> 8) << 16)  # fmt: skip


@pytest.mark.parametrize("name", ["cvt.rna.tf32.f32", "cvt.rn.e4m3x2.f32", "cvt.s32.f32"])
def test_unknown_conversion_is_an_error(name):
    with pytest.raises(UnknownInstructionError, match="PTX line"):
        apply(f"\t{name} %z0, %a0;", [codes("f32")], [np.dtype("u4")])


@pytest.mark.parametrize("name", ["cvt.rn.satfinite.e2m1x2.f32", "cvt.rz.satfinite.ue8m0x2.f32"])
def test_conversion_that_the_target_lacks(name):
    with pytest.raises(UnknownInstructionError, match="needs sm_100"):
        apply(f"\t{name} %z0, %a0, %a0;", [codes("f32")], [np.dtype("u2")])
