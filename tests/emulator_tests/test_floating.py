"""float32, float64 and packed 16-bit arithmetic against exact rational arithmetic."""

import math

import numpy as np
import pytest

from tests.emulator.ops.floating import APPROX_ULP
from tests.emulator_tests import exact
from tests.emulator_tests.exact import BF16, F16, F32, F64
from tests.emulator_tests.harness import apply, floats

COUNT = 1024
FORMATS = {"f32": F32, "f64": F64, "f16": F16, "bf16": BF16}


def codes(name, count=COUNT):
    fmt = FORMATS[name]
    bits = 1 + fmt.exponent_bits + fmt.mantissa_bits
    return floats(bits, fmt.mantissa_bits, count, np.random.default_rng())


def check(code, values, dtype, expected):
    (got,) = apply(code, values, [np.dtype(dtype)])
    want = [expected(*map(int, row)) for row in zip(*values, strict=True)]
    wrong = [i for i in range(len(want)) if want[i] != int(got[i])]
    assert not wrong, [
        ([hex(int(v[i])) for v in values], hex(want[i]), hex(got[i])) for i in wrong
    ][:3]


def negate(fmt, bits):
    return bits ^ fmt.sign


@pytest.mark.parametrize("mode", ["", ".rn", ".rz", ".rm", ".rp"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_f32_rounding_modes(op, mode):
    if op == "fma" and not mode:
        mode = ".rn"
    rounding = mode[1:] or "rn"
    values = [codes("f32") for _ in range(3 if op == "fma" else 2)]
    functions = {
        "add": lambda a, b: exact.add(F32, a, b, rounding),
        "sub": lambda a, b: exact.add(F32, a, b if F32.is_nan(b) else negate(F32, b), rounding),
        "mul": lambda a, b: exact.multiply(F32, a, b, rounding),
        "fma": lambda a, b, c: exact.fma(F32, a, b, c, rounding),
    }
    sources = ", ".join(f"%a{i}" for i in range(len(values)))
    check(f"\t{op}{mode}.f32 %z0, {sources};", values, "u4", functions[op])


def test_fma_where_rounding_twice_goes_wrong():
    """Products whose float64 sum with c falls on a midpoint of float32, and subnormal results."""
    rng = np.random.default_rng()
    a = (np.uint32(0x3F800000) | rng.integers(0, 1 << 23, COUNT).astype("u4")).astype("u4")
    b = (np.uint32(0x3F800000) | rng.integers(0, 1 << 12, COUNT).astype("u4")).astype("u4")
    product = a.view("f4").astype("f8") * b.view("f4")
    rounded = product.astype("f4")
    half = np.spacing(rounded).astype("f8") / 2
    c = (rounded.astype("f8") + half - product).astype("f4")
    c = (
        np.where(rng.integers(0, 2, COUNT), np.nextafter(c, np.float32(9)), c)
        .astype("f4")
        .view("u4")
    )
    c[::4] = rng.integers(0, 1 << 23, c[::4].size)
    a[::4] = rng.integers(0x00800000, 0x10000000, a[::4].size)
    check("\tfma.rn.f32 %z0, %a0, %a1, %a2;", [a, b, c], "u4", lambda *v: exact.fma(F32, *v))


@pytest.mark.parametrize("op", ["add", "mul", "fma.rn"])
def test_f32_flush_to_zero(op):
    values = [codes("f32") for _ in range(3 if op == "fma.rn" else 2)]
    function = {"add": exact.add, "mul": exact.multiply, "fma.rn": exact.fma}[op]

    def expected(*operands):
        result = function(F32, *[exact.flushed(F32, x) for x in operands])
        return exact.flushed(F32, result)

    sources = ", ".join(f"%a{i}" for i in range(len(values)))
    check(f"\t{op}.ftz.f32 %z0, {sources};", values, "u4", expected)


def test_f32_saturate():
    values = [codes("f32"), codes("f32")]

    def expected(a, b):
        result = exact.add(F32, a, b)
        if F32.is_nan(result) or F32.negative(result):
            return 0
        return min(result, 0x3F800000)

    check("\tadd.sat.f32 %z0, %a0, %a1;", values, "u4", expected)


@pytest.mark.parametrize("op", ["add.f64", "mul.f64"])
def test_f64(op):
    function = exact.add if op == "add.f64" else exact.multiply
    values = [codes("f64", 256), codes("f64", 256)]
    check(f"\t{op} %z0, %a0, %a1;", values, "u8", lambda a, b: function(F64, a, b))


def test_division_and_square_root_round_to_nearest():
    values = [codes("f32"), codes("f32")]
    check("\tdiv.rn.f32 %z0, %a0, %a1;", values, "u4", lambda a, b: exact.divide(F32, a, b))
    one = F32.round(exact.Fraction(1))
    check("\trcp.rn.f32 %z0, %a0;", values[:1], "u4", lambda a: exact.divide(F32, one, a))
    check("\tsqrt.rn.f32 %z0, %a0;", values[:1], "u4", lambda a: exact.square_root(F32, a))


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("nan", ["", ".NaN"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_minimum_and_maximum(op, nan, name):
    fmt = FORMATS[name]

    def order(bits):
        magnitude = bits & (fmt.sign - 1)
        return -magnitude - 1 if bits & fmt.sign else magnitude

    def expected(a, b):
        if fmt.is_nan(a) or fmt.is_nan(b):
            if nan or (fmt.is_nan(a) and fmt.is_nan(b)):
                return fmt.nan
            return b if fmt.is_nan(a) else a
        return (min if op == "min" else max)(a, b, key=order)

    values = [codes(name), codes(name)]
    check(f"\t{op}{nan}.{name} %z0, %a0, %a1;", values, values[0].dtype, expected)


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_packed_arithmetic(op, name):
    fmt = FORMATS[name]
    count = 3 if op == "fma" else 2
    halves = [[codes(name), codes(name)] for _ in range(count)]
    values = [low.astype("u4") | high.astype("u4") << 16 for low, high in halves]
    functions = {
        "add": lambda a, b: exact.add(fmt, a, b),
        "sub": lambda a, b: exact.add(fmt, a, b if fmt.is_nan(b) else negate(fmt, b)),
        "mul": lambda a, b: exact.multiply(fmt, a, b),
        "fma": lambda a, b, c: exact.fma(fmt, a, b, c),
    }

    def expected(*words):
        low = functions[op](*[w & 0xFFFF for w in words])
        return low | functions[op](*[w >> 16 for w in words]) << 16

    sources = ", ".join(f"%a{i}" for i in range(count))
    check(f"\t{op}.rn.{name}x2 %z0, {sources};", values, "u4", expected)


def test_fma_relu_of_a_pair():
    values = [codes("bf16").astype("u4") for _ in range(3)]

    def expected(*words):
        result = exact.fma(BF16, *words)
        return 0 if BF16.negative(result) and not BF16.is_nan(result) else result

    (got,) = apply("\tfma.rn.relu.bf16x2 %z0, %a0, %a1, %a2;", values, [np.dtype("u4")])
    want = [expected(*map(int, row)) for row in zip(*values, strict=True)]
    np.testing.assert_array_equal(got & 0xFFFF, want)


@pytest.mark.parametrize("name", ["f32", "f16x2", "bf16x2"])
def test_sign_operations_keep_every_other_bit(name):
    values = [codes("f32")]
    top = 0x80000000 if name == "f32" else 0x80008000
    check(f"\tneg.{name} %z0, %a0;", values, "u4", lambda a: a ^ top)
    check(f"\tabs.{name} %z0, %a0;", values, "u4", lambda a: a & ~top)


FUNCTIONS = {
    "ex2": lambda x: 2.0**x,
    "lg2": math.log2,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sqrt": math.sqrt,
    "tanh": math.tanh,
    "sin": math.sin,
    "cos": math.cos,
}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_approximate_functions_are_within_half_an_ulp(op):
    """Tighter than PTX's own bounds, which `APPROX_ULP` lists for comparisons with a card."""
    rng = np.random.default_rng()
    x = rng.uniform(0.01, 30, COUNT).astype(np.float32)
    if op in ("ex2", "tanh", "sin", "cos"):
        x *= rng.choice([-1, 1], COUNT).astype(np.float32)
    (got,) = apply(f"\t{op}.approx.f32 %z0, %a0;", [x.view("u4")], [np.dtype("u4")])
    want = np.array([FUNCTIONS[op](float(v)) for v in x])
    ulp = np.spacing(np.abs(want).astype(np.float32)).astype(float)
    assert (np.abs(got.view("f4") - want) <= 0.5001 * ulp).all()
    assert APPROX_ULP[op] >= 1


def test_approximate_special_cases():
    table = {
        "ex2.approx.ftz": [(0x7F800000, 0x7F800000), (0xFF800000, 0), (0x00000001, 0x3F800000)],
        "lg2.approx": [(0, 0xFF800000), (0xBF800000, 0x7FFFFFFF), (0x7F800000, 0x7F800000)],
        "rcp.approx.ftz": [(0, 0x7F800000), (0x80000000, 0xFF800000), (0xFF800000, 0x80000000),
                           (0x00000001, 0x7F800000)],
        "rsqrt.approx": [(0, 0x7F800000), (0x7F800000, 0), (0xBF800000, 0x7FFFFFFF)],
        "tanh.approx": [(0x7F800000, 0x3F800000), (0xFF800000, 0xBF800000)],
    }  # fmt: skip
    for name, rows in table.items():
        inputs, outputs = (np.array(column, np.uint32) for column in zip(*rows, strict=True))
        (got,) = apply(f"\t{name}.f32 %z0, %a0;", [inputs], [np.dtype("u4")])
        np.testing.assert_array_equal(got, outputs, err_msg=name)


@pytest.mark.parametrize("name", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(
    "test",
    ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"],
)
def test_comparisons(test, name):
    fmt = FORMATS[name]
    values = [codes(name), codes(name)]
    values[1][::3] = values[0][::3]

    def number(bits):
        if fmt.is_infinite(bits):
            return math.inf * (-1 if fmt.negative(bits) else 1)
        return fmt.value(bits)

    def expected(a, b):
        unordered = fmt.is_nan(a) or fmt.is_nan(b)
        if test in ("num", "nan"):
            return int(unordered == (test == "nan"))
        if unordered:
            return int(test.endswith("u"))
        x, y = number(a), number(b)
        relation = {
            "eq": x == y,
            "ne": x != y,
            "lt": x < y,
            "le": x <= y,
            "gt": x > y,
            "ge": x >= y,
        }
        return int(relation[test[:2]])

    code = f"\tsetp.{test}.{name} %p0, %a0, %a1;\n\tselp.b32 %z0, 1, 0, %p0;"
    check(code, values, "u4", expected)


def test_setp_combines_and_gives_both_results():
    rng = np.random.default_rng()
    a, b, c = (rng.integers(0, 3, COUNT).astype("u4") for _ in range(3))
    code = (
        "\tsetp.ne.u32 %p2, %a2, 0;\n\tsetp.lt.and.s32 %p0|%p1, %a0, %a1, !%p2;\n"
        "\tselp.b32 %z0, 1, 0, %p0;\n\tselp.b32 %z1, 1, 0, %p1;"
    )
    first, second = apply(code, [a, b, c], [np.dtype("u4")] * 2)
    np.testing.assert_array_equal(first, (a < b) & (c == 0))
    np.testing.assert_array_equal(second, ~(a < b) & (c == 0))


def test_slct_selects_by_sign():
    rng = np.random.default_rng()
    a, b = (rng.integers(0, 1 << 32, COUNT, dtype=np.uint64).astype("u4") for _ in range(2))
    c = codes("f32")
    check(
        "\tslct.b32.f32 %z0, %a0, %a1, %a2;",
        [a, b, c],
        "u4",
        lambda x, y, s: y if F32.is_nan(s) or (F32.negative(s) and s != F32.sign) else x,
    )
