"""Checkpoints read and written by the format's own library, from arrays drawn here.

So neither names nor layout come from the code under test.
"""

import json

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy

from k3jax.checkpoint import Checkpoint
from k3jax.config import MoEConfig
from k3jax.params import iter_infos

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


CONFIG = MoEConfig(
    hidden_size=96,
    latent_size=64,
    num_experts=5,
    experts_per_token=2,
    expert_intermediate_size=512,
    num_shared_experts=1,
    num_layers=4,
    first_moe_layer=1,
)
SHARDS = 3
H, L, E, I, S = 96, 64, 5, 512, 512  # noqa: E741


def draw_layer(seed):
    """The tensors of one layer under their published names."""
    rng = np.random.default_rng(seed)

    def dense(*shape):
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(ml_dtypes.bfloat16)

    tensors = {
        "gate.weight": dense(E, H),
        "gate.e_score_correction_bias": (0.1 * rng.standard_normal(E)).astype(np.float32),
        "routed_expert_down_proj.weight": dense(L, H),
        "routed_expert_norm.weight": (1 + dense(L)).astype(ml_dtypes.bfloat16),
        "routed_expert_up_proj.weight": dense(H, L),
        "shared_experts.gate_proj.weight": dense(S, H),
        "shared_experts.up_proj.weight": dense(S, H),
        "shared_experts.down_proj.weight": dense(H, S),
    }
    for expert in range(E):
        for matrix, rows, columns in (("w1", I, L), ("w3", I, L), ("w2", L, I)):
            stem = f"experts.{expert}.{matrix}.weight"
            tensors[f"{stem}_packed"] = rng.integers(0, 256, (rows, columns // 2), np.uint8)
            tensors[f"{stem}_scale"] = rng.integers(120, 125, (rows, columns // 32), np.uint8)
    return tensors


def save(folder, layers, index=True):
    """Spreads {layer: tensors} over shards in random order."""
    named = {
        PREFIX.format(n) + name: a for n, tensors in layers.items() for name, a in tensors.items()
    }
    named["language_model.model.layers.0.mlp.gate_proj.weight"] = np.ones((2, 2), np.float32)
    named["language_model.model.layers.11.block_sparse_moe.gate.weight"] = np.ones(3, np.float32)
    placed = np.random.default_rng(0).integers(0, SHARDS, len(named))
    files = [f"model-{number + 1:05}-of-{SHARDS:05}.safetensors" for number in range(SHARDS)]
    folder.mkdir(exist_ok=True)
    for number, file in enumerate(files):
        shard = {name: a for (name, a), n in zip(named.items(), placed, strict=True) if n == number}
        safetensors.numpy.save_file(shard, folder / file)
    if index:
        weight_map = {name: files[n] for name, n in zip(named, placed, strict=True)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def whole_array(info, tensors):
    """The global array that an info stands for, stacked from the published tensors."""
    if info.name.startswith("experts."):
        return stacked(tensors, E)[
            info.name.replace("packed", "weight_packed").replace("scale", "weight_scale")
        ]
    return tensors[info.name if info.name.startswith("gate.") else f"{info.name}.weight"]


def check(params, tensors, parallel=None):
    """Every shard on every device, bit for bit."""
    for info, array in zip(iter_infos(CONFIG), jax.tree.leaves(params), strict=True):
        want = whole_array(info, tensors)
        assert array.shape == want.shape
        assert array.dtype == want.dtype
        if parallel is not None:
            sharding = parallel.sharding(info.spec(parallel.axis))
            assert array.sharding.is_equivalent_to(sharding, array.ndim)
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == want[shard.index].tobytes(), info.name


SHARDED_AXIS = {
    ".w1.": 0,
    ".w3.": 0,
    ".w2.": 1,
    "shared_experts.gate_proj": 0,
    "shared_experts.up_proj": 0,
    "shared_experts.down_proj": 1,
}


def times_read(name):
    """The bias and the scales are looked at before anything is sent to a device."""
    return 2 if name.endswith(("_scale", "_bias")) else 1


class Meter(Checkpoint):
    """Counts how often each byte of each tensor is read."""

    def __init__(self, path):
        super().__init__(path)
        self.counts = {}

    def read_into(self, out, tensor, index):
        super().read_into(out, tensor, index)
        count = self.counts.setdefault(tensor.name, np.zeros(tensor.type.shape, int))
        with self._lock:
            count[index] += 1
