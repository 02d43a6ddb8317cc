"""The layer over two GPUs with the fused tail, which weighs the experts' rows or gets their sum."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from k3jax import MoEConfig, moe_layer, plan_layer, prepare_params
from tests.gpu.wanted import wanted
from tests.oracle import relative_error
from tests.support import WHOLE_LAYER, bits, parallel_of, sharded_params

pytestmark = pytest.mark.gpu

CONFIG = dataclasses.replace(MoEConfig.kimi_k3(), num_experts=32, experts_per_token=16)
TP = 2
COUNTS = (1, 8, 9, 64)


@pytest.fixture(scope="module")
def packed():
    if len(jax.devices()) < TP:
        pytest.skip(f"needs {TP} GPUs, there are {len(jax.devices())}")
    parallel = parallel_of(TP)
    return prepare_params(sharded_params(CONFIG, parallel), CONFIG, parallel)


@pytest.mark.parametrize("unfinalised", [True, False])
@pytest.mark.parametrize("num_tokens", COUNTS)
def test_against_float32(packed, num_tokens, unfinalised):
    plan = plan_layer(
        CONFIG, num_tokens, tp=TP, packed=True, tail="tail_fusion", unfinalised=unfinalised
    )
    assert plan.experts.tier == "decode"
    layer = functools.partial(moe_layer, config=CONFIG, parallel=parallel_of(TP), plan=plan)
    step = jax.jit(layer)
    for seed in range(2):
        x, want = wanted(CONFIG, COUNTS, seed)[num_tokens]
        y = step(packed, x)
        for shard in y.addressable_shards:
            np.testing.assert_array_equal(bits(shard.data), bits(y))
        assert relative_error(y, want) < WHOLE_LAYER
