"""Which tensors hold one layer: names, dtypes and shapes of the published Kimi K3 checkpoint.

Linear matrices are [out, in], row-major. Each routed expert e has w1 (gate) and w3 (up) [I, L] and
w2 (down) [L, I] of its own, as nibbles and scale bytes.
"""

import re
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from k3jax.checkpoint.header import TensorType
from k3jax.config import MoEConfig
from k3jax.params import ParamInfo, iter_infos

LAYER_PREFIX = "language_model.model.layers.{layer}.block_sparse_moe."
LAYER_NAME = re.compile(re.escape(LAYER_PREFIX).replace(r"\{layer\}", r"(\d+)"))

DTYPES = {"bfloat16": "BF16", "float32": "F32", "uint8": "U8"}
"""The safetensors code of each array dtype that a layer has."""

_EXPERT = re.compile(r"experts\.(\d+)\.")


def is_stacked(info: ParamInfo) -> bool:
    """Whether the array is stored as one tensor for each expert, its first axis."""
    return info.name.startswith("experts.")


def tensor_names(info: ParamInfo) -> list[str]:
    """The tensors of one array, under the layer's prefix; in expert order if it is stacked."""
    if is_stacked(info):
        _, matrix, part = info.name.split(".")
        return [f"experts.{expert}.{matrix}.weight_{part}" for expert in range(info.shape[0])]
    if info.name.startswith("gate."):
        return [info.name]
    return [f"{info.name}.weight"]


def tensor_type(info: ParamInfo) -> TensorType:
    """Of each of `tensor_names(info)`."""
    shape = info.shape[1:] if is_stacked(info) else info.shape
    return TensorType(DTYPES[np.dtype(info.dtype).name], shape)


def layer_tensors(config: MoEConfig) -> dict[str, TensorType]:
    """Every tensor of a layer, under the layer's prefix."""
    return {name: tensor_type(info) for info in iter_infos(config) for name in tensor_names(info)}


def group_experts(names: Iterable[str]) -> list[str]:
    """Names with the numbers of experts drawn together: "experts.{0-3,7}.w1.weight_scale"."""
    experts = defaultdict(list)
    for name in names:
        found = _EXPERT.match(name)
        experts[_EXPERT.sub("experts.*.", name)] += [int(found[1])] if found else []
    return sorted(
        name.replace("*", "{" + number_runs(numbers) + "}" if len(numbers) > 1 else str(*numbers))
        for name, numbers in experts.items()
    )


def number_runs(numbers: Iterable[int]) -> str:
    """Numbers as text, consecutive ones as "first-last"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
