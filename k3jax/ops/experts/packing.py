"""Expert weights in kernel order: a byte permutation of the checkpoint, made once at load.

A matrix [rows, K] becomes row tiles of 16 rows, and a row tile is its K cut into groups of up to
four chunks of 64, each group one contiguous block that a warp consumes with a few wide loads:

    group = elements: chunk x lane x 16 bytes, then scales: row (8) x half (2) x chunk x pair (2)

Lane (g, t) = (lane / 4, lane % 4) of a warp holds, for each chunk, k = 16 t .. 16 t + 15 of tile
rows g and g + 8: operand A of four m16n8k16 instructions, if the other operand is read in the same
order of k. Its scales are bytes (g, t / 2, chunk, pair), pair 0 being row g and pair 1 row g + 8.

The eight codes of a 32-bit word are spread so that the four bf16 pairs fall out with a rotation or
one multiply and one mask each (`kernel_ptx.dequantize`): pair p holds elements 2p (low half) and
2p + 1 (high half), sign at bit 15 and the other three bits at 8..6 of its half, once the word is
rotated right by 0, 3 or 6; the fourth pair takes the bits that are left.

Tile rows: tile n of gate/up holds gate rows 8n .. 8n + 7 as rows 0 .. 7 and the same up rows as
rows 8 .. 15; tile n of down holds row 16n + 2g as row g and row 16n + 2g + 1 as row g + 8.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.config import MXFP4_GROUP_SIZE, MoEConfig
from k3jax.parallel import Parallel, RankGroup, run_sharded
from k3jax.params import ExpertParams, MoEParams, ParamInfo, param_specs
from k3jax.quant.mxfp4 import Leaf, Mxfp4Array
from k3jax.runtime.target import Target

ORDER = "k3jax-m16k64-v1"
"""Name of the order described above; a change of the order changes the name."""

ROW_TILE = 16
CHUNK = 64
"""Elements of K that feed four matrix instructions."""
NEURONS = 8
"""Neurons of a gate/up row tile: 8 gate rows and the 8 matching up rows."""
GROUP_CHUNKS = 4
GROUP_SIZE = GROUP_CHUNKS * CHUNK
"""Elements of K whose packed weights lie together: elements, then scales."""
MAX_EXPERTS = 1024
"""Experts that the kernels sort routes by: one thread each."""
CHUNK_BYTES = ROW_TILE * (CHUNK // 2 + CHUNK // MXFP4_GROUP_SIZE)
"""Bytes of 16 rows x 64 elements, scales included."""
ELEMENT_BYTES = ROW_TILE * CHUNK // 2
"""Of these, those of the elements."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedExperts:
    """The routed experts in kernel order.

    I is one rank's share of the intermediate size in the shapes of one rank, and the whole of it
    in those of all ranks: gate_up is split over ranks on its second axis, down on its last. Down is
    cut into groups within a rank's share, so the order belongs to that share, and the tag names it.

    Attributes:
        gate_up: uint8 [E, I / 8, L / 64 * 544].
        down: uint8 [E, L / 16, I / 64 * 544].
        layout: tag of the byte order, part of the pytree's structure.
    """

    gate_up: Leaf
    down: Leaf
    layout: str = dataclasses.field(metadata={"static": True})

    def expert(self, index) -> tuple[Mxfp4Array, Mxfp4Array, Mxfp4Array]:
        """w1 [I, L], w3 [I, L] and w2 [L, I] of one expert, on one rank's share."""
        tiles, latent = self.gate_up.shape[1], self.down.shape[1] * ROW_TILE
        gate_up = jax.tree.map(lambda a: a.reshape(tiles, 2, 8, -1), _unpack(self.gate_up[index]))
        w1, w3 = (
            jax.tree.map(lambda a, half=half: a[:, half].reshape(8 * tiles, -1), gate_up)
            for half in (0, 1)
        )
        w2 = jax.tree.map(
            lambda a: a.reshape(-1, 2, 8, a.shape[-1]).swapaxes(1, 2).reshape(latent, -1),
            _unpack(self.down[index]),
        )
        return w1, w3, w2


def layout_tag(inner: int) -> str:
    """The tag of experts that are packed for ranks with `inner` columns each."""
    return f"{ORDER}-i{inner}"


