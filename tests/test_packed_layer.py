"""The layer on experts in kernel order: the same bits as on the checkpoint's order."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from k3jax.config import MoEConfig
from k3jax.layer import moe_layer
from k3jax.linen import KimiK3MoE as linen_module  # noqa: N813
from k3jax.linen import variables_of
from k3jax.nnx import KimiK3MoE as nnx_module  # noqa: N813
from k3jax.ops.experts.api import prepare_params
from k3jax.ops.experts.packing import PackedExperts, pack_params, unpack_experts
from k3jax.plan import plan_layer
from k3jax.runtime.target import Target
from tests.support import TINY, bits, parallel_of, params_of, sharded_params, tokens_of

CONFIG = MoEConfig(
    hidden_size=256,
    latent_size=512,
    num_experts=8,
    experts_per_token=2,
    expert_intermediate_size=512,
    num_shared_experts=1,
)


def parameters(tp):
    parallel = parallel_of(tp) if tp > 1 else None
    return parallel, sharded_params(CONFIG, parallel) if parallel else params_of(CONFIG)


def run(params, x, parallel, **options):
    layer = functools.partial(moe_layer, config=CONFIG, parallel=parallel, **options)
    return jax.jit(layer)(params, x)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_kernel_order_keeps_every_bit(tp, num_tokens):
    parallel, params = parameters(tp)
    packed = pack_params(params, CONFIG, parallel)
    x = tokens_of(num_tokens, CONFIG.hidden_size)
    np.testing.assert_array_equal(bits(run(packed, x, parallel)), bits(run(params, x, parallel)))


@pytest.mark.parametrize("tp", [1, 8])
def test_the_decode_tier_is_the_xla_tier_on_cpu(tp):
    parallel, params = parameters(tp)
    packed = pack_params(params, CONFIG, parallel)
    plan = plan_layer(CONFIG, 9, tp=tp, target="h200", packed=True)
    assert plan.experts.tier == "decode"
    x = tokens_of(9, CONFIG.hidden_size)
    decoded = run(packed, x, parallel, plan=plan)
    np.testing.assert_array_equal(bits(decoded), bits(run(params, x, parallel)))


def test_each_rank_holds_its_own_share():
    parallel, params = parameters(8)
    packed = pack_params(params, CONFIG, parallel).experts
    for shard in packed.gate_up.addressable_shards:
        assert shard.data.shape == (8, 64 // 8, 512 // 64 * 544)
    assert sum(shard.data.nbytes for shard in packed.down.addressable_shards) == packed.down.nbytes


def test_unpacking_gives_the_checkpoint_s_bytes_back():
    params = params_of(CONFIG)
    back = unpack_experts(pack_params(params, CONFIG).experts)
    jax.tree.map(np.testing.assert_array_equal, back, params.experts)


def test_experts_packed_for_another_number_of_ranks_are_refused():
    parallel, params = parameters(8)
    packed = pack_params(params, CONFIG, parallel)
    x = tokens_of(3, CONFIG.hidden_size)
    with pytest.raises(ValueError, match=r"layout 'k3jax-m16k64-v1-i64', want .*-i256': they were"):
        moe_layer(packed, x, config=CONFIG, parallel=parallel_of(2))


def test_a_tag_of_another_version_is_refused():
    packed = pack_params(params_of(CONFIG), CONFIG)
    old = dataclasses.replace(packed, experts=dataclasses.replace(packed.experts, layout="v0"))
    with pytest.raises(ValueError, match="experts have layout 'v0', want"):
        moe_layer(old, tokens_of(3, CONFIG.hidden_size), config=CONFIG)


def test_a_plan_for_the_other_order_is_refused():
    plan = plan_layer(CONFIG, 3, target="h200", packed=True)
    with pytest.raises(ValueError, match="plan is for packed=True, this call has False"):
        moe_layer(params_of(CONFIG), tokens_of(3, CONFIG.hidden_size), config=CONFIG, plan=plan)


def test_widths_that_the_order_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="kernel order needs L a multiple of 256"):
        pack_params(params_of(TINY), TINY)


def test_the_plan_says_what_the_kernels_need():
    plan = plan_layer(MoEConfig.kimi_k3(), 8, tp=8, target="h200")
    assert "convert them with k3jax.prepare_params" in dict(plan.experts.declined)["decode"]
    with pytest.raises(ValueError, match="experts='decode' cannot run here: the experts are in"):
        plan_layer(MoEConfig.kimi_k3(), 8, tp=8, target="h200", experts="decode")


def test_preparing_follows_the_device():
    params = params_of(CONFIG)
    assert prepare_params(params, CONFIG) is params  # a CPU has no kernels
    packed = prepare_params(params, CONFIG, target=Target.named("h200"))
    assert isinstance(packed.experts, PackedExperts)
    tiny = params_of(TINY)
    assert prepare_params(tiny, TINY, target=Target.named("h200")) is tiny


def test_experts_left_in_the_wrong_order_are_a_warning(caplog):
    config = dataclasses.replace(CONFIG, rms_norm_eps=7e-5)
    plan = plan_layer(config, 3, target="h200")
    moe_layer(params_of(config), tokens_of(3, config.hidden_size), config=config, plan=plan)
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert (
        "experts run in XLA on h200: the experts are in the checkpoint's order" in warning.message
    )


@pytest.mark.parametrize("tp", [1, 8])
def test_flax_modules_hold_kernel_order(tp):
    parallel, params = parameters(tp)
    packed = pack_params(params, CONFIG, parallel)
    x = tokens_of(5, CONFIG.hidden_size)
    want = bits(run(params, x, parallel))
    module = nnx_module.from_params(CONFIG, packed, parallel)
    graph, state = nnx.split(module)
    assert set(state["experts"]) == {"gate_up", "down"}
    got = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    np.testing.assert_array_equal(bits(got), want)
    linen = linen_module(CONFIG, parallel=parallel)
    got = jax.jit(linen.apply)(variables_of(packed), x)
    np.testing.assert_array_equal(bits(got), want)


def test_flax_modules_refuse_experts_packed_for_other_ranks():
    parallel, params = parameters(8)
    packed = pack_params(params, CONFIG, parallel)
    with pytest.raises(ValueError, match="packed for another number of ranks"):
        nnx_module.from_params(CONFIG, packed, parallel_of(2))
    with pytest.raises(ValueError, match="packed for another number of ranks"):
        linen_module(CONFIG, parallel=parallel_of(2)).apply(
            variables_of(packed), tokens_of(3, CONFIG.hidden_size)
        )
