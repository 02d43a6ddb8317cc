"""The tail's tiers against the oracle and against each other, at every number of ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.ops.tail.api import TailTier, latent_tail
from k3jax.parallel import run_sharded
from tests import oracle
from tests.support import TOKENS, bits, parallel_of

HIDDEN, LATENT, EPS = 64, 32, 1e-5
TIERS = (TailTier.UNFUSED, TailTier.ALLREDUCE_OVERLAP, TailTier.COLUMN_PARALLEL)

TIER_AGREEMENT = 6e-3
"""Relative L2 distance between tiers: they round at different points (3e-3 each at most)."""


def inputs(num_tokens, tp, seed=0):
    rng = np.random.default_rng([num_tokens, tp, seed])

    def draw(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.bfloat16)

    return (
        draw(tp, num_tokens, LATENT),
        draw(tp, num_tokens, HIDDEN, scale=0.3),
        jnp.asarray(1 + 0.1 * rng.standard_normal(LATENT), jnp.bfloat16),
        draw(HIDDEN, LATENT, scale=LATENT**-0.5),
    )


def run_tail(tp, tier, m, shared, gain, up_proj, scattered=False):
    """Each rank's own result, stacked: [tp, T, H] (or columns if scattered)."""

    def local(group, m, shared, gain, up_proj):
        y = latent_tail(
            m[0], shared[0], gain, up_proj, eps=EPS, group=group, tier=tier, scattered=scattered
        )
        return y[None]

    if tp == 1:
        return run_sharded(local, None, None, None, m, shared, gain, up_proj)
    split = P("tp")
    specs = (split, split, P(), P())
    call = jax.jit(lambda *args: run_sharded(local, parallel_of(tp), specs, split, *args))
    return call(m, shared, gain, up_proj)


def want(m, shared, gain, up_proj):
    m, shared = (np.asarray(a, np.float64).sum(0) for a in (m, shared))
    return oracle.tail(m, shared, *(np.asarray(a, np.float64) for a in (gain, up_proj)), EPS, False)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_every_token_count(num_tokens, tier):
    args = inputs(num_tokens, 8)
    y = run_tail(8, tier, *args)
    for rank in range(8):
        np.testing.assert_array_equal(bits(y[rank]), bits(y[0]))
    assert oracle.relative_error(y[0], want(*args)) < TIER_AGREEMENT


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("tp", [1, 2, 4, 16])
def test_every_tp(tp, tier):
    args = inputs(5, tp)
    y = run_tail(tp, tier, *args)
    for rank in range(tp):
        np.testing.assert_array_equal(bits(y[rank]), bits(y[0]))
    assert oracle.relative_error(y[0], want(*args)) < TIER_AGREEMENT


@pytest.mark.parametrize("tp", [2, 8, 16])
def test_scattered_output_is_the_rank_s_columns(tp):
    args = inputs(5, tp)
    y = run_tail(tp, TailTier.UNFUSED, *args, scattered=True)
    assert y.shape == (tp, 5, HIDDEN // tp)
    columns = np.concatenate(np.asarray(y, np.float64), axis=-1)
    assert oracle.relative_error(columns, want(*args)) < TIER_AGREEMENT


def test_norm_comes_after_the_sum_over_ranks():
    """Normalising the partials and adding them up is another, plausible, wrong function."""
    args = inputs(5, 8)
    wrong = sum(
        oracle.rms_norm(np.asarray(part, np.float64), np.asarray(args[2], np.float64), EPS)
        for part in args[0]
    )
    right = oracle.rms_norm(
        np.asarray(args[0], np.float64).sum(0), np.asarray(args[2], np.float64), EPS
    )
    assert oracle.relative_error(wrong, right) > 0.5
    y = run_tail(8, TailTier.ALLREDUCE_OVERLAP, *args)
    assert oracle.relative_error(y[0], want(*args)) < TIER_AGREEMENT


@pytest.mark.parametrize("tier", TIERS)
def test_a_bad_row_stays_in_its_row(tier):
    m, shared, gain, up_proj = inputs(5, 4)
    clean = run_tail(4, tier, m, shared, gain, up_proj)
    dirty = run_tail(4, tier, m.at[1, 2, 3].set(jnp.nan), shared, gain, up_proj)
    others = np.arange(5) != 2
    np.testing.assert_array_equal(bits(clean[0])[others], bits(dirty[0])[others])
    assert np.isnan(np.asarray(dirty[0, 2], np.float32)).all()


@pytest.mark.parametrize("tier", TIERS)
def test_zero_rows_and_negative_zero(tier):
    m, shared, gain, up_proj = inputs(3, 4)
    y = run_tail(4, tier, -0.0 * m, -0.0 * shared, gain, up_proj)
    assert not np.asarray(y, np.float32).any()
