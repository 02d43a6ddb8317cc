"""MXFP4 against the number formats of ml_dtypes in float64: every code, nibble and scale byte."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k3jax.quant import mxfp4
from k3jax.quant.mxfp4 import Mxfp4Array
from tests.support import bits

BYTES = np.arange(256, dtype=np.uint8)
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
E8M0 = BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
EVEN_NEIGHBOURS = (0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0)


def dequantize(array):
    return array.dequantize(jnp.float32)


run_eager_and_jit = pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])


def table(packed, scale):
    """float64 values of packed [..., K/2] and scale [..., K/32]."""
    codes = np.empty((*packed.shape, 2), int)
    codes[..., 0] = packed % 16
    codes[..., 1] = packed // 16
    values = E2M1[codes].reshape(*scale.shape, 32) * E8M0[scale][..., None]
    return values.reshape(*packed.shape[:-1], -1)


def cast(values, dtype):
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(dtype)


def rounded(x, byte):
    """Codes of float64 x under one scale byte, by search: ties to the even code, saturating."""
    scaled = np.abs(x) * 2.0 ** (127 - int(byte))
    distance = np.abs(scaled[:, None] - E2M1[:8])
    nearest = distance == distance.min(axis=1, keepdims=True)
    even_first = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    code = even_first[np.argmax(nearest[:, even_first], axis=1)]
    return code + 8 * np.signbit(x)


def quantized_by_search(x):
    """Codes and scale bytes of finite x [..., 32] in float64."""
    codes, scale = np.empty(x.shape, np.uint8), np.empty(x.shape[:-1], np.uint8)
    for index in np.ndindex(x.shape[:-1]):
        largest = np.abs(x[index]).max()
        exponent = np.frexp(largest)[1] - 1 if largest else 2
        scale[index] = np.clip(exponent - 2 + 127, 0, 254)
        codes[index] = rounded(x[index], scale[index])
    return codes, scale


def test_the_tables_are_the_formats():
    assert E2M1[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E2M1[8:].tolist() == (-E2M1[:8]).tolist()
    assert np.signbit(E2M1[8])
    assert E8M0[:255].tolist() == [2.0**n for n in range(-127, 128)]
    assert np.isnan(E8M0[255])


@run_eager_and_jit
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_code_in_both_nibbles_under_every_scale(run, dtype):
    packed = np.tile(BYTES, (256, 1))
    scale = np.repeat(BYTES[:, None], 512 // 32, axis=1)
    array = Mxfp4Array(jnp.asarray(packed), jnp.asarray(scale))
    got = np.asarray(run(lambda a: a.dequantize(dtype))(array))
    want = cast(table(packed, scale), dtype)
    assert got.dtype == want.dtype
    assert np.isnan(got[255]).all()
    np.testing.assert_array_equal(bits(got[:255]), bits(want[:255]))
    assert (bits(got[0]) == bits(np.zeros(1, dtype))).sum() == 32  # +0 and nothing flushed to it
    assert np.isinf(got[254].astype(np.float32)).sum() == 256  # 2, 3, 4 and 6 times 2^127
    assert np.isfinite(got[252].astype(np.float32)).all()


def test_the_low_nibble_is_the_even_element():
    array = Mxfp4Array(jnp.full((1, 16), 0x21, jnp.uint8), jnp.full((1, 1), 127, jnp.uint8))
    assert np.asarray(array.dequantize(jnp.float32))[0, :4].tolist() == [0.5, 1, 0.5, 1]


def test_every_group_has_its_own_scale():
    rng = np.random.default_rng()
    packed = rng.integers(0, 256, (3, 5, 64), np.uint8)
    scale = rng.integers(1, 250, (3, 5, 4), np.uint8)
    array = Mxfp4Array(jnp.asarray(packed), jnp.asarray(scale))
    assert array.shape == (3, 5, 128)
    got = np.asarray(jax.jit(dequantize)(array))
    np.testing.assert_array_equal(bits(got), bits(cast(table(packed, scale), np.float32)))
    picked = array[1]
    assert picked.shape == (5, 128)
    np.testing.assert_array_equal(bits(jax.jit(dequantize)(picked)), bits(got[1]))


def test_a_nan_scale_stays_in_its_group():
    scale = jnp.asarray([[127, 255, 127]], jnp.uint8)
    got = Mxfp4Array(jnp.full((1, 48), 0x22, jnp.uint8), scale).dequantize(jnp.float32)
    assert np.asarray(got).reshape(3, 32)[[0, 2]].tolist() == [[1.0] * 32] * 2
    assert np.isnan(np.asarray(got).reshape(3, 32)[1]).all()


@pytest.mark.parametrize("shape", [(0, 32), (1, 2), (3, 4, 64), (256,)])
def test_pack_and_unpack_are_inverses(shape):
    rng = np.random.default_rng()
    codes = rng.integers(0, 16, shape, np.uint8)
    packed = mxfp4.pack_codes(jnp.asarray(codes))
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(packed, codes[..., 0::2] + 16 * codes[..., 1::2])
    np.testing.assert_array_equal(mxfp4.unpack_codes(packed), codes)
    np.testing.assert_array_equal(mxfp4.pack_codes(mxfp4.unpack_codes(jnp.asarray(BYTES))), BYTES)


def check_quantized(run, x, dtype=np.float32):
    x = np.asarray(x, dtype)
    got = run(mxfp4.quantize)(jnp.asarray(x))
    codes, scale = quantized_by_search(x.astype(np.float64).reshape(*x.shape[:-1], -1, 32))
    assert got.packed.dtype == got.scale.dtype == jnp.uint8
    assert got.shape == x.shape
    np.testing.assert_array_equal(got.scale, scale)
    np.testing.assert_array_equal(mxfp4.unpack_codes(got.packed), codes.reshape(x.shape))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_quantize_random(dtype):
    rng = np.random.default_rng()
    x = rng.standard_normal((40, 96)) * 2.0 ** rng.integers(-10, 10, (40, 1))
    check_quantized(jax.jit, x, dtype)


@run_eager_and_jit
def test_quantize_ties_saturation_and_signs(run):
    """The largest of each group is 4 to 7.99... times 2^n, so the scale is 2^n."""
    near = [np.nextafter(np.float32(m), np.float32(side)) for m in MIDPOINTS for side in (0, 9)]
    top = np.nextafter(np.float32(8), np.float32(0))
    groups = [
        [4.0, *MIDPOINTS, *(-m for m in MIDPOINTS)],
        [-4.0, *near, *(-n for n in near)],
        [top, 6.0, 6.5, 7.0, 7.5, -top, -6.5],
        [-0.0, 0.0, 4.0, -0.1],
    ]
    factors = 2.0 ** np.array([-124, -30, 0, 30, 125])[:, None]
    x = np.zeros((len(factors), len(groups), 32), np.float32)
    for row, group in enumerate(groups):
        x[:, row, : len(group)] = factors * group
    check_quantized(run, x)
    got = run(mxfp4.quantize)(jnp.asarray(x))
    np.testing.assert_array_equal(np.squeeze(got.scale), 127 + np.log2(factors) + np.zeros(4))
    for values in np.asarray(got.dequantize(jnp.float32)) / factors[:, None]:
        assert values[0, 1:8].tolist() == list(EVEN_NEIGHBOURS)
        assert values[0, 8:15].tolist() == [-v for v in EVEN_NEIGHBOURS]
        assert values[2, :7].tolist() == [6, 6, 6, 6, 6, -6, -6]
        assert np.signbit(values[3, 0])
        assert not np.signbit(values[3, 1])


def test_quantize_at_the_ends_of_the_range():
    top, tiny = np.finfo(np.float32).max, np.finfo(np.float32).tiny
    x = np.zeros((4, 32), np.float32)
    x[0, :3] = top, -top / 2, 1.0
    x[1, :4] = 2.0**-125, 2.0**-126, -1.5 * 2.0**-126, 0
    x[2, :2] = tiny, -tiny
    check_quantized(jax.jit, x)


def test_quantize_zero_and_non_finite_groups():
    x = np.ones((1, 5 * 32), np.float32)
    x[0, 0:32] = 0
    x[0, 32] = np.nan
    x[0, 64] = np.inf
    x[0, 96] = -np.inf
    got = jax.jit(mxfp4.quantize)(jnp.asarray(x))
    assert np.asarray(got.scale).tolist() == [[127, 255, 255, 255, 125]]
    values = np.asarray(jax.jit(dequantize)(got)).reshape(5, 32)
    assert (values[0] == 0).all()
    assert np.isnan(values[1:4]).all()
    assert (values[4] == 1).all()


def test_quantize_is_exact_on_what_it_wrote():
    """A group whose largest code is 4 or 6 comes back bit for bit."""
    rng = np.random.default_rng()
    codes = rng.integers(0, 16, (250, 32), np.uint8)
    codes[:, 0] = rng.choice([6, 7, 14, 15], 250)
    scale = np.arange(2, 252, dtype=np.uint8)[:, None]
    array = Mxfp4Array(mxfp4.pack_codes(jnp.asarray(codes)), jnp.asarray(scale))
    for dtype in (jnp.bfloat16, jnp.float32):
        again = jax.jit(lambda a, dtype=dtype: mxfp4.quantize(a.dequantize(dtype)))(array)
        np.testing.assert_array_equal(again.scale, scale)
        np.testing.assert_array_equal(again.packed, array.packed)


def test_quantize_empty_and_misfit():
    empty = mxfp4.quantize(jnp.zeros((0, 64)))
    assert empty.packed.shape == (0, 32)
    assert empty.scale.shape == (0, 2)
    with pytest.raises(ValueError, match="last axis 48; MXFP4 groups need a multiple of 32"):
        mxfp4.quantize(jnp.zeros((2, 48)))
