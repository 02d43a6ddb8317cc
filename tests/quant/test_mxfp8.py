"""MXFP8 against the number formats of ml_dtypes in float64: every code under every scale byte."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k3jax.quant import mxfp8
from k3jax.quant.mxfp8 import Mxfp8Array
from tests.support import bits

BYTES = np.arange(256, dtype=np.uint8)
E4M3 = BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E8M0 = BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


def dequantize(array):
    return array.dequantize(jnp.float32)


run_eager_and_jit = pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])


def array_of(codes, scale):
    return Mxfp8Array(jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scale))


@run_eager_and_jit
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_code_under_every_scale(run, dtype):
    codes = np.tile(BYTES, (256, 1))
    scale = np.repeat(BYTES[:, None], 256 // 32, axis=1)
    got = np.asarray(run(lambda a: a.dequantize(dtype))(array_of(codes, scale)))
    exact = E4M3[codes] * np.repeat(E8M0[scale], 32, axis=1)
    with np.errstate(over="ignore"):
        want = exact.astype(np.float32).astype(dtype)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
    normal = ~np.isnan(exact) & ((np.abs(exact) >= SMALLEST_NORMAL) | (exact == 0))
    assert normal.sum() > 0.9 * exact.size
    np.testing.assert_array_equal(bits(got[normal]), bits(want[normal]))
    below = np.abs(exact) < SMALLEST_NORMAL
    # Under the smallest normal number the device may keep the value or flush it.
    assert ((got[below] == want[below]) | (got[below] == 0)).all()


def quantized_by_search(x):
    """Codes (float64 values) and scale bytes of finite groups x [..., 32] in float64.

    The scale is found by trying bytes from 0 up; elements by search over the table.
    """
    positive = E4M3[:127]
    even_first = np.argsort(np.arange(127) % 2, kind="stable")
    values, scale = np.empty(x.shape), np.empty(x.shape[:-1], np.uint8)
    for index in np.ndindex(x.shape[:-1]):
        largest = np.abs(x[index]).max()
        byte = next(byte for byte in range(255) if largest <= 448 * 2.0 ** (byte - 127))
        distance = np.abs(np.abs(x[index]) * 2.0 ** (127 - byte) - positive[:, None])
        nearest = (distance == distance.min(axis=0))[even_first]
        values[index] = np.copysign(positive[even_first[nearest.argmax(axis=0)]], x[index])
        scale[index] = byte
    return values, scale


def check_quantized(run, x, dtype=np.float32):
    x = np.asarray(x, dtype)
    got = run(mxfp8.quantize)(jnp.asarray(x))
    values, scale = quantized_by_search(x.astype(np.float64).reshape(*x.shape[:-1], -1, 32))
    assert got.values.dtype == jnp.float8_e4m3fn
    assert got.values.shape == x.shape
    np.testing.assert_array_equal(got.scale, scale)
    want = values.reshape(x.shape).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(bits(got.values), bits(want))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_quantize_random(dtype):
    rng = np.random.default_rng()
    x = rng.standard_normal((40, 96)) * 2.0 ** rng.integers(-10, 10, (40, 1))
    check_quantized(jax.jit, x, dtype)


@run_eager_and_jit
def test_ceil_rule_at_its_edge(run):
    """448 * 2^n still has the scale 2^n; the next float has the next, so nothing saturates."""
    exponents = np.array([-115, -20, 0, 20, 118])
    edges = (448 * 2.0**exponents).astype(np.float32)
    x = np.repeat(edges[:, None, None] / 3, 3, axis=1) * np.ones(32, np.float32)
    for row, side in enumerate((np.zeros(5), edges, np.full(5, np.inf))):
        x[:, row, 0] = np.nextafter(edges, side.astype(np.float32))
    x[:, :, 1] = -x[:, :, 0]
    check_quantized(run, x)
    got = run(mxfp8.quantize)(jnp.asarray(x))
    np.testing.assert_array_equal(np.squeeze(got.scale), 127 + exponents[:, None] + [0, 0, 1])
    largest = np.asarray(got.values[:, :, 0], np.float32)
    assert largest.tolist() == [[448, 448, 224]] * 5


def test_every_tie_rounds_to_even():
    positive = E4M3[:127]
    ties = (positive[:-1] + positive[1:]) / 2
    x = np.zeros((len(ties), 32), np.float32)
    x[:, 0] = 448  # the scale is 1
    x[:, 1], x[:, 2] = ties, -ties
    x[:, 3] = np.nextafter(ties.astype(np.float32), np.float32(np.inf))
    x[:, 4] = np.nextafter(ties.astype(np.float32), np.float32(0))
    check_quantized(jax.jit, x)


def test_the_conversion_saturates():
    """The conversion alone would turn what is past 448 into NaN; no group of finite values may."""
    rng = np.random.default_rng()
    pattern = rng.integers(0, 2**32, (4096, 32), np.uint32)
    x = pattern.view(np.float32)
    x = np.where(np.isfinite(x), x, np.finfo(np.float32).max)
    x[0], x[1] = np.finfo(np.float32).max, -np.finfo(np.float32).max
    got = jax.jit(mxfp8.quantize)(jnp.asarray(x))
    assert np.isfinite(np.asarray(got.values, np.float32)).all()
    assert int(got.scale.max()) < 255
    assert np.abs(np.asarray(got.values[:2], np.float32)).tolist() == [[256.0] * 32] * 2
    assert np.isnan(np.float32(500).astype(ml_dtypes.float8_e4m3fn))


def test_quantize_zero_and_non_finite_groups():
    x = np.ones((1, 5 * 32), np.float32)
    x[0, 0:32] = 0
    x[0, 1] = -0.0
    x[0, 32] = np.nan
    x[0, 64] = np.inf
    x[0, 96] = -np.inf
    got = jax.jit(mxfp8.quantize)(jnp.asarray(x))
    assert np.asarray(got.scale).tolist() == [[0, 255, 255, 255, 119]]
    values = np.asarray(jax.jit(dequantize)(got)).reshape(5, 32)
    assert (values[0] == 0).all()
    assert np.signbit(values[0]).sum() == 1
    assert np.isnan(values[1:4]).all()
    assert (values[4] == 1).all()


def test_quantize_small_groups():
    """Scale byte 0 is 2^-127: groups below 448 * 2^-127 keep it and lose low bits."""
    x = np.zeros((3, 32), np.float32)
    x[0, :3] = 448 * 2.0**-127, 2.0**-126, -(2.0**-125)
    x[1, :2] = 2.0**-126, -(2.0**-126)
    x[2, 0] = np.nextafter(np.float32(448 * 2.0**-127), np.float32(1))
    check_quantized(jax.jit, x)


def test_relative_error_of_one_element():
    """Half an ulp of three mantissa bits, 2^-4, for elements in the normal range of E4M3."""
    rng = np.random.default_rng()
    x = rng.uniform(0.1, 1, (64, 32)).astype(np.float32) * rng.choice([-1, 1], (64, 32))
    got = np.asarray(jax.jit(lambda x: mxfp8.quantize(x).dequantize(jnp.float32))(x))
    assert np.abs(got / x - 1).max() <= 2**-4


def test_quantize_empty_and_misfit():
    empty = mxfp8.quantize(jnp.zeros((0, 64)))
    assert empty.values.shape == (0, 64)
    assert empty.scale.shape == (0, 2)
    with pytest.raises(ValueError, match="last axis 40; MXFP8 groups need a multiple of 32"):
        mxfp8.quantize(jnp.zeros((2, 40)))
