import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.runtime.batching import fold_vmap

CALLS = []


def layer(x, ids, weights):
    CALLS.append(x.shape)
    return {"y": x @ weights["w"], "ids": ids + 1}


def draw(*shape):
    return jnp.asarray(np.random.default_rng().standard_normal(shape), jnp.float32)


@pytest.fixture
def inputs():
    CALLS.clear()
    return draw(3, 5, 8), jnp.arange(15).reshape(3, 5), {"w": draw(8, 4)}


def test_mapped_axis_becomes_tokens(inputs):
    x, ids, weights = inputs
    result = jax.vmap(fold_vmap(layer, 2), in_axes=(0, 0, None))(x, ids, weights)
    np.testing.assert_allclose(result["y"], x @ weights["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(result["ids"], ids + 1)
    assert CALLS[-1] == (15, 8)


def test_unmapped_tokens_are_repeated_and_maps_nest(inputs):
    x, ids, weights = inputs
    twice = jax.vmap(jax.vmap(fold_vmap(layer, 2), (0, None, None)), (1, None, None))
    result = twice(x[:, :, None, :], ids[0, :1], weights)
    assert result["ids"].shape == (5, 3, 1)
    wanted = jnp.einsum("abk,kn->ban", x, weights["w"])[:, :, None]
    np.testing.assert_allclose(result["y"], wanted, rtol=1e-5, atol=1e-6)


def test_without_vmap_nothing_changes(inputs):
    x, ids, weights = inputs
    result = jax.jit(fold_vmap(layer, 2))(x[0], ids[0], weights)
    np.testing.assert_allclose(result["y"], x[0] @ weights["w"], rtol=1e-5, atol=1e-6)
    assert fold_vmap(layer, 2).__name__ == "layer"


def test_mapped_weights_are_refused(inputs):
    x, ids, weights = inputs
    stacked = {"w": jnp.stack([weights["w"]] * 3)}
    with pytest.raises(NotImplementedError, match=r"layer: jax.vmap maps over its weights"):
        jax.vmap(fold_vmap(layer, 2))(x, ids, stacked)
