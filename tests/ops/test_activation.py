"""SiTU-GLU against literal values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.activation import situ_glu
from tests import oracle

VECTORS = [
    (1, 1, 0.715817809, 0.71484375),
    (-1, 1, -0.263334602, -0.263671875),
    (4, 25, 56.9593201, 57),
    (8, 50, 92.9037476, 93),
    (-8, 50, -0.0311657358, -0.0311279297),
    (0.5, -2, -0.617919803, -0.6171875),
    (2, 3, 4.86106634, 4.875),
    (0, 7, 0, 0),
    (100, 1000, 100, 100),
    (-100, -1000, 0, 0),
]


@pytest.mark.parametrize(("gate", "up", "single", "rounded"), VECTORS)
def test_literal_values(gate, up, single, rounded):
    got = situ_glu(jnp.float32(gate), jnp.float32(up), 4.0, 25.0)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, single, rtol=2e-6, atol=1e-37)
    assert got.astype(jnp.bfloat16) == jnp.bfloat16(rounded)


def test_linear_branch_without_cap():
    got = situ_glu(jnp.float32(1), jnp.float32(1000), 4.0, None)
    np.testing.assert_allclose(got, oracle.situ(1.0, 1000.0, 4.0, None), rtol=2e-6)


def test_takes_the_raw_gate_in_the_sigmoid():
    gate = jnp.linspace(-95, 95, 381)
    got = situ_glu(gate, jnp.full_like(gate, 3.0), 4.0, 25.0)
    np.testing.assert_allclose(got, oracle.situ(np.asarray(gate, np.float64), 3.0), atol=3e-6)


def test_is_not_silu():
    silu = jax.nn.silu(jnp.float32(8)) * 50
    assert abs(situ_glu(jnp.float32(8), jnp.float32(50), 4.0, 25.0) - silu) > 100
