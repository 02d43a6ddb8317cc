"""The Linen module: names, boxes, gradients, transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.layer import moe_layer
from k3jax.linen import MXFP4_COLLECTION, KimiK3MoE, variables_of
from k3jax.parallel import Parallel
from k3jax.params import as_dict, iter_infos, param_specs
from k3jax.plan import plan_layer
from tests import oracle
from tests.support import (
    GRADIENT,
    SMALL,
    WHOLE_LAYER,
    bits,
    data_and_tensor_parallel,
    numpy_params,
    params_of,
    tokens_of,
)

LAYERS, TOKENS = 3, 6
EVERYTHING = {"params": 0, MXFP4_COLLECTION: 0}


class Stack(nn.Module):
    """Residual layers, scanned and rematerialised."""

    parallel: Parallel

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            nn.remat(lambda layer, x: (x + layer(x), None)),
            variable_axes=EVERYTHING,
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scan(KimiK3MoE(SMALL, self.parallel, "expert_mlp", name="moe"), x)[0]


def names_of(variables) -> set[str]:
    merged = variables["params"] | variables[MXFP4_COLLECTION]
    return set(flatten_dict(merged, sep="."))


def test_init_draws_boxed_variables_with_the_checkpoints_names():
    module = KimiK3MoE(SMALL, data_and_tensor_parallel(AxisType.Auto))
    variables = jax.jit(module.init)(jax.random.key(0), tokens_of(2, SMALL.hidden_size))
    specs = nn.get_partition_spec(variables)
    assert specs["params"] | specs[MXFP4_COLLECTION] == as_dict(param_specs(SMALL, "model"))
    plain = nn.unbox(variables)
    assert names_of(plain) == {info.name for info in iter_infos(SMALL)}
    flat = flatten_dict(plain["params"] | plain[MXFP4_COLLECTION], sep=".")
    for info in iter_infos(SMALL):
        assert (flat[info.name].shape, flat[info.name].dtype) == (info.shape, info.dtype)
        assert len(np.unique(flat[info.name])) > 1, info.name
    assert set(plain[MXFP4_COLLECTION]) == {"experts"}
    assert "experts" not in plain["params"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_apply_against_the_oracle(kind):
    module = KimiK3MoE(SMALL, data_and_tensor_parallel(kind))
    x = tokens_of(TOKENS, SMALL.hidden_size)
    got = jax.jit(module.apply)(variables_of(params_of(SMALL)), x)
    want = oracle.layer(numpy_params(params_of(SMALL), SMALL), x, SMALL)
    assert oracle.relative_error(got, want) < WHOLE_LAYER


def test_options_pass_through():
    module = KimiK3MoE(SMALL, data_and_tensor_parallel(AxisType.Auto))
    x = tokens_of(TOKENS, SMALL.hidden_size)
    options = {
        "router_logits": jax.random.normal(jax.random.key(7), (TOKENS, SMALL.num_experts)),
        "routed_input": tokens_of(TOKENS, SMALL.latent_size, seed=5),
        "token_mask": jnp.arange(TOKENS) != 2,
    }
    plan = plan_layer(SMALL, TOKENS // 2, tp=4, output="scattered", experts="reference")
    apply = functools.partial(module.apply, plan=plan, output="scattered")
    got = jax.jit(apply)(variables_of(params_of(SMALL)), x, **options)
    assert got.sharding.is_equivalent_to(module.parallel.sharding(P("data", "model")), 2)
    want = jax.jit(functools.partial(moe_layer, config=SMALL))(params_of(SMALL), x, **options)
    assert oracle.relative_error(got, want) < WHOLE_LAYER


def test_gradient_of_the_params_collection():
    x = tokens_of(TOKENS, SMALL.hidden_size)

    def gradient(parallel, num_tokens, tp):
        module = KimiK3MoE(SMALL, parallel)
        plan = plan_layer(SMALL, num_tokens, tp=tp, experts="reference")
        variables = variables_of(params_of(SMALL))

        def loss(params):
            y = module.apply(variables | {"params": params}, x, plan=plan).astype(jnp.float32)
            return jnp.sum(y * y)

        return flatten_dict(jax.jit(jax.grad(loss))(variables["params"]), sep=".")

    sharded, alone = (
        gradient(data_and_tensor_parallel(AxisType.Auto), TOKENS // 2, 4),
        gradient(None, TOKENS, 1),
    )
    for name in sharded.keys() - {"gate.e_score_correction_bias"}:
        assert np.any(sharded[name]), name
        assert oracle.relative_error(sharded[name], alone[name]) < GRADIENT, name


def test_gradient_of_a_tier_without_one_is_refused():
    module, variables = KimiK3MoE(SMALL), variables_of(params_of(SMALL))
    x = tokens_of(TOKENS, SMALL.hidden_size)
    with pytest.raises(NotImplementedError, match="plan the layer with experts='reference'"):
        jax.grad(lambda x: jnp.sum(module.apply(variables, x).astype(jnp.float32)))(x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_scan_and_remat_with_logical_names(kind):
    parallel = data_and_tensor_parallel(kind)
    stack = Stack(parallel)
    x = tokens_of(TOKENS, SMALL.hidden_size)
    boxed = jax.eval_shape(stack.init, jax.random.key(0), x)
    names = nn.get_partition_spec(boxed)[MXFP4_COLLECTION]["moe"]["experts"]["w1"]["packed"]
    assert names == P("layers", None, "expert_mlp", None)
    rules = [("layers", None), ("expert_mlp", "model")]
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), parallel.mesh, rules)

    one = [variables_of(params_of(SMALL, seed)) for seed in range(LAYERS)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *one)
    stacked = jax.device_put({name: {"moe": part} for name, part in stacked.items()}, shardings)
    got = jax.jit(stack.apply)(stacked, x)

    apply = jax.jit(KimiK3MoE(SMALL, parallel).apply)
    y = x
    for variables in one:
        y = y + apply(variables, y)
    np.testing.assert_array_equal(bits(got), bits(y))
