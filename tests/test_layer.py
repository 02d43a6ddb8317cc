"""The whole layer against the oracle: token counts, tensor parallelism, options, bad input."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.layer import moe_layer
from k3jax.parallel import Parallel
from k3jax.plan import plan_layer
from tests import oracle
from tests.support import (
    ROUTED_LIKE_K3,
    TINY,
    TOKENS,
    WHOLE_LAYER,
    bits,
    data_and_tensor_parallel,
    numpy_params,
    parallel_of,
    params_of,
    sharded_params,
    tokens_of,
)


def run(x, config=TINY, parallel=None, params=None, plan=None, **options):
    if params is None:
        params = sharded_params(config, parallel) if parallel else params_of(config)

    @jax.jit
    def call(params, x, options):
        fixed = {"output": output} if output else {}
        return moe_layer(params, x, config=config, parallel=parallel, plan=plan, **fixed, **options)

    output = options.pop("output", None)
    return call(params, x, options)


def choices(x, config=TINY):
    """The choices in float32, which the oracle must share: near-ties flip in float64."""
    from k3jax.ops.router import reference

    params = params_of(config)
    ids, weights = reference.choose(
        reference.logits(x, params.gate.weight),
        params.gate.e_score_correction_bias,
        config.experts_per_token,
    )
    return np.asarray(ids), np.asarray(weights, np.float64)


def want(x, config=TINY, **options):
    arrays = numpy_params(params_of(config), config)
    return oracle.layer(arrays, x, config, *choices(x, config), rounded=False, **options)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_one_device(num_tokens):
    x = tokens_of(num_tokens, TINY.hidden_size)
    y = run(x)
    assert y.dtype == jnp.bfloat16
    assert oracle.relative_error(y, want(x)) < WHOLE_LAYER


@pytest.mark.parametrize("tail", ["allreduce_overlap", "column_parallel"])
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_eight_ranks(num_tokens, tail):
    x = tokens_of(num_tokens, TINY.hidden_size)
    y = run(x, parallel=parallel_of(8), plan=plan_layer(TINY, num_tokens, tp=8, tail=tail))
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(bits(shard.data), bits(y))
    assert oracle.relative_error(y, want(x)) < WHOLE_LAYER


@pytest.mark.parametrize("tail", ["unfused", "allreduce_overlap", "column_parallel"])
@pytest.mark.parametrize("tp", [2, 4, 16])
def test_every_tp(tp, tail):
    x = tokens_of(5, TINY.hidden_size)
    y = run(x, parallel=parallel_of(tp), plan=plan_layer(TINY, 5, tp=tp, tail=tail))
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(bits(shard.data), bits(y))
    assert oracle.relative_error(y, want(x)) < WHOLE_LAYER


@pytest.mark.parametrize("num_tokens", [n for n in TOKENS if 0 < n <= 128])
def test_fused_tail(num_tokens):
    """The custom call's host implementation: another protocol, the same numbers on every rank."""
    x = tokens_of(num_tokens, TINY.hidden_size)
    plan = plan_layer(TINY, num_tokens, tp=8, tail="tail_fusion")
    y = run(x, parallel=parallel_of(8), plan=plan)
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(bits(shard.data), bits(y))
    assert oracle.relative_error(y, want(x)) < WHOLE_LAYER


@pytest.mark.parametrize("output", ["replicated", "scattered"])
@pytest.mark.parametrize("tp", [2, 4, 16])
def test_fused_tail_at_every_tp(tp, output):
    x = tokens_of(5, TINY.hidden_size)
    plan = plan_layer(TINY, 5, tp=tp, tail="tail_fusion", output=output)
    y = run(x, parallel=parallel_of(tp), plan=plan, output=output)
    assert oracle.relative_error(y, want(x)) < WHOLE_LAYER


def test_fused_tails_of_two_data_parallel_groups_do_not_mix():
    parallel = data_and_tensor_parallel(AxisType.Auto)
    x = tokens_of(6, TINY.hidden_size)
    plan = plan_layer(TINY, 3, tp=parallel.tp, tail="tail_fusion")
    y = run(x, parallel=parallel, params=sharded_params(TINY, parallel), plan=plan)
    assert oracle.relative_error(y, want(x)) < WHOLE_LAYER


