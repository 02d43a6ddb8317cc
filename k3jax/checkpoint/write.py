"""Writing a synthetic checkpoint in the published format, as fast as the disk takes it."""

import json
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from k3jax.checkpoint.header import TensorType, encode_header
from k3jax.checkpoint.layout import LAYER_PREFIX, layer_tensors
from k3jax.checkpoint.source import CONFIG_NAME, INDEX_NAME, SHARD_SUFFIX
from k3jax.config import MXFP4_GROUP_SIZE, MoEConfig

type Named = tuple[str, TensorType]
type Shard = list[Named]

_CHUNK_ELEMENTS = 1 << 22
"""Elements drawn at a time, which bounds the memory."""

_MEAN_SQUARE_E2M1 = (0 + 0.5**2 + 1 + 1.5**2 + 2**2 + 3**2 + 4**2 + 6**2) / 8


def write_checkpoint(
    path: str | Path,
    config: MoEConfig,
    layers: Iterable[int] | None = None,
    *,
    seed: int = 0,
    shard_bytes: int = 1 << 32,
    progress: bool = True,
) -> None:
    """Writes random MoE layers with the names, dtypes and files of a published checkpoint.

    There are `config.json`, shards and an index, and in them the MoE block of each layer; attention
    and norms around it are left out. Weights have the variance that keeps activations near 1:
    MXFP4 codes are uniform, scale bytes take the two values that give it. A layer depends on `seed`
    and its own index alone, not on the other layers or the shards.

    Args:
        path: folder to write; new or empty.
        config: the model.
        layers: decoder layers to write; all MoE layers if None.
        seed: of the random numbers.
        shard_bytes: largest data size of one shard; a larger tensor has a shard of its own.
        progress: whether to draw a bar on stderr, if that is a terminal.

    Raises:
        FileExistsError: the folder has something in it.
        OSError: the disk has not enough room.
        ValueError: a layer has no experts, or a number is out of range.
    """
    chosen = sorted(set(config.moe_layers if layers is None else layers))
    _check_arguments(config, chosen, seed, shard_bytes)
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not an empty folder; choose another")
    tensors = [
        (LAYER_PREFIX.format(layer=layer) + name, kind)
        for layer in chosen
        for name, kind in layer_tensors(config).items()
    ]
    total = sum(kind.num_bytes for _, kind in tensors)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < total:
        raise OSError(f"{folder} has {free:,} bytes free, the checkpoint takes {total:,}")

    shards = list(_split(tensors, shard_bytes))
    names = [
        f"model-{number:05}-of-{len(shards):05}{SHARD_SUFFIX}"
        for number in range(1, len(shards) + 1)
    ]
    with tqdm(total=total, unit="B", unit_scale=True, disable=None if progress else True) as bar:
        for name, shard in zip(names, shards, strict=True):
            _write_shard(folder / name, shard, seed, bar)
    weight_map = {
        tensor: name for name, shard in zip(names, shards, strict=True) for tensor, _ in shard
    }
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    (folder / CONFIG_NAME).write_text(json.dumps(hf_config(config), indent=2) + "\n")


def hf_config(config: MoEConfig) -> dict[str, Any]:
    """The `config.json` of a checkpoint with this MoE block: the inverse of `MoEConfig.from_hf`."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": MXFP4_GROUP_SIZE,
        "symmetric": True,
        "scale_dtype": "torch.uint8",
    }
    group = {"targets": ["Linear"], "format": "mxfp4-pack-quantized", "weights": weights}
    text = {
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "hidden_size": config.hidden_size,
        "routed_expert_hidden_size": config.latent_size,
        "num_experts": config.num_experts,
        "num_experts_per_token": config.experts_per_token,
        "moe_intermediate_size": config.expert_intermediate_size,
        "num_shared_experts": config.num_shared_experts,
        "hidden_act": config.activation,
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "rms_norm_eps": config.rms_norm_eps,
        "latent_moe_use_norm": config.latent_norm,
        "moe_renormalize": config.renormalize,
        "routed_scaling_factor": config.routed_scaling_factor,
        "num_hidden_layers": config.num_layers,
        "first_k_dense_replace": config.first_moe_layer,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": group},
        },
    }
    return {"model_type": "kimi_k3", "dtype": "bfloat16", "text_config": text}


def _check_arguments(config: MoEConfig, layers: Sequence[int], seed: int, shard_bytes: int) -> None:
    wrong = [layer for layer in layers if layer not in config.moe_layers]
    if wrong or not layers:
        raise ValueError(
            f"layers={wrong or layers} must be among the MoE layers of the config, "
            f"{config.first_moe_layer}-{config.num_layers - 1}"
        )
    for name, value, low in (("seed", seed, 0), ("shard_bytes", shard_bytes, 1)):
        if value < low:
            raise ValueError(f"{name}={value} must be at least {low}")


def _split(tensors: Iterable[Named], shard_bytes: int) -> Iterator[Shard]:
    shard, size = [], 0
    for name, kind in tensors:
        count = kind.num_bytes
        if shard and size + count > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append((name, kind))
        size += count
    yield shard


def _write_shard(file: Path, shard: Shard, seed: int, bar: tqdm) -> None:
    with file.open("wb") as stream:
        stream.write(encode_header(shard))
        for name, kind in shard:
            rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
            for chunk in _draw(rng, name, kind):
                stream.write(chunk)
                bar.update(chunk.nbytes)


def _draw(rng: np.random.Generator, name: str, kind: TensorType) -> Iterator[memoryview]:
    """The tensor's bytes, a few rows at a time."""
    *rows, columns = kind.shape
    num_rows = int(np.prod(rows))
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, num_rows, step):
        yield _values(rng, name, (min(step, num_rows - start), columns)).data.cast("B")


def _values(rng: np.random.Generator, name: str, shape: tuple[int, int]) -> np.ndarray:
    """Random values of the tensor, viewed as a dtype that Python's buffers know."""
    if name.endswith(".weight_packed"):
        return _random_bytes(rng, shape)
    if name.endswith(".weight_scale"):
        return _scale_bytes(rng, shape)
    draw = rng.standard_normal(shape, np.float32)
    if name.endswith(".e_score_correction_bias"):
        return 0.01 * draw
    draw = 1 + 0.1 * draw if name.endswith("norm.weight") else draw / shape[-1] ** 0.5
    return draw.astype(jnp.bfloat16).view(np.uint16)


def _random_bytes(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return np.frombuffer(rng.bytes(shape[0] * shape[1]), np.uint8).reshape(shape)


def _scale_bytes(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Bytes q and q + 1, mixed so that uniform codes have mean square 1 / K.

    2^(2 (q - 127)) (1 + 3 p) mean_square = 1 / K for a share p of q + 1; p is in [0, 1).
    """
    wanted = 1 / (shape[-1] * MXFP4_GROUP_SIZE * _MEAN_SQUARE_E2M1)
    exponent = int(np.floor(np.log2(wanted) / 2))
    share = (wanted / 4.0**exponent - 1) / 3
    return (_random_bytes(rng, shape) < 256 * share).astype(np.uint8) + np.uint8(127 + exponent)
