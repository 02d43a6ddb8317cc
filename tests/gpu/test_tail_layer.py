"""The layer over two GPUs with the fused tail, which weighs the experts' rows or gets their sum."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from k3jax import MoEConfig, moe_layer, plan_layer, prepare_params
from k3jax.float32 import float32_layer, relative_error
from tests.support import WHOLE_LAYER, bits, parallel_of, params_of, sharded_params, tokens_of

pytestmark = pytest.mark.gpu

CONFIG = dataclasses.replace(MoEConfig.kimi_k3(), num_experts=32, experts_per_token=16)
TP = 2
TOKENS = (1, 8, 9, 64)


@pytest.fixture(scope="module")
def packed():
    if len(jax.devices()) < TP:
        pytest.skip(f"needs {TP} GPUs, there are {len(jax.devices())}")
    parallel = parallel_of(TP)
    return prepare_params(sharded_params(CONFIG, parallel), CONFIG, parallel)


@functools.cache
def wanted(seed):
    """Tokens and the layer's result for each; compiling it takes the longest of all here."""
    x = tokens_of(max(TOKENS), CONFIG.hidden_size, seed)
    return x, jax.jit(float32_layer, static_argnums=2)(params_of(CONFIG), x, CONFIG)


@pytest.mark.parametrize("unfinalised", [True, False])
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_against_float32(packed, num_tokens, unfinalised):
    plan = plan_layer(
        CONFIG, num_tokens, tp=TP, packed=True, tail="tail_fusion", unfinalised=unfinalised
    )
    assert plan.experts.tier == "decode"
    layer = functools.partial(moe_layer, config=CONFIG, parallel=parallel_of(TP), plan=plan)
    step = jax.jit(layer)
    for seed in range(2):
        x, want = (rows[:num_tokens] for rows in wanted(seed))
        y = step(packed, x)
        for shard in y.addressable_shards:
            np.testing.assert_array_equal(bits(shard.data), bits(y))
        assert relative_error(jax.device_put(y, jax.devices()[0]), want) < WHOLE_LAYER