def test_many_tokens():
    x = tokens_of(600, TINY.hidden_size)
    y = run(x, parallel=parallel_of(8))
    assert oracle.relative_error(y, want(x)) < WHOLE_LAYER


def test_all_of_k3_s_experts():
    x = tokens_of(9, ROUTED_LIKE_K3.hidden_size)
    y = run(x, ROUTED_LIKE_K3, parallel_of(2))
    assert oracle.relative_error(y, want(x, ROUTED_LIKE_K3)) < WHOLE_LAYER


@pytest.mark.parametrize(
    "change",
    [
        {"num_shared_experts": 0},
        {"latent_norm": False},
        {"situ_linear_beta": None},
        {"renormalize": False, "routed_scaling_factor": 2.5},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("tp", [1, 4])
def test_other_configs(change, tp):
    config = dataclasses.replace(TINY, **change)
    x = tokens_of(5, config.hidden_size)
    arrays = numpy_params(params_of(config), config)
    y = run(x, config, parallel_of(tp) if tp > 1 else None)
    assert oracle.relative_error(y, oracle.layer(arrays, x, config, rounded=False)) < WHOLE_LAYER


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_any_axis_name_and_axis_type(kind):
    parallel = parallel_of(4, "model", kind)
    x = tokens_of(5, TINY.hidden_size)
    y = run(jax.device_put(x, parallel.sharding(P())), parallel=parallel)
    np.testing.assert_array_equal(bits(y), bits(run(x, parallel=parallel_of(4))))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_unsharded_parameters_are_split_on_the_way_in(kind):
    parallel = parallel_of(4, "tp", kind)
    whole = jax.device_put(params_of(TINY), parallel.sharding(P()))
    x = jax.device_put(tokens_of(5, TINY.hidden_size), parallel.sharding(P()))
    y = run(x, parallel=parallel, params=whole)
    np.testing.assert_array_equal(bits(y), bits(run(tokens_of(5, 256), parallel=parallel_of(4))))


def test_data_parallel_tokens():
    mesh = jax.make_mesh(
        (2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8]
    )
    parallel = Parallel(mesh, "tp", token_axes=("dp",))
    x = tokens_of(6, TINY.hidden_size)
    y = run(x, parallel=parallel, params=sharded_params(TINY, parallel))
    assert y.sharding.spec == P("dp")
    assert oracle.relative_error(y, want(x)) < WHOLE_LAYER


def test_scattered_output():
    x = tokens_of(5, TINY.hidden_size)
    y = run(x, parallel=parallel_of(8), output="scattered")
    assert y.sharding.spec == P(None, "tp")
    assert oracle.relative_error(y, want(x)) < WHOLE_LAYER


def test_leading_batch_dimensions_are_tokens():
    x = tokens_of(6, TINY.hidden_size)
    folded = run(x.reshape(2, 3, -1), parallel=parallel_of(2))
    np.testing.assert_array_equal(
        bits(folded).reshape(6, -1), bits(run(x, parallel=parallel_of(2)))
    )


def test_precomputed_router_logits():
    x = tokens_of(5, TINY.hidden_size)
    logits = jnp.tile(jnp.linspace(1, -1, TINY.num_experts, dtype=jnp.float32), (5, 1))
    y = run(x, router_logits=logits)
    arrays = numpy_params(params_of(TINY), TINY)
    bias = arrays["gate.e_score_correction_bias"]
    ids, weights = oracle.route(np.asarray(logits), bias, TINY.experts_per_token)
    right = oracle.layer(arrays, x, TINY, ids, weights, rounded=False)
    assert oracle.relative_error(y, right) < WHOLE_LAYER


def test_routed_input_replaces_the_down_projection():
    x = tokens_of(5, TINY.hidden_size)
    z = tokens_of(5, TINY.latent_size, seed=7)
    y = run(x, routed_input=z)
    assert oracle.relative_error(y, want(x, routed_input=z)) < WHOLE_LAYER


@pytest.mark.parametrize("tp", [1, 8])
def test_padded_rows_change_no_real_row(tp):
    """Padding may hold NaN; its rows come out zero and real rows keep their bits."""
    parallel = parallel_of(tp) if tp > 1 else None
    x = tokens_of(9, TINY.hidden_size)
    real = jnp.arange(9) < 6
    dirty = jnp.where(real[:, None], x, jnp.nan)
    clean = jnp.where(real[:, None], x, 0)
    first, second = (run(v, parallel=parallel, token_mask=real) for v in (dirty, clean))
    np.testing.assert_array_equal(bits(first), bits(second))
    np.testing.assert_array_equal(bits(first)[:6], bits(run(x, parallel=parallel))[:6])
    assert not np.asarray(first[6:], np.float32).any()


def test_a_nan_row_stays_in_its_row():
    x = tokens_of(9, TINY.hidden_size)
    clean, dirty = run(x), run(x.at[4].set(jnp.nan))
    others = np.arange(9) != 4
    np.testing.assert_array_equal(bits(clean)[others], bits(dirty)[others])
    assert np.isnan(np.asarray(dirty[4], np.float32)).all()


def test_padded_columns_of_a_shard_change_nothing():
    """K3 at TP=16 has 192 columns a rank; zero-padding them to 256 must keep every bit."""
    config = dataclasses.replace(
        TINY, expert_intermediate_size=192, num_shared_experts=0, latent_norm=False
    )
    wide = dataclasses.replace(config, expert_intermediate_size=256)
    params = params_of(config)

    def pad(matrix, axis, scale_byte):
        def one(array, size, value):
            width = [(0, 0)] * array.ndim
            width[axis] = (0, size - array.shape[axis])
            return jnp.pad(array, width, constant_values=value)

        packed, scale = (256, 256) if axis == 1 else (128, 8)
        return dataclasses.replace(
            matrix, packed=one(matrix.packed, packed, 0), scale=one(matrix.scale, scale, scale_byte)
        )

    experts = params.experts
    padded = dataclasses.replace(
        params,
        experts=dataclasses.replace(
            experts,
            w1=pad(experts.w1, 1, 0),
            w3=pad(experts.w3, 1, 127),
            w2=pad(experts.w2, 2, 254),
        ),
    )
    x = tokens_of(9, TINY.hidden_size)
    np.testing.assert_array_equal(
        bits(run(x, config, params=params)), bits(run(x, wide, params=padded))
    )


def test_runs_are_bitwise_repeatable():
    x = tokens_of(33, TINY.hidden_size)
    first, second = (run(x, parallel=parallel_of(8)) for _ in range(2))
    np.testing.assert_array_equal(bits(first), bits(second))


def test_gradient_with_respect_to_x():
    x = tokens_of(3, TINY.hidden_size).astype(jnp.float32)
    direction = jax.random.normal(jax.random.key(5), x.shape)
    logits = jax.random.normal(jax.random.key(6), (3, TINY.num_experts))  # or choices would jump

    def loss(x, parallel, experts="reference"):
        tp = parallel.tp if parallel else 1
        params = sharded_params(TINY, parallel) if parallel else params_of(TINY)
        plan = plan_layer(TINY, 3, tp=tp, experts=experts)
        y = moe_layer(
            params,
            x.astype(jnp.bfloat16),
            config=TINY,
            parallel=parallel,
            plan=plan,
            router_logits=logits,
        )
        return jnp.sum(y.astype(jnp.float32) * direction)

    one = jax.grad(loss)(x, None)
    numeric = (loss(x + 0.05 * direction, None) - loss(x - 0.05 * direction, None)) / 0.1
    np.testing.assert_allclose(jnp.vdot(one, direction), numeric, rtol=0.1)
    four = jax.grad(loss)(x, parallel_of(4))
    assert oracle.relative_error(four, one) < 0.03
    with pytest.raises(NotImplementedError, match="experts='reference'"):
        jax.grad(loss)(x, None, "xla")


def test_the_plan_is_logged_once(caplog):
    config = dataclasses.replace(TINY, rms_norm_eps=3e-5)
    x = tokens_of(11, TINY.hidden_size)
    with caplog.at_level(logging.INFO, logger="k3jax"):
        for _ in range(2):
            moe_layer(params_of(TINY), x, config=config, parallel=None)
    lines = [record.message for record in caplog.records if record.name == "k3jax"]
    assert len(lines) == 1
    assert "11 tokens, tp=1, cpu: router=xla (runs everywhere); experts=xla" in lines[0]


BAD_CALLS = {
    "x dtype": ({"x": jnp.zeros((3, 256), jnp.float32)}, TypeError, "x is float32, want bfloat16"),
    "x width": (
        {"x": jnp.zeros((3, 128), jnp.bfloat16)},
        ValueError,
        r"x has shape \(3, 128\), want \[3, 256\]",
    ),
    "x rank": (
        {"x": jnp.zeros(256, jnp.bfloat16)},
        ValueError,
        r"x has shape \(256,\), want \[T, 256\]",
    ),
    "logits": (
        {"router_logits": jnp.zeros((3, 31), jnp.float32)},
        ValueError,
        r"router_logits has shape \(3, 31\), want \[3, 32\]",
    ),
    "logits dtype": (
        {"router_logits": jnp.zeros((3, 32), jnp.bfloat16)},
        TypeError,
        "router_logits is bfloat16, want float32",
    ),
    "routed input": (
        {"routed_input": jnp.zeros((4, 128), jnp.bfloat16)},
        ValueError,
        "routed_input has shape",
    ),
    "mask": ({"token_mask": jnp.ones(3, jnp.int32)}, TypeError, "token_mask is int32, want bool"),
    "output": ({"output": "sharded"}, ValueError, "output='sharded' must be"),
    "plan tokens": (
        {"plan": plan_layer(TINY, 4)},
        ValueError,
        "plan is for num_tokens=4, this call has 3",
    ),
    "plan tp": ({"plan": plan_layer(TINY, 3, tp=2)}, ValueError, "plan is for tp=2"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_named(case):
    change, error, message = BAD_CALLS[case]
    arguments = {"x": tokens_of(3, TINY.hidden_size), "config": TINY} | change
    with pytest.raises(error, match=message):
        moe_layer(params_of(TINY), **arguments)


def test_parameters_that_do_not_fit_are_named():
    params = params_of(TINY)
    x = tokens_of(3, TINY.hidden_size)
    floats = dataclasses.replace(
        params.experts.w1, packed=params.experts.w1.packed.astype(jnp.int8)
    )
    wrong = dataclasses.replace(params, experts=dataclasses.replace(params.experts, w1=floats))
    with pytest.raises(TypeError, match=r"params\.experts\.w1\.packed is int8, want uint8; MXFP4"):
        moe_layer(wrong, x, config=TINY)
    wrong = dataclasses.replace(params, routed_expert_norm=None)
    with pytest.raises(ValueError, match="params do not have the structure"):
        moe_layer(wrong, x, config=TINY)
    wrong = dataclasses.replace(params, routed_expert_up_proj=params.routed_expert_up_proj.T)
    with pytest.raises(ValueError, match=r"params\.routed_expert_up_proj has shape"):
        moe_layer(wrong, x, config=TINY)


def test_meshes_that_do_not_fit_are_named():
    mesh = parallel_of(2).mesh
    with pytest.raises(ValueError, match=r"axis 'model' is not in the mesh, which has \('tp',\)"):
        Parallel(mesh, "model")
    with pytest.raises(ValueError, match="cannot split both"):
        Parallel(mesh, "tp", token_axes=("tp",))
    three = parallel_of(3)
    with pytest.raises(
        ValueError, match=r"tp=3 does not divide.*sizes that work: \[1, 2, 4, 8, 16"
    ):
        moe_layer(params_of(TINY), tokens_of(3, 256), config=TINY, parallel=three)
    mesh = jax.make_mesh(
        (2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    parallel = Parallel(mesh, "tp", token_axes=("dp",))
    with pytest.raises(ValueError, match="x has 3 tokens, which token_axes"):
        moe_layer(params_of(TINY), tokens_of(3, 256), config=TINY, parallel=parallel)