def packed_infos(config: MoEConfig, tp: int) -> PackedExperts:
    """The `ParamInfo` of each array of all ranks, for `tp` ranks."""
    E, L, inner = config.num_experts, config.latent_size, config.expert_intermediate_size
    gate_up = (E, inner // 8, L // CHUNK * CHUNK_BYTES)
    down = (E, L // ROW_TILE, inner // CHUNK * CHUNK_BYTES)
    return PackedExperts(
        ParamInfo("experts.gate_up", gate_up, jnp.uint8, 1),
        ParamInfo("experts.down", down, jnp.uint8, 2),
        layout_tag(inner // tp),
    )


def chunk_groups(num_chunks: int) -> tuple[int, ...]:
    """Chunks of each group of a row tile: fours, then a two, then a one."""
    whole, rest = divmod(num_chunks, GROUP_CHUNKS)
    return (GROUP_CHUNKS,) * whole + tuple(size for size in (2, 1) if rest & size)


def infos_of(
    experts: ExpertParams | PackedExperts, config: MoEConfig, parallel: Parallel | None
) -> PackedExperts | None:
    """The infos of experts in kernel order for the ranks of `parallel`; None for checkpoint order.

    Raises:
        ValueError: they were packed for another number of ranks, or by another version.
    """
    if not isinstance(experts, PackedExperts):
        return None
    tp = parallel.tp if parallel else 1
    check_layout(experts, config.expert_intermediate_size // tp)
    return packed_infos(config, tp)


def order_refusal(config: MoEConfig, tp: int, target: Target) -> str | None:
    """Why no kernel that reads this order can run, or None."""
    inner, latent = config.expert_intermediate_size // tp, config.latent_size
    if target.arch is None:
        return f"there are no kernels for {target.kind}"
    if latent % GROUP_SIZE:
        return f"latent_size={latent} is not a multiple of {GROUP_SIZE}"
    if inner % CHUNK:
        return f"expert_intermediate_size / tp = {inner} is not a multiple of {CHUNK}"
    if config.num_experts > MAX_EXPERTS:
        return (
            f"num_experts={config.num_experts} is more than the {MAX_EXPERTS} that routes are "
            "sorted by"
        )
    return None


def pack_params(
    params: MoEParams, config: MoEConfig, parallel: Parallel | None = None
) -> MoEParams:
    """`params` with the routed experts in kernel order, for the ranks of `parallel`.

    Each device packs its own share. Input and output exist at once; drop the input to free it.

    Raises:
        ValueError: a rank's share does not fit the order.
    """
    tp = parallel.tp if parallel else 1
    infos = packed_infos(config, tp)

    def pack(group: RankGroup, experts: ExpertParams) -> PackedExperts:
        del group
        return pack_experts(experts)

    specs = outputs = None
    if parallel:
        specs = param_specs(config, parallel.axis).experts
        outputs = jax.tree.map(lambda info: info.spec(parallel.axis), infos)
    run = jax.jit(lambda experts: run_sharded(pack, parallel, (specs,), outputs, experts))
    return dataclasses.replace(params, experts=run(params.experts))


def check_layout(packed: PackedExperts, inner: int) -> None:
    """Raises ValueError unless the tag is that of ranks with `inner` columns each."""
    if packed.layout != layout_tag(inner):
        raise ValueError(
            f"experts have layout {packed.layout!r}, want {layout_tag(inner)!r}: they were packed "
            "for another number of ranks or by another version; pack the checkpoint's order again"
        )


def check_packed(packed: PackedExperts, num_experts: int, latent: int, inner: int) -> None:
    """Raises unless `packed` holds these experts in the order that the kernels read.

    Args:
        packed: the weights.
        num_experts: E.
        latent: L.
        inner: this rank's share of the intermediate size.

    Raises:
        TypeError: not `PackedExperts`, or a part is not uint8.
        ValueError: another layout, or another shape.
    """
    if not isinstance(packed, PackedExperts):
        raise TypeError(
            f"experts are {type(packed).__name__}; the kernels read PackedExperts: convert once "
            "with k3jax.ops.experts.packing.pack_experts"
        )
    check_layout(packed, inner)
    for name, shape in packed_shapes(num_experts, latent, inner).items():
        array = getattr(packed, name)
        if array.dtype != jnp.uint8:
            raise TypeError(f"experts.{name} is {array.dtype}, want uint8")
        if array.shape != shape:
            raise ValueError(f"experts.{name} has shape {array.shape}, want {shape}")


def packed_shapes(num_experts: int, latent: int, inner: int) -> dict[str, tuple[int, int, int]]:
    """Shapes of the bytes of one rank, whose share of the intermediate size is `inner`."""
    return {
        "gate_up": (num_experts, inner // NEURONS, latent // CHUNK * CHUNK_BYTES),
        "down": (num_experts, latent // ROW_TILE, inner // CHUNK * CHUNK_BYTES),
    }


def pack_experts(params: ExpertParams) -> PackedExperts:
    """Checkpoint order to kernel order, for the weights (or the shard) of one rank.

    Runs expert by expert, so that beside input and output it holds a few experts at most.

    Args:
        params: w1 and w3 [E, I, L], w2 [E, L, I]; L a multiple of 256, I a multiple of 64.

    Raises:
        ValueError: sizes that the order cannot hold.
    """
    num_experts, inner, latent = params.w1.shape
    if latent % GROUP_SIZE or inner % CHUNK:
        raise ValueError(
            f"experts are [I, L]=[{inner}, {latent}]; kernel order needs L a multiple of "
            f"{GROUP_SIZE} and I a multiple of {CHUNK}: use fewer ranks, or experts='xla'"
        )

    def one(index):
        w1, w3, w2 = params.w1[index], params.w3[index], params.w2[index]
        return _pack(_gate_up_tiles(w1, w3)), _pack(_down_tiles(w2))

    gate_up, down = lax.map(one, jnp.arange(num_experts))
    return PackedExperts(gate_up, down, layout_tag(inner))


def unpack_experts(packed: PackedExperts) -> ExpertParams:
    """The inverse of `pack_experts`: the checkpoint's bytes."""
    num_experts, tiles, _ = packed.gate_up.shape
    check_packed(packed, num_experts, packed.down.shape[1] * ROW_TILE, tiles * 8)
    return ExpertParams(*lax.map(packed.expert, jnp.arange(num_experts)))


def _gate_up_tiles(w1: Mxfp4Array, w3: Mxfp4Array) -> Mxfp4Array:
    """[I, L] twice -> [I / 8, 16, L]."""

    def tiles(gate, up):
        pair = jnp.stack([gate, up]).reshape(2, -1, 8, gate.shape[-1])
        return pair.swapaxes(0, 1).reshape(-1, ROW_TILE, gate.shape[-1])

    return jax.tree.map(tiles, w1, w3)


def _down_tiles(w2: Mxfp4Array) -> Mxfp4Array:
    """[L, I] -> [L / 16, 16, I]: even rows first."""
    return jax.tree.map(
        lambda a: a.reshape(-1, 8, 2, a.shape[-1]).swapaxes(1, 2).reshape(-1, 16, a.shape[-1]), w2
    )


def _pack(tiles: Mxfp4Array) -> jax.Array:
    """[tiles, 16, K] -> uint8 [tiles, K / 64 * 544]."""
    num_tiles = tiles.packed.shape[0]
    chunks = tiles.packed.shape[-1] * 2 // CHUNK
    # tile, pair, g, chunk, t, word, byte
    codes = tiles.packed.reshape(num_tiles, 2, 8, chunks, 4, 2, 4)
    words = _spread(codes.transpose(0, 3, 2, 4, 1, 5, 6))
    elements = lax.bitcast_convert_type(words, jnp.uint8).reshape(num_tiles, chunks, ELEMENT_BYTES)
    # tile, pair, g, chunk, half -> tile, g, half, chunk, pair
    scales = tiles.scale.reshape(num_tiles, 2, 8, chunks, 2).transpose(0, 2, 4, 3, 1)
    parts, first = [], 0
    for size in chunk_groups(chunks):
        part = slice(first, first + size)
        parts += [elements[:, part], scales[:, :, :, part]]
        first += size
    return jnp.concatenate([part.reshape(num_tiles, -1) for part in parts], axis=1)


def _unpack(packed: jax.Array) -> Mxfp4Array:
    """The inverse of `_pack`."""
    num_tiles, num_bytes = packed.shape
    elements, scales, offset = [], [], 0
    for size in chunk_groups(num_bytes // CHUNK_BYTES):
        middle, end = offset + size * ELEMENT_BYTES, offset + size * CHUNK_BYTES
        elements.append(packed[:, offset:middle].reshape(num_tiles, size, ELEMENT_BYTES))
        scales.append(packed[:, middle:end].reshape(num_tiles, 8, 2, size, 2))
        offset = end
    words = jnp.concatenate(elements, axis=1).reshape(num_tiles, -1, 8, 4, 2, 2, 4)
    codes = _gather(lax.bitcast_convert_type(words, jnp.uint32))
    return Mxfp4Array(
        codes.transpose(0, 4, 2, 1, 3, 5, 6).reshape(num_tiles, ROW_TILE, -1),
        jnp.concatenate(scales, axis=3).transpose(0, 4, 1, 3, 2).reshape(num_tiles, ROW_TILE, -1),
    )


def _bit_of(element: int) -> tuple[int, int, int, int]:
    """Where bits 0 (mantissa), 1, 2 (exponent), 3 (sign) of an element's code stand in its word."""
    pair, high = divmod(element, 2)
    bits = np.array([4, 0, 1, 3]) if pair == 3 else np.array([6, 7, 8, 15]) + 3 * pair
    mantissa, low, middle, sign = ((bits + 16 * high) % 32).tolist()
    return mantissa, low, middle, sign


_BITS = tuple(_bit_of(element) for element in range(8))


def _spread(codes: jax.Array) -> jax.Array:
    """Bytes [..., 4] of two codes each, low nibble first -> uint32 words [...]."""
    word = jnp.zeros(codes.shape[:-1], jnp.uint32)
    for element, bits in enumerate(_BITS):
        code = (codes[..., element // 2].astype(jnp.uint32) >> (4 * (element % 2))) & 15
        for source, target in enumerate(bits):
            word |= ((code >> source) & 1) << target
    return word


def _gather(words: jax.Array) -> jax.Array:
    """The inverse of `_spread`."""
    codes = []
    for low, high in zip(_BITS[::2], _BITS[1::2], strict=True):
        byte = jnp.zeros(words.shape, jnp.uint32)
        for target, source in enumerate((*low, *high)):
            byte |= ((words >> source) & 1) << target
        codes.append(byte.astype(jnp.uint8))
    return jnp.stack(codes, axis=-1)
