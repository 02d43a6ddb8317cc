"""Every router implementation against the oracle: ids exact, weights within 2e-5."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.router import reference
from tests import oracle
from tests.support import TOKENS

IMPLEMENTATIONS = {"reference": reference.choose}


@pytest.fixture(params=IMPLEMENTATIONS)
def choose(request):
    function = IMPLEMENTATIONS[request.param]
    return jax.jit(function, static_argnums=(2, 3, 4))


def check(choose, logits, bias, top_k, renormalize=True, factor=1.0):
    logits, bias = np.asarray(logits, np.float32), np.asarray(bias, np.float32)
    ids, weights = choose(jnp.asarray(logits), jnp.asarray(bias), top_k, renormalize, factor)
    want_ids, want_weights = oracle.route(logits, bias, top_k, renormalize, factor)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, atol=2e-5 * factor, rtol=0)
    assert ids.dtype == jnp.int32
    assert weights.dtype == jnp.float32


def spread(rng, rows, experts):
    """Logits whose choices are at least 1e-4 apart, so that no rounding flips them."""
    ladder = np.linspace(-4, 4, experts)
    return rng.permuted(np.tile(ladder, (rows, 1)), axis=1)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_every_token_count(choose, num_tokens):
    rng = np.random.default_rng(num_tokens)
    check(choose, spread(rng, num_tokens, 896), np.zeros(896), 16)


@pytest.mark.parametrize(("experts", "top_k"), [(896, 16), (32, 4), (7, 7), (1, 1), (512, 8)])
def test_shapes(choose, experts, top_k):
    rng = np.random.default_rng(experts)
    check(choose, spread(rng, 9, experts), rng.choice([0.0, 1.0], experts), top_k)


@pytest.mark.parametrize("winner", [0, 127, 128, 255, 256, 511, 512, 767, 768, 895])
def test_expert_index_range(choose, winner):
    logits = spread(np.random.default_rng(0), 3, 896)
    logits[:, winner] = 9.0
    ids, _ = choose(jnp.asarray(logits, jnp.float32), jnp.zeros(896), 16, True, 1.0)
    assert (np.asarray(ids)[:, 0] == winner).all()
    check(choose, logits, np.zeros(896), 16)


def test_wins_in_every_block_of_experts(choose):
    logits = np.full((7, 896), -1.0)
    for block in range(7):
        logits[block, 128 * block : 128 * block + 16] = np.linspace(2, 1, 16)
    check(choose, logits, np.zeros(896), 16)


def test_ties_go_to_the_lowest_index(choose):
    logits = np.zeros((3, 896))
    logits[1, ::2] = 1.0
    logits[2, 100:130] = 0.5
    check(choose, logits, np.zeros(896), 16)


def test_equal_logits_share_the_scaling_factor(choose):
    ids, weights = choose(jnp.zeros((1, 896)), jnp.zeros(896), 16, True, 2.5)
    np.testing.assert_array_equal(ids[0], np.arange(16))
    np.testing.assert_allclose(weights, 2.5 / 16, rtol=1e-6)


def test_all_negative_logits(choose):
    logits = spread(np.random.default_rng(1), 5, 896) - 5.0
    check(choose, logits, np.zeros(896), 16)


def test_negative_zero_ties_with_zero(choose):
    logits = np.full((1, 896), -0.0)
    logits[0, 5::7] = 0.0
    check(choose, logits, np.zeros(896), 16)


def test_bias_moves_the_choice_and_not_the_weight(choose):
    logits = np.tile(np.linspace(-1, 1, 896), (2, 1))
    bias = np.zeros(896)
    bias[3] = 10.0
    check(choose, logits, bias, 16)
    ids, weights = choose(
        jnp.asarray(logits, jnp.float32), jnp.asarray(bias, jnp.float32), 16, False, 1.0
    )
    assert ids[0, 0] == 3
    np.testing.assert_allclose(weights[0, 0], 1 / (1 + np.exp(-logits[0, 3])), atol=2e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_are_never_preferred(choose, bad):
    logits = spread(np.random.default_rng(2), 4, 896)
    logits[0, ::3] = bad
    logits[1, :880] = bad  # 16 finite ones left
    logits[2, 15:] = bad  # 15 finite ones: filled up with the lowest invalid index
    logits[3] = bad  # none
    bias = np.linspace(-0.5, 0.5, 896)
    for renormalize in (True, False):
        check(choose, logits, bias, 16, renormalize, 2.5)


def test_weights_of_a_tiny_sum_stay_finite(choose):
    _, weights = choose(jnp.full((1, 896), -200.0), jnp.zeros(896), 16, True, 1.0)
    assert np.isfinite(weights).all()


@pytest.mark.parametrize(("renormalize", "factor"), [(True, 2.5), (False, 1.0), (False, 2.5)])
def test_renormalise_and_scale(choose, renormalize, factor):
    logits = spread(np.random.default_rng(3), 5, 896)
    check(choose, logits, np.zeros(896), 16, renormalize, factor)


def test_random_rows(choose):
    """Normal logits: ids may differ from float64 only where two choices are within float32."""
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((512, 896)).astype(np.float32)
    bias = (0.01 * rng.standard_normal(896)).astype(np.float32)
    ids, _ = choose(jnp.asarray(logits), jnp.asarray(bias), 16, True, 1.0)
    want, _ = oracle.route(logits, bias, 16)
    choice = 1 / (1 + np.exp(-logits.astype(np.float64))) + bias
    rows, slots = np.nonzero(np.asarray(ids) != want)
    gap = choice[rows, want[rows, slots]] - choice[rows, np.asarray(ids)[rows, slots]]
    assert (np.abs(gap) < 3e-7).all()
    assert len(rows) < 40


def test_logits_are_float32_sums_of_bfloat16_products():
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.standard_normal((5, 512)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((40, 512)), jnp.bfloat16)
    got = reference.logits(x, weight)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert got.dtype == jnp.float32
    assert oracle.relative_error(got, want) < 1e-6
