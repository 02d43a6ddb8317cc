"""The layer on GPUs: its kernels inside jax.jit and CUDA graphs, on one device and on several."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import MoEConfig, moe_layer, plan_layer, prepare_params
from k3jax.ops.check import CHECKED_OPS, run_check
from k3jax.runtime.target import Target
from tests.gpu.wanted import wanted
from tests.oracle import relative_error
from tests.support import WHOLE_LAYER, bits, parallel_of, params_of, sharded_params, tokens_of

pytestmark = pytest.mark.gpu

CONFIG = dataclasses.replace(MoEConfig.kimi_k3(), num_experts=32, experts_per_token=4)
COUNTS = (0, 1, 3, 8, 9, 32, 33, 64, 128, 300)


@functools.cache
def packed(tp):
    parallel = parallel_of(tp) if tp > 1 else None
    params = sharded_params(CONFIG, parallel) if parallel else params_of(CONFIG)
    return prepare_params(params, CONFIG, parallel)


@functools.cache
def step(tp, captured=True):
    parallel = parallel_of(tp) if tp > 1 else None
    size = 1 if captured else 1_000_000
    return jax.jit(
        functools.partial(moe_layer, config=CONFIG, parallel=parallel),
        compiler_options={"xla_gpu_graph_min_graph_size": size},
    )


def need_devices(count):
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} GPUs, there are {len(jax.devices())}")


@pytest.mark.parametrize("op", CHECKED_OPS)
def test_kernels_against_their_reference(op):
    result = run_check(op, Target.current())
    assert result.passed, result


@pytest.mark.parametrize("num_tokens", COUNTS)
def test_against_float32(num_tokens):
    x, want = wanted(CONFIG, COUNTS)[num_tokens]
    y = step(1)(packed(1), x)
    assert y.shape == want.shape
    if num_tokens:
        assert relative_error(y, want) < WHOLE_LAYER


def test_kernels_are_what_a_decode_step_takes():
    plan = plan_layer(CONFIG, 8, packed=True)
    assert (plan.router.tier, plan.experts.tier) == ("kernel", "decode")


def test_captured_replay_with_changed_inputs_equals_issued_calls():
    captured, issued = step(1), step(1, captured=False)
    inputs = [tokens_of(8, CONFIG.hidden_size, seed) for seed in range(5)]
    replayed = [np.asarray(captured(packed(1), x)) for x in inputs]
    for x, y in zip(inputs, replayed, strict=True):
        np.testing.assert_array_equal(bits(y), bits(issued(packed(1), x)))
    assert len({y.tobytes() for y in replayed}) == len(inputs)


def test_large_then_small_then_large_batch():
    """Scratch that a large batch leaves behind must not reach a small one."""
    large, small = tokens_of(64, CONFIG.hidden_size), tokens_of(1, CONFIG.hidden_size)
    run = step(1)
    first = run(packed(1), small)
    run(packed(1), jnp.full_like(large, jnp.nan))
    np.testing.assert_array_equal(bits(run(packed(1), small)), bits(first))


def test_rows_do_not_depend_on_the_batch_they_are_in():
    """The expert kernels are batch-invariant; XLA's products around them need not be."""
    from k3jax.ops.experts.api import run_kernels
    from k3jax.ops.experts.check import random_experts
    from k3jax.ops.experts.packing import pack_experts

    target = Target.current()
    experts = jax.jit(pack_experts)(random_experts(CONFIG, 8, jax.random.key(0)))
    z = tokens_of(64, CONFIG.latent_size)
    ids = jnp.asarray(np.random.default_rng(0).permuted(np.tile(np.arange(32), (64, 1)), axis=1))
    ids = ids[:, :4].astype(jnp.int32)
    weights = jax.random.uniform(jax.random.key(1), ids.shape)

    def run(rows):
        call = functools.partial(run_kernels, tier="decode", config=CONFIG, tp=8, target=target)
        return jax.jit(call)(z[rows], ids[rows], weights[rows], experts)

    whole = run(slice(None))
    for rows in (slice(0, 1), slice(3, 8), slice(20, 53)):
        np.testing.assert_array_equal(bits(run(rows)), bits(whole)[rows])


def test_two_devices_in_turn():
    need_devices(2)
    x = tokens_of(8, CONFIG.hidden_size)
    run, results = step(1), []
    for device in [*jax.devices()[:2]] * 3:
        params = jax.device_put(packed(1), device)
        results.append(bits(run(params, jax.device_put(x, device))))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 300])
def test_tensor_parallel_over_two_devices(num_tokens):
    need_devices(2)
    x, want = wanted(CONFIG, COUNTS)[num_tokens]
    y = step(2)(packed(2), x)
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(bits(shard.data), bits(y))
    assert relative_error(y, want) < WHOLE_LAYER
