"""Matrix instructions: fragment layouts element by element, sums against exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest

from tests.emulator import BarrierError, GlobalMemory, InFlightError, RaceError
from tests.emulator.dotadd import FRACTION_BITS, fused_dot_add
from tests.emulator_tests.exact import BF16, E4M3, F16, F32
from tests.emulator_tests.harness import apply, kernel, run

KINDS = {"bf16": (BF16, 2, 16), "f16": (F16, 2, 16), "e4m3": (E4M3, 1, 32)}


def small_codes(fmt, shape, rng):
    """Codes of small integers: their products and sums are exact in any order."""
    table = np.array([fmt.round(Fraction(v)) for v in range(-8, 9)])
    values = rng.integers(-8, 9, shape)
    return values, table[values + 8]


def a_fragment(codes, lane, register, per):
    """PTX's table: the elements of A that a lane's register holds."""
    row = lane // 4 + 8 * (register % 2)
    column = (lane % 4) * per + 4 * per * (register // 2)
    return codes[row, column : column + per]


def b_fragment(codes, lane, register, per):
    row = (lane % 4) * per + 4 * per * register
    return codes[row : row + per, lane // 4]


def packed(elements, size):
    return sum(int(e) << 8 * size * i for i, e in enumerate(elements))


@pytest.mark.parametrize(("name", "k"), [("bf16", 16), ("bf16", 8), ("f16", 16), ("e4m3", 32)])
def test_mma_fragments(name, k):
    fmt, size, _ = KINDS[name]
    rng = np.random.default_rng()
    per = 4 // size
    a_values, a = small_codes(fmt, (16, k), rng)
    b_values, b = small_codes(fmt, (k, 8), rng)
    c = rng.integers(-100, 100, (16, 8)).astype("f4")
    registers = k * size // 8
    inputs = [np.array([packed(a_fragment(a, lane, r, per), size) for lane in range(32)], "u4")
              for r in range(registers)]  # fmt: skip
    inputs += [np.array([packed(b_fragment(b, lane, r, per), size) for lane in range(32)], "u4")
               for r in range(registers // 2)]  # fmt: skip
    where = [
        [(lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2) for lane in range(32)] for i in range(4)
    ]
    inputs += [np.array([c[p] for p in places], "f4").view("u4") for places in where]
    names = [f"%a{i}" for i in range(len(inputs))]
    code = (
        f"\tmma.sync.aligned.m16n8k{k}.row.col.f32.{name}.{name}.f32 {{%z0, %z1, %z2, %z3}}, "
        f"{{{', '.join(names[:registers])}}}, "
        f"{{{', '.join(names[registers : registers * 3 // 2])}}}, {{{', '.join(names[-4:])}}};"
    )
    got = apply(code, inputs, [np.dtype("u4")] * 4)
    want = a_values @ b_values + c
    for i, places in enumerate(where):
        np.testing.assert_array_equal(got[i].view("f4"), [want[p] for p in places])


def exact_dot(fmt, a, b, c):
    """The documented rule in exact arithmetic, for one output element."""

    def exponent(f, code):
        magnitude = code & (f.sign - 1)
        if magnitude == 0:
            return -126
        return max(magnitude >> f.mantissa_bits, 1) - f.bias

    terms = [(fmt.value(x) * fmt.value(y), exponent(fmt, x) + exponent(fmt, y))
             for x, y in zip(a, b, strict=True)]  # fmt: skip
    terms.append((F32.value(c), exponent(F32, c)))
    unit = Fraction(2) ** (max(e for _, e in terms) - FRACTION_BITS)
    total = sum(int(value / unit) for value, _ in terms)  # int() truncates toward zero
    return F32.round(total * unit, "rz")


@pytest.mark.parametrize(
    ("fmt", "smallest", "spread"), [(BF16, -126, 30), (F16, -14, 8), (BF16, -126, 2)]
)
def test_dot_product_rule(fmt, smallest, spread):
    """Random magnitudes: aligned to the largest exponent, truncated, summed, truncated."""
    rng = np.random.default_rng()
    n, k = 24, 16

    def draw(f, shape, wide):
        exponent = rng.integers(f.bias - wide, f.bias + wide, shape)
        mantissa = rng.integers(0, 1 << f.mantissa_bits, shape)
        sign = rng.integers(0, 2, shape) * f.sign
        return np.where(rng.random(shape) < 0.1, 0, exponent << f.mantissa_bits | mantissa | sign)

    a, b, c = draw(fmt, (n, k), spread), draw(fmt, (8, k), spread), draw(F32, (n, 8), spread)
    value = np.vectorize(lambda x: float(fmt.value(int(x))))
    got = fused_dot_add(value(a), value(b), c.astype("u4").view("f4"), smallest)
    for i in range(n):
        for j in range(8):
            row, column = [int(x) for x in a[i]], [int(x) for x in b[j]]
            assert int(got[i, j]) == exact_dot(fmt, row, column, int(c[i, j]))


def test_dot_product_of_special_values():
    a = np.ones((4, 16), np.float32)
    b = np.ones((8, 16), np.float32)
    a[0, 3], a[1, 3], a[2, 5] = np.nan, np.inf, np.inf
    a[2, 6] = -np.inf
    got = fused_dot_add(a, b, np.zeros((4, 8), np.float32), -126)
    assert (got[0] == 0x7FFFFFFF).all()
    assert (got[1] == 0x7F800000).all()
    assert (got[2] == 0x7FFFFFFF).all()
    assert (got[3].view("f4") == 16).all()


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(count, trans):
    """Matrices with padded rows in shared memory, loaded, stored elsewhere the same way."""
    rng = np.random.default_rng()
    stride = 48
    data = rng.integers(0, 1 << 16, (count * 8, 8)).astype("u2")
    registers = ", ".join(f"%r{i}" for i in range(10, 10 + count))
    outputs = "\n".join(f"\tst.global.b32 [%d0+{128 * i}], %r{10 + i};" for i in range(count))
    code = f"""
