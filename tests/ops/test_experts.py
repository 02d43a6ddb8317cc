"""Every implementation of the routed experts against the oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.experts.api import ExpertsTier, routed_experts
from tests import oracle
from tests.support import (
    ONE_OP,
    ROUTED_LIKE_K3,
    TINY,
    TOKENS,
    bits,
    numpy_params,
    params_of,
    tokens_of,
)


@pytest.fixture(params=[ExpertsTier.REFERENCE, ExpertsTier.XLA])
def run(request):
    @jax.jit
    def tiny(z, ids, weights, params):
        return routed_experts(z, ids, weights, params, config=TINY, tier=request.param)

    tiny.tier = request.param
    return tiny


def routes(num_tokens, experts=TINY.num_experts, top_k=TINY.experts_per_token, seed=0):
    rng = np.random.default_rng([num_tokens, seed])
    ids = rng.permuted(np.tile(np.arange(experts, dtype=np.int32), (num_tokens, 1)), axis=1)[
        :, :top_k
    ]
    return ids, rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)


def bank_of(params, config):
    arrays = numpy_params(params, config)

    def bank(e):
        return [
            oracle.mxfp4_values(
                arrays[f"experts.{w}.weight_packed"][e], arrays[f"experts.{w}.weight_scale"][e]
            )
            for w in ("w1", "w3", "w2")
        ]

    return bank


def check(run, z, ids, weights, params=None, config=TINY):
    params = params or params_of(config)
    got = run(z, jnp.asarray(ids), jnp.asarray(weights), params.experts)
    want = oracle.experts(np.asarray(z, np.float64), ids, weights, bank_of(params, config))
    assert got.dtype == jnp.bfloat16
    assert got.shape == z.shape
    assert oracle.relative_error(got, want) < ONE_OP
    return got


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_every_token_count(run, num_tokens):
    check(run, tokens_of(num_tokens, TINY.latent_size), *routes(num_tokens))


def test_one_expert_takes_all(run):
    ids, weights = routes(65)
    ids[:, 0] = 31
    ids[:, 1:] = -1
    check(run, tokens_of(65, TINY.latent_size), ids, weights)


def test_first_and_last_expert_empty(run):
    ids, weights = routes(33)
    ids = np.clip(ids, 1, 30)
    check(run, tokens_of(33, TINY.latent_size), ids, weights)


def test_same_expert_twice_in_a_row(run):
    ids, weights = routes(9)
    ids[:, 1] = ids[:, 0]
    check(run, tokens_of(9, TINY.latent_size), ids, weights)


def test_id_minus_one_is_dropped(run):
    """Not wrapped to the last expert, not counted as the first, not clamped."""
    ids, weights = routes(17)
    ids[np.random.default_rng(0).random(ids.shape) < 0.5] = -1
    ids[3] = -1
    got = check(run, tokens_of(17, TINY.latent_size), ids, weights)
    assert not np.asarray(got[3]).any()
    weights[ids < 0] = np.nan
    check(run, tokens_of(17, TINY.latent_size), ids, np.where(ids < 0, 7.0, weights))
    again = run(
        tokens_of(17, TINY.latent_size),
        jnp.asarray(ids),
        jnp.asarray(weights),
        params_of(TINY).experts,
    )
    np.testing.assert_array_equal(bits(got), bits(again))


def poison(matrix, expert):
    return dataclasses.replace(matrix, scale=matrix.scale.at[expert].set(255))


def test_nan_in_an_unvisited_expert_touches_nothing(run):
    ids, weights = routes(33)
    ids[ids == 5] = -1
    z = tokens_of(33, TINY.latent_size)
    clean = params_of(TINY).experts
    dirty = dataclasses.replace(
        clean, w1=poison(clean.w1, 5), w3=poison(clean.w3, 5), w2=poison(clean.w2, 5)
    )
    args = z, jnp.asarray(ids), jnp.asarray(weights)
    np.testing.assert_array_equal(bits(run(*args, clean)), bits(run(*args, dirty)))
    visited = jnp.asarray(np.where(ids == -1, 5, ids))
    hit = np.isnan(np.asarray(run(z, visited, args[2], dirty), np.float32)).any(axis=1)
    np.testing.assert_array_equal(hit, (np.asarray(visited) == 5).any(axis=1))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_row_stays_in_its_row(run, value):
    ids, weights = routes(17)
    z = tokens_of(17, TINY.latent_size)
    args = jnp.asarray(ids), jnp.asarray(weights), params_of(TINY).experts
    clean, dirty = run(z, *args), run(z.at[4, 7].set(value), *args)
    others = np.arange(17) != 4
    np.testing.assert_array_equal(bits(clean)[others], bits(dirty)[others])
    assert not np.isfinite(np.asarray(dirty[4], np.float32)).all()


def test_runs_are_bitwise_repeatable(run):
    ids, weights = routes(33)
    args = tokens_of(33, TINY.latent_size), jnp.asarray(ids), jnp.asarray(weights)
    first, second = (run(*args, params_of(TINY).experts) for _ in range(2))
    np.testing.assert_array_equal(bits(first), bits(second))


def test_gate_and_up_are_not_swapped(run):
    """Constant gate 1 and up 2 give another value than up 1 and gate 2."""
    experts = params_of(TINY).experts
    one, two = 0x22, 0x44  # codes of 1.0 and 2.0 in both nibbles
    scale = jnp.full_like(experts.w1.scale, 127 - 7)
    w1 = dataclasses.replace(experts.w1, packed=jnp.full_like(experts.w1.packed, one), scale=scale)
    w3 = dataclasses.replace(experts.w3, packed=jnp.full_like(experts.w3.packed, two), scale=scale)
    params = dataclasses.replace(
        params_of(TINY), experts=dataclasses.replace(experts, w1=w1, w3=w3)
    )
    z = jnp.ones((1, TINY.latent_size), jnp.bfloat16)
    got = check(run, z, np.array([[0, 1, 2, 3]], np.int32), np.ones((1, 4), np.float32), params)
    swapped = dataclasses.replace(params.experts, w1=w3, w3=w1)
    other = run(z, jnp.arange(4)[None], jnp.ones((1, 4)), swapped)
    assert oracle.relative_error(other, np.asarray(got, np.float64)) > 0.1


@pytest.mark.parametrize("winner", [0, 255, 256, 511, 512, 895])
def test_every_part_of_896_experts_is_reachable(run, winner):
    config = ROUTED_LIKE_K3
    ids, weights = routes(5, 896, 16)
    ids[:, 0] = winner
    ids[:, 1:][ids[:, 1:] == winner] = -1
    check(run, tokens_of(5, config.latent_size), ids, weights, params_of(config), config)


@pytest.mark.parametrize("num_tokens", [1, 64])
def test_xla_memory_stays_bounded(num_tokens):
    """No temporary is dense over the experts, nor one dequantised expert a route."""
    config = dataclasses.replace(ROUTED_LIKE_K3, expert_intermediate_size=512, latent_size=256)
    shapes = jax.eval_shape(lambda: params_of.__wrapped__(config).experts)
    ids = jax.ShapeDtypeStruct((num_tokens, 16), jnp.int32)
    weights = jax.ShapeDtypeStruct((num_tokens, 16), jnp.float32)
    z = jax.ShapeDtypeStruct((num_tokens, 256), jnp.bfloat16)
    run = jax.jit(lambda *args: routed_experts(*args, config=config, tier=ExpertsTier.XLA))
    memory = run.lower(z, ids, weights, shapes).compile().memory_analysis()
    one_expert = 3 * 512 * 256 * 4
    rows = num_tokens * 16 * 256 * 4
    assert memory.temp_size_in_bytes < 4 * one_expert + 6 * rows + 2**20


def test_gradient_of_the_reference_matches_finite_differences():
    ids, weights = routes(3)
    args = jnp.asarray(ids), jnp.asarray(weights), params_of(TINY).experts

    def loss(z, tier):
        out = routed_experts(z.astype(jnp.bfloat16), *args, config=TINY, tier=tier)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    z = tokens_of(3, TINY.latent_size).astype(jnp.float32)
    direction = jax.random.normal(jax.random.key(9), z.shape)
    slope = jnp.vdot(jax.grad(loss)(z, ExpertsTier.REFERENCE), direction)
    numeric = (
        loss(z + 0.1 * direction, ExpertsTier.REFERENCE)
        - loss(z - 0.1 * direction, ExpertsTier.REFERENCE)
    ) / 0.2
    np.testing.assert_allclose(slope, numeric, rtol=0.05)
    with pytest.raises(NotImplementedError, match=r"no gradient; plan the layer with experts='ref"):
        jax.grad(loss)(z, ExpertsTier.XLA)


class TestW4A8:
    """MXFP8 activations: its own numbers, near those of W4A16 and never mixed up with them."""

    def run(self, z, ids, weights):
        call = jax.jit(lambda *args: routed_experts(*args, config=TINY, tier=ExpertsTier.W4A8))
        return call(z, jnp.asarray(ids), jnp.asarray(weights), params_of(TINY).experts)

    @pytest.mark.parametrize("num_tokens", [0, 1, 5, 33])
    def test_against_an_oracle_that_rounds_alike(self, num_tokens):
        ids, weights = routes(num_tokens)
        z = tokens_of(num_tokens, TINY.latent_size)
        bank = bank_of(params_of(TINY), TINY)
        want = np.zeros(z.shape)
        for t, slot in np.ndindex(*ids.shape):
            row = oracle.expert_row_w4a8(
                np.asarray(z[t], np.float64), *bank(ids[t, slot]), 4.0, 25.0
            )
            want[t] += weights[t, slot] * row
        assert oracle.relative_error(self.run(z, ids, weights), want) < 1e-2

    def test_stays_near_w4a16(self):
        ids, weights = routes(33)
        z = tokens_of(33, TINY.latent_size)
        got = np.asarray(self.run(z, ids, weights), np.float64)
        near = oracle.experts(
            np.asarray(z, np.float64), ids, weights, bank_of(params_of(TINY), TINY)
        )
        cosine = (got * near).sum() / np.linalg.norm(got) / np.linalg.norm(near)
        assert cosine > 0.998
        assert 5e-3 < oracle.relative_error(got, near) < 0.06
