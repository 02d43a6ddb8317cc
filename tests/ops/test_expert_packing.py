"""Kernel order of the experts' weights: read back by its description, and refused when wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.experts.packing import (
    check_packed,
    chunk_groups,
    layout_tag,
    pack_experts,
    unpack_experts,
)
from k3jax.params import ExpertParams
from k3jax.quant.mxfp4 import Mxfp4Array
from tests import oracle

SIZES = ((2, 64, 256), (3, 192, 512), (1, 320, 768), (2, 384, 3584))


def random_experts(num_experts, inner, latent, scales=(0, 256)):
    rng = np.random.default_rng()

    def matrix(*shape):
        packed = rng.integers(0, 256, (num_experts, *shape[:-1], shape[-1] // 2), np.uint8)
        scale = rng.integers(*scales, (num_experts, *shape[:-1], shape[-1] // 32), np.uint8)
        return Mxfp4Array(jnp.asarray(packed), jnp.asarray(scale))

    return ExpertParams(matrix(inner, latent), matrix(inner, latent), matrix(latent, inner))


def read_tile(tile, row, k):
    """Code and scale byte of one element of a row tile, straight from the layout's description."""
    chunks = len(tile) // 544
    group, offset, first = next(
        (size, sum(sizes) * 544, sum(sizes))
        for sizes, size in (
            (chunk_groups(chunks)[:n], chunk_groups(chunks)[n])
            for n in range(len(chunk_groups(chunks)))
        )
        if sum(sizes) <= k // 64 < sum(sizes) + size
    )
    chunk, (pair, g) = k // 64 - first, divmod(row, 8)
    t, element = divmod(k % 64, 16)
    word_offset = offset + chunk * 512 + (g * 4 + t) * 16 + (pair * 2 + element // 8) * 4
    word = int.from_bytes(tile[word_offset : word_offset + 4].tobytes(), "little")
    number, high = divmod(element % 8, 2)
    if number < 3:
        turned = (word >> 3 * number | word << 32 - 3 * number) & 0xFFFFFFFF
    else:
        turned = (word & 0x001B001B) * 4228 & 0xFFFFFFFF
    half = turned >> 16 * high
    code = half >> 12 & 8 | half >> 6 & 7
    scale = tile[offset + group * 512 + ((g * 2 + t // 2) * group + chunk) * 2 + pair]
    return code, scale


@pytest.mark.parametrize(("num_experts", "inner", "latent"), SIZES)
def test_round_trip(num_experts, inner, latent):
    params = random_experts(num_experts, inner, latent)
    packed = jax.jit(pack_experts)(params)
    check_packed(packed, num_experts, latent, inner)
    for want, got in zip(
        jax.tree.leaves(params), jax.tree.leaves(jax.jit(unpack_experts)(packed)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_size_is_that_of_the_checkpoint():
    params = random_experts(2, 192, 512)
    packed = pack_experts(params)
    assert sum(x.nbytes for x in jax.tree.leaves(packed)) == sum(
        x.nbytes for x in jax.tree.leaves(params)
    )


@pytest.mark.parametrize(("num_experts", "inner", "latent"), SIZES[:3])
def test_elements_stand_where_the_layout_says(num_experts, inner, latent):
    params = random_experts(num_experts, inner, latent)
    packed = pack_experts(params)
    gate_up, down = np.asarray(packed.gate_up), np.asarray(packed.down)
    rng = np.random.default_rng()
    for _ in range(100):
        expert, neuron = rng.integers(num_experts), rng.integers(inner)
        row, k, i = rng.integers(latent), rng.integers(latent), rng.integers(inner)
        places = (
            (params.w1, neuron, k, gate_up[expert, neuron // 8], neuron % 8),
            (params.w3, neuron, k, gate_up[expert, neuron // 8], 8 + neuron % 8),
            (params.w2, row, i, down[expert, row // 16], row % 16 // 2 + 8 * (row % 2)),
        )
        for matrix, source_row, source_k, tile, tile_row in places:
            byte = int(matrix.packed[expert, source_row, source_k // 2])
            code, scale = read_tile(tile, tile_row, source_k)
            assert code == (byte >> 4 if source_k % 2 else byte & 15)
            assert scale == matrix.scale[expert, source_row, source_k // 32]


def test_placed_codes_are_their_values():
    """Bits 15 and 8..6 of a bf16 hold value * 2^-126, which is what the kernels rely on."""
    code = np.arange(16)
    bits = ((code & 8) << 12 | (code & 7) << 6).astype(np.uint16)
    placed = bits.view(jnp.bfloat16.dtype).astype(np.float64)
    np.testing.assert_array_equal(placed * 2.0**126, oracle.E2M1)


@pytest.mark.parametrize(("inner", "latent"), [(64, 128), (96, 256), (32, 256)])
def test_sizes_that_the_order_cannot_hold(inner, latent):
    with pytest.raises(ValueError, match=r"kernel order needs L a multiple of 256 and I .* 64"):
        pack_experts(random_experts(1, inner, latent))


def test_tag_is_part_of_the_structure():
    packed = pack_experts(random_experts(1, 64, 256))
    other = dataclasses.replace(packed, layout="another")
    assert jax.tree.structure(packed) != jax.tree.structure(other)
    for refuse in (unpack_experts, lambda packed: check_packed(packed, 1, 256, 64)):
        with pytest.raises(ValueError, match=f"layout 'another', want '{layout_tag(64)}'.*pack"):
            refuse(other)


def test_tag_names_the_share_of_a_rank():
    """The down matrix is cut within a rank's share: the bytes for other ranks differ."""
    packed = pack_experts(random_experts(1, 128, 256))
    with pytest.raises(ValueError, match=f"layout '{layout_tag(128)}', want '{layout_tag(64)}'"):
        check_packed(packed, 1, 256, 64)


def test_wrong_weights_are_refused():
    params = random_experts(1, 64, 256)
    packed = pack_experts(params)
    with pytest.raises(TypeError, match="experts are ExpertParams; the kernels read PackedExperts"):
        check_packed(params, 1, 256, 64)
    with pytest.raises(TypeError, match=r"experts.down is int8, want uint8"):
        check_packed(dataclasses.replace(packed, down=packed.down.astype(jnp.int8)), 1, 256, 64)
    with pytest.raises(ValueError, match=r"experts.gate_up has shape \(1, 8, 2176\), want"):
        check_packed(packed, 2, 256, 64)
