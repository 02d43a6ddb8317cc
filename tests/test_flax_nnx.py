"""The NNX module: names, placement, state, gradients, transformations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.config import MoEConfig
from k3jax.layer import moe_layer
from k3jax.nnx import KimiK3MoE, Mxfp4Variable
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
    parallel_of,
    params_of,
    sharded_params,
    tokens_of,
)

KINDS = (AxisType.Auto, AxisType.Explicit)
LAYERS, TOKENS = 3, 6


def names_of(state) -> set[str]:
    return {".".join(path) for path, _ in nnx.to_flat_state(state)}


@nnx.jit
def call(layer, x):
    return layer(x)


@functools.cache
def stacked(kind):
    """Graph and state of a module whose arrays have a leading axis of layers."""
    parallel = data_and_tensor_parallel(kind)
    layers = [
        nnx.split(KimiK3MoE.from_params(SMALL, params_of(SMALL, seed), parallel))
        for seed in range(LAYERS)
    ]
    return layers[0][0], jax.tree.map(lambda *leaves: jnp.stack(leaves), *[s for _, s in layers])


def assert_same(got, want):
    np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("change", [{}, {"latent_norm": False}, {"num_shared_experts": 0}])
def test_names_are_those_of_the_checkpoint(change):
    config = dataclasses.replace(SMALL, **change)
    layer = nnx.eval_shape(lambda: KimiK3MoE(config, rngs=nnx.Rngs(0)))
    assert names_of(nnx.state(layer)) == {info.name for info in iter_infos(config)}
    for info in iter_infos(config):
        array = functools.reduce(getattr, info.name.split("."), layer).get_value()
        assert (array.shape, array.dtype) == (info.shape, info.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_eight_ranks_against_the_oracle(kind):
    parallel = parallel_of(8, "model", kind)
    layer = KimiK3MoE.from_params(SMALL, params_of(SMALL), parallel)
    x = tokens_of(TOKENS, SMALL.hidden_size)
    want = oracle.layer(numpy_params(params_of(SMALL), SMALL), x, SMALL)
    assert oracle.relative_error(call(layer, x), want) < WHOLE_LAYER


@pytest.mark.parametrize("kind", KINDS)
def test_variables_are_placed_without_a_mesh_context(kind):
    parallel = parallel_of(8, "model", kind)
    layer = KimiK3MoE(SMALL, rngs=nnx.Rngs(0), parallel=parallel)
    specs = param_specs(SMALL, "model")
    placed = jax.tree.map(lambda array: array.sharding, layer.params)
    for spec, sharding, info in zip(
        jax.tree.leaves(specs), jax.tree.leaves(placed), iter_infos(SMALL), strict=True
    ):
        assert sharding.is_equivalent_to(parallel.sharding(spec), len(info.shape)), info.name
    partition = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
    assert partition == as_dict(specs)


def test_logical_axis_names_resolve_to_the_mesh_axis():
    parallel = parallel_of(8)
    layer = KimiK3MoE.from_params(SMALL, params_of(SMALL), parallel, logical_axis="expert_mlp")
    assert layer.experts.w2.packed.get_metadata("out_sharding") == (None, None, "expert_mlp")
    partition = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
    assert partition == as_dict(param_specs(SMALL, parallel.axis))


def test_abstract_init_of_the_real_size_allocates_nothing():
    real = MoEConfig.kimi_k3()
    layer = nnx.eval_shape(lambda: KimiK3MoE(real, rngs=nnx.Rngs(0), parallel=parallel_of(8)))
    leaves = jax.tree.leaves(nnx.state(layer))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert layer.experts.w1.packed.get_value().shape == (896, 3072, 1792)
    assert layer.experts.w1.packed.get_value().sharding.spec == P(None, "tp", None)


def test_abstract_module_takes_loaded_arrays():
    parallel = parallel_of(8)
    layer = nnx.eval_shape(lambda: KimiK3MoE(SMALL, rngs=nnx.Rngs(0), parallel=parallel))
    nnx.update(layer, as_dict(sharded_params(SMALL, parallel, 1)))
    x = tokens_of(TOKENS, SMALL.hidden_size)
    loaded = KimiK3MoE.from_params(SMALL, params_of(SMALL, 1), parallel)
    assert_same(call(layer, x), call(loaded, x))


def test_arrays_in_place_are_not_copied():
    params = sharded_params(SMALL, parallel_of(8))
    held = KimiK3MoE.from_params(SMALL, params, parallel_of(8)).params
    for info, given, kept in zip(
        iter_infos(SMALL), jax.tree.leaves(params), jax.tree.leaves(held), strict=True
    ):
        pointers = [
            [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
            for array in (given, kept)
        ]
        assert pointers[0] == pointers[1], info.name


def test_parameters_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"params\.gate\.weight has shape"):
        KimiK3MoE.from_params(MoEConfig.tiny(), params_of(SMALL))


def test_split_merge_and_update():
    layer = KimiK3MoE.from_params(SMALL, params_of(SMALL, 0), parallel_of(8))
    other = KimiK3MoE.from_params(SMALL, params_of(SMALL, 1), parallel_of(8))
    x = tokens_of(TOKENS, SMALL.hidden_size)
    before, wanted = call(layer, x), call(other, x)
    graph, params, experts = nnx.split(layer, nnx.Param, Mxfp4Variable)
    assert names_of(experts) == {i.name for i in iter_infos(SMALL) if i.name.startswith("experts.")}
    assert_same(call(nnx.merge(graph, params, experts), x), before)
    assert not np.array_equal(bits(before), bits(wanted))
    nnx.update(layer, nnx.state(other))
    assert_same(call(layer, x), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_options_pass_through(kind):
    parallel = data_and_tensor_parallel(kind)
    params = params_of(SMALL)
    layer = KimiK3MoE.from_params(SMALL, params, parallel)
    x = tokens_of(TOKENS, SMALL.hidden_size)
    options = {
        "router_logits": jax.random.normal(jax.random.key(7), (TOKENS, SMALL.num_experts)),
        "routed_input": tokens_of(TOKENS, SMALL.latent_size, seed=5),
        "token_mask": jnp.arange(TOKENS) != 2,
    }
    plan = plan_layer(SMALL, TOKENS // 2, tp=4, output="scattered", experts="reference")
    fixed = {"plan": plan, "output": "scattered"}
    got = nnx.jit(lambda layer, x, options: layer(x, **fixed, **options))(layer, x, options)
    assert got.sharding.is_equivalent_to(parallel.sharding(P("data", "model")), 2)
    want = jax.jit(functools.partial(moe_layer, config=SMALL))(params, x, **options)
    assert oracle.relative_error(got, want) < WHOLE_LAYER
    assert not np.any(np.asarray(got)[2])


def reference_plan(num_tokens, tp):
    return plan_layer(SMALL, num_tokens, tp=tp, experts="reference")


def test_gradient_reaches_every_param_and_passes_the_bytes_by():
    x = tokens_of(TOKENS, SMALL.hidden_size)

    def gradients(parallel, tp):
        layer = KimiK3MoE.from_params(SMALL, params_of(SMALL), parallel)

        @nnx.jit
        def both(layer, x):
            def loss(layer, x):
                y = layer(x, plan=reference_plan(TOKENS, tp)).astype(jnp.float32)
                return jnp.sum(y * y)

            return nnx.grad(loss, argnums=(0, 1))(layer, x)

        return both(layer, x)

    of_params, of_x = gradients(parallel_of(8), 8)
    of_params_alone, of_x_alone = gradients(None, 1)
    dense = {info.name for info in iter_infos(SMALL) if not info.name.startswith("experts.")}
    assert names_of(of_params) == dense
    flat = {".".join(path): leaf for path, leaf in nnx.to_flat_state(of_params)}
    alone = {".".join(path): leaf for path, leaf in nnx.to_flat_state(of_params_alone)}
    assert not np.any(flat.pop("gate.e_score_correction_bias").get_value())  # it only chooses
    for name, gradient in flat.items():
        got, want = gradient.get_value(), alone[name].get_value()
        assert np.any(got), name
        assert oracle.relative_error(got, want) < GRADIENT, name
    assert oracle.relative_error(of_x, of_x_alone) < GRADIENT


def test_gradient_of_a_tier_without_one_is_refused():
    layer = KimiK3MoE.from_params(SMALL, params_of(SMALL), parallel_of(8))
    x = tokens_of(TOKENS, SMALL.hidden_size)
    with pytest.raises(NotImplementedError, match="plan the layer with experts='reference'"):
        nnx.jit(nnx.grad(lambda layer, x: jnp.sum(layer(x).astype(jnp.float32))))(layer, x)


@pytest.mark.parametrize("kind", KINDS)
def test_scan_over_stacked_layers(kind):
    graph, state = stacked(kind)
    x = tokens_of(TOKENS, SMALL.hidden_size)

    @jax.jit
    def scanned(state, x):
        def body(x, state):
            return x + nnx.merge(graph, state)(x), None

        return lax.scan(body, x, state)[0]

    y = x
    for seed in range(LAYERS):
        one = KimiK3MoE.from_params(SMALL, params_of(SMALL, seed), data_and_tensor_parallel(kind))
        y = y + call(one, y)
    assert_same(scanned(state, x), y)


def test_layers_made_and_scanned_by_nnx():
    parallel = data_and_tensor_parallel(AxisType.Auto)
    layers = {nnx.PARTITION_NAME: None}

    @nnx.jit
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(transform_metadata=layers)
    def create(rngs):
        return KimiK3MoE(SMALL, rngs=rngs, parallel=parallel)

    @nnx.jit
    def run(stack, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=layers)
        def body(layer, x):
            return x + layer(x)

        return body(stack, x)

    stack = create(nnx.Rngs(0))
    partition = nnx.get_partition_spec(nnx.state(stack))
    assert partition["experts"]["w1"]["packed"].get_value() == P(None, None, "model", None)
    x = tokens_of(TOKENS, SMALL.hidden_size)
    graph, state = nnx.split(stack)
    y = x
    for index in range(LAYERS):
        y = y + call(nnx.merge(graph, jax.tree.map(lambda leaf, i=index: leaf[i], state)), y)
    assert_same(run(stack, x), y)


def test_remat_keeps_the_gradient():
    graph, state = stacked(AxisType.Explicit)
    x = tokens_of(TOKENS, SMALL.hidden_size)

    def gradient(wrap):
        @wrap
        def body(x, state):
            return x + nnx.merge(graph, state)(x, plan=reference_plan(TOKENS // 2, 4)), None

        def loss(x):
            return jnp.sum(lax.scan(body, x, state)[0].astype(jnp.float32))

        return jax.jit(jax.grad(loss))(x)

    plain = gradient(lambda body: body)
    assert np.any(plain)
    assert oracle.relative_error(gradient(jax.checkpoint), plain) < GRADIENT


def test_vmap_is_the_same_as_folding_the_batch():
    layer = KimiK3MoE.from_params(SMALL, params_of(SMALL), data_and_tensor_parallel(AxisType.Auto))
    batch = jnp.stack([tokens_of(TOKENS, SMALL.hidden_size, seed) for seed in range(2)])
    folded = call(layer, batch)
    assert_same(jax.jit(jax.vmap(layer))(batch), folded)
    assert_same(call(layer, batch[1]), folded[1])