\tmul.wide.u32 %d0, %lane, 16;
\tadd.u64 %d0, %d0, %pa0;
\tsetp.lt.u32 %p0, %lane, {8 * count};
\tmad.lo.u32 %r0, %lane, {stride}, %sm;
\t@!%p0 bra SKIP;
\tld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%d0];
\tst.shared.v4.b32 [%r0], {{%r1, %r2, %r3, %r4}};
SKIP:
\tbar.warp.sync -1;
\tldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r0];
\tmul.wide.u32 %d0, %lane, 4;
\tadd.u64 %d0, %d0, %pa1;
{outputs}
\tstmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r0+8192], {{{registers}}};
\tbar.warp.sync -1;
\t@!%p0 bra END;
\tld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r0+8192];
\tmul.wide.u32 %d0, %lane, 16;
\tadd.u64 %d0, %d0, %pa2;
\tst.global.v4.b32 [%d0], {{%r1, %r2, %r3, %r4}};
END:"""
    memory = GlobalMemory()
    source = memory.allocate("source", data)
    loaded, stored = memory.allocate("loaded", 128 * count), memory.allocate("stored", data.nbytes)
    run(kernel(code, ["u64"] * 3), 32, [source, loaded, stored], memory, shared=16384)
    np.testing.assert_array_equal(memory.contents(stored, data.nbytes)[0].view("u2"), data.ravel())
    words = memory.contents(loaded, 128 * count)[0].view("u2").reshape(count, 32, 2)
    for i, matrix in enumerate(data.reshape(count, 8, 8)):
        matrix = matrix.T if trans else matrix
        for lane in range(32):
            row, column = lane // 4, lane % 4 * 2
            np.testing.assert_array_equal(words[i, lane], matrix[row, column : column + 2])


def test_movmatrix_transposes():
    data = np.arange(64, dtype=np.uint16).reshape(8, 8)
    (got,) = apply("\tmovmatrix.sync.aligned.m8n8.trans.b16 %z0, %a0;",
                   [data.view("u4").ravel()], [np.dtype("u4")])  # fmt: skip
    np.testing.assert_array_equal(got.view("u2").reshape(8, 8), data.T)


# wgmma: the tile of B in shared memory is written by ordinary stores, swizzled by hand.

WGMMA = """
\tmul.wide.u32 %d0, %thread, 4;
\tmov.b32 %r60, 0;
FILL:
\tmad.lo.u32 %r61, %r60, 128, %thread;
\tmul.wide.u32 %d1, %r61, 4;
\tadd.u64 %d1, %d1, %pa1;
\tld.global.b32 %r62, [%d1];
\tmad.lo.u32 %r63, %r61, 4, %sm;
\tst.shared.b32 [%r63], %r62;
\tadd.u32 %r60, %r60, 1;
\tsetp.lt.u32 %p0, %r60, {fills};
\t@%p0 bra FILL;
\t{fence}
\tbar.sync 0;
\tmov.b32 %r70, 0;
\tcvt.u64.u32 %d2, %sm;
\tshr.u64 %d2, %d2, 4;
\tor.b64 %d2, %d2, {descriptor};
{loads}
{zeros}
\tsetp.eq.u32 %p1, 0, 0;
\t{own_fence}
{products}
\twgmma.commit_group.sync.aligned;
\t{wait}
{stores}
\twgmma.wait_group.sync.aligned 0;
"""


def swizzled(b_codes, mode):
    """Bytes of a K-major tile [n, 64 bf16] (16 for mode 0) and its descriptor fields."""
    n, k = b_codes.shape
    if mode == 0:  # core matrices of 8 rows x 16 bytes, adjacent in K
        image = b_codes.reshape(n // 8, 8, k // 8, 8).transpose(0, 2, 1, 3)
        return image.tobytes(), 128, 128 * (k // 8)
    width = {1: 128, 2: 64, 3: 32}[mode]
    image = np.zeros(n * width, np.uint8)
    data = b_codes.view(np.uint8).reshape(n, width)
    for row in range(n):
        for piece in range(width // 16):
            at = row * width + piece * 16
            at ^= (at >> 7 & {1: 7, 2: 3, 3: 1}[mode]) << 4
            image[at : at + 16] = data[row, piece * 16 : piece * 16 + 16]
    return image.tobytes(), 16, 8 * width


def run_wgmma(a, b_codes, n, mode, fence="fence.proxy.async.shared::cta;",
              wait="wgmma.wait_group.sync.aligned 0;",
              own_fence="wgmma.fence.sync.aligned;"):  # fmt: skip
    image, leading, stride = swizzled(b_codes, mode)
    steps = b_codes.shape[1] // 16
    descriptor = leading // 16 << 16 | stride // 16 << 32 | mode << 62
    sums = [f"%r{i}" for i in range(n // 2)]
    rows = [[f"%r{40 + 4 * s + i}" for i in range(4)] for s in range(steps)]
    advance = 2 * leading // 16 if mode == 0 else 2
    products = "\n".join(
        f"\tadd.u64 %d3, %d2, {s * advance};\n"
        f"\twgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{', '.join(sums)}}}, "
        f"{{{', '.join(rows[s])}}}, %d3, %p1, 1, 1, 0;"
        for s in range(steps)
    )
    loads = "\n".join(
        f"\tadd.u64 %d4, %d0, {512 * (4 * s + i)};\n\tadd.u64 %d4, %d4, %pa0;\n"
        f"\tld.global.b32 {rows[s][i]}, [%d4];"
        for s in range(steps)
        for i in range(4)
    )
    stores = "\n".join(
        f"\tadd.u64 %d4, %d0, {512 * i};\n\tadd.u64 %d4, %d4, %pa2;\n\tst.global.b32 [%d4], {r};"
        for i, r in enumerate(sums)
    )
    code = WGMMA.format(
        fills=len(image) // 512, fence=fence, own_fence=own_fence,
        wait=wait, descriptor=descriptor, loads=loads,
        zeros="\n".join(f"\tmov.b32 {r}, 0;" for r in sums), products=products, stores=stores,
    )  # fmt: skip
    fragments = np.array(
        [[packed(a_fragment(a[16 * (t // 32) :][:16], t % 32, r % 4, 2) if r < 4 else
                 a_fragment(a[16 * (t // 32) :][:16, 16 * (r // 4) :], t % 32, r % 4, 2), 2)
          for t in range(128)] for r in range(4 * steps)], "u4")  # fmt: skip
    memory = GlobalMemory()
    places = [memory.allocate("a", fragments), memory.allocate("b", np.frombuffer(image, "u4")),
              memory.allocate("d", 512 * n // 2)]  # fmt: skip
    run(kernel(code, ["u64"] * 3), 128, places, memory, shared=8192)
    got = memory.contents(places[2], 256 * n)[0].view("f4").reshape(n // 2, 128)
    matrix = np.zeros((64, n))
    for i in range(n // 2):
        for t in range(128):
            row = 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2)
            matrix[row, 8 * (i // 4) + t % 4 * 2 + i % 2] = got[i, t]
    return matrix


@pytest.mark.parametrize("n", [8, 16, 32])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_wgmma_reads_swizzled_tiles(mode, n):
    rng = np.random.default_rng()
    k = {0: 32, 1: 64, 2: 32, 3: 16}[mode]
    a_values, a = small_codes(BF16, (64, k), rng)
    b_values, b = small_codes(BF16, (n, k), rng)
    if n * k * 2 % 512:
        n_pad = 512 // (k * 2)
        b_values, b = (np.resize(x, (max(n, n_pad), k)) for x in (b_values, b))
    got = run_wgmma(a.astype("u2"), b.astype("u2"), n, mode)
    np.testing.assert_array_equal(got, a_values @ b_values[:n].T)


def test_wgmma_without_a_proxy_fence():
    zeros = np.zeros((64, 64), "u2")
    with pytest.raises(RaceError, match=r"fence\.proxy\.async"):
        run_wgmma(zeros, zeros[:8], 8, 1, fence="")


def test_wgmma_without_its_own_fence():
    zeros = np.zeros((64, 64), "u2")
    with pytest.raises(BarrierError, match=r"no wgmma\.fence since"):
        run_wgmma(zeros, zeros[:8], 8, 1, own_fence="")


def test_wgmma_sums_used_before_the_wait():
    zeros = np.zeros((64, 64), "u2")
    with pytest.raises(InFlightError, match=r"before wgmma\.wait_group"):
        run_wgmma(zeros, zeros[:8], 8, 1, wait="")


def test_wgmma_tile_overwritten_before_the_wait():
    zeros = np.zeros((64, 64), "u2")
    wait = "st.shared.b32 [%sm], 1;\n\twgmma.wait_group.sync.aligned 0;"
    with pytest.raises(RaceError, match="overwrites what lane 0"):
        run_wgmma(zeros, zeros[:8], 8, 1, wait=wait)
