"""The layer whose fused tail weighs the experts' rows itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.config import MoEConfig
from k3jax.layer import moe_layer
from k3jax.ops.experts.packing import packed_infos
from k3jax.parallel import Parallel
from k3jax.params import abstract_params, param_specs
from k3jax.plan import plan_layer
from tests import oracle
from tests.device_free import gpu_mesh
from tests.support import TINY, WHOLE_LAYER, bits, parallel_of, sharded_params, tokens_of

K3 = MoEConfig.kimi_k3()


def run(x, tp, unfinalised, mask=None):
    parallel = parallel_of(tp)
    plan = plan_layer(TINY, len(x), tp=tp, tail="tail_fusion", unfinalised=unfinalised)
    layer = functools.partial(moe_layer, config=TINY, parallel=parallel, plan=plan)
    return jax.jit(layer)(sharded_params(TINY, parallel), x, token_mask=mask)


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("num_tokens", [1, 9, 33])
def test_the_same_layer_on_every_rank(tp, num_tokens):
    x = tokens_of(num_tokens, TINY.hidden_size)
    y = run(x, tp, unfinalised=True)
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(bits(shard.data), bits(y))
    plain = np.asarray(run(x, tp, unfinalised=False), np.float64)
    assert oracle.relative_error(y, plain) < WHOLE_LAYER / 2  # sums by fused multiply-adds


def test_masked_tokens_reach_no_expert():
    x = tokens_of(5, TINY.hidden_size)
    mask = jnp.array([True, False, True, True, False])
    y = np.asarray(run(x, 2, True, mask))
    assert not y[~np.asarray(mask)].any()
    plain = np.asarray(run(x, 2, False, mask), np.float64)
    assert oracle.relative_error(y, plain) < WHOLE_LAYER / 2


def test_another_tail_cannot_weigh_rows():
    assert "the tail weighs the experts' rows" in str(
        plan_layer(TINY, 5, tp=8, tail="tail_fusion", unfinalised=True)
    )
    with pytest.raises(ValueError, match=r"needs tail='tail_fusion', got 'allreduce_overlap'"):
        plan_layer(TINY, 5, tp=8, unfinalised=True)
    with pytest.raises(ValueError, match=r"needs tail='tail_fusion', got 'unfused': tp is 1"):
        plan_layer(TINY, 5, unfinalised=True)


@pytest.mark.slow
@pytest.mark.parametrize("unfinalised", [True, False])
def test_for_gpus_the_rows_go_from_one_call_to_the_other(unfinalised):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the CUDA plugin")
    pytest.importorskip("cutlass", reason="needs the CuTe DSL")
    parallel, experts = Parallel(gpu_mesh("h200", 8)), packed_infos(K3, 8)
    params = jax.tree.map(
        lambda array, spec: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=parallel.sharding(spec)
        ),
        abstract_params(K3, experts),
        param_specs(K3, "tp", experts),
    )
    x = jax.ShapeDtypeStruct((8, K3.hidden_size), jnp.bfloat16, sharding=parallel.sharding(P()))
    plan = plan_layer(
        K3, 8, tp=8, target="h200", packed=True, tail="tail_fusion", unfinalised=unfinalised
    )
    layer = functools.partial(moe_layer, config=K3, parallel=parallel, plan=plan)
    text = jax.jit(layer).lower(params, x).as_text()
    calls = [line for line in text.splitlines() if "@k3jax_launch" in line]
    rows = [line for line in calls if "tensor<8x16x3584xbf16>" in line]
    assert len(rows) == (2 if unfinalised else 0), calls
