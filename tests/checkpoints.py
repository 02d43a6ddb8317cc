"""Checkpoints read by the format's own library, for tests of what the library reads and writes."""

import numpy as np
import safetensors.numpy

PREFIX = "language_model.model.layers.{}.block_sparse_moe."


def read_checkpoint(folder):
    """Every tensor of every shard, by name; no name twice."""
    arrays = {}
    for shard in sorted(folder.glob("*.safetensors")):
        for name, array in safetensors.numpy.load_file(shard).items():
            assert name not in arrays
            arrays[name] = array
    return arrays


def layer_of(arrays, layer):
    """The tensors of one layer, without the prefix."""
    prefix = PREFIX.format(layer)
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


def stacked(tensors, num_experts):
    """One layer's tensors with the experts on a first axis, as the oracle takes them."""
    arrays = {name: a for name, a in tensors.items() if not name.startswith("experts.")}
    for matrix in ("w1", "w3", "w2"):
        for part in ("weight_packed", "weight_scale"):
            arrays[f"experts.{matrix}.{part}"] = np.stack(
                [tensors[f"experts.{e}.{matrix}.{part}"] for e in range(num_experts)]
            )
    return arrays
