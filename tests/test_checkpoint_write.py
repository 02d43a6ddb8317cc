"""Synthetic checkpoints: the published format, read back by the format's own library."""

import dataclasses
import functools
import hashlib
import json
import re

import jax
import numpy as np
import pytest
import safetensors

from k3jax.checkpoint import load_layer, write_checkpoint
from k3jax.checkpoint.layout import layer_tensors
from k3jax.config import MoEConfig
from k3jax.layer import moe_layer
from tests import oracle
from tests.checkpoints import PREFIX, layer_of, read_checkpoint
from tests.support import TINY, tokens_of

# The published tensors of one layer, from the model's own file headers.
K3_TENSORS = {
    "gate.weight": ("BF16", (896, 7168)),
    "gate.e_score_correction_bias": ("F32", (896,)),
    "routed_expert_down_proj.weight": ("BF16", (3584, 7168)),
    "routed_expert_norm.weight": ("BF16", (3584,)),
    "routed_expert_up_proj.weight": ("BF16", (7168, 3584)),
    "shared_experts.gate_proj.weight": ("BF16", (6144, 7168)),
    "shared_experts.up_proj.weight": ("BF16", (6144, 7168)),
    "shared_experts.down_proj.weight": ("BF16", (7168, 6144)),
}
K3_EXPERT = {
    "w1.weight_packed": (3072, 1792),
    "w1.weight_scale": (3072, 112),
    "w3.weight_packed": (3072, 1792),
    "w3.weight_scale": (3072, 112),
    "w2.weight_packed": (3584, 1536),
    "w2.weight_scale": (3584, 96),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    write_checkpoint(folder, TINY, seed=3, shard_bytes=1 << 21)
    return folder


def test_kimi_k3_layer_has_the_published_tensors():
    want = dict(K3_TENSORS)
    for expert in range(896):
        for name, shape in K3_EXPERT.items():
            want[f"experts.{expert}.{name}"] = ("U8", shape)
    assert len(want) == 5384
    assert layer_tensors(MoEConfig.kimi_k3()) == want


def test_files(written):
    names = sorted(path.name for path in written.iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    assert len(shards) > 3
    assert shards == [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)
    ]
    assert set(names) - set(shards) == {"config.json", "model.safetensors.index.json"}
    index = json.loads((written / "model.safetensors.index.json").read_text())
    arrays = read_checkpoint(written)
    assert index["weight_map"].keys() == arrays.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    for name, shard in index["weight_map"].items():
        with safetensors.safe_open(written / shard, "np") as opened:
            assert name in opened.keys()  # noqa: SIM118
    for shard in shards:
        data = (written / shard).stat().st_size
        assert data <= (1 << 21) + 100_000  # the header comes on top


def test_tensors(written):
    arrays = read_checkpoint(written)
    codes = {"bfloat16": "BF16", "float32": "F32", "uint8": "U8"}
    for layer in (1, 2):
        found = {n: (codes[a.dtype.name], a.shape) for n, a in layer_of(arrays, layer).items()}
        assert found == layer_tensors(TINY)
    assert len(arrays) == 2 * len(layer_tensors(TINY))
    hashes = [hashlib.sha256(array.tobytes()).digest() for array in arrays.values()]
    assert len(set(hashes)) == len(hashes), "two tensors hold the same numbers"


@pytest.mark.parametrize(("latent", "intermediate"), [(128, 512), (96, 160), (3584, 3072)])
def test_weights_have_the_variance_of_one_over_their_inputs(tmp_path, latent, intermediate):
    config = dataclasses.replace(
        TINY, latent_size=latent, expert_intermediate_size=intermediate, num_experts=4
    )
    write_checkpoint(tmp_path, config, [2])
    tensors = layer_of(read_checkpoint(tmp_path), 2)
    for name, inputs in (("w1", latent), ("w3", latent), ("w2", intermediate)):
        stem = f"experts.3.{name}.weight"
        packed, scale = (tensors[f"{stem}_{part}"][:256] for part in ("packed", "scale"))
        codes = np.concatenate([(packed & 15).ravel(), (packed >> 4).ravel()])
        assert np.bincount(codes, minlength=16).min() > 0.8 * codes.size / 16
        assert len(np.unique(scale)) == 2
        assert inputs * np.mean(oracle.mxfp4_values(packed, scale) ** 2) == pytest.approx(
            1, rel=0.1
        )
    for name in ("gate.weight", "routed_expert_up_proj.weight", "shared_experts.down_proj.weight"):
        values = tensors[name].astype(np.float64)
        assert values.shape[-1] * np.mean(values**2) == pytest.approx(1, rel=0.1)
    assert np.mean(tensors["routed_expert_norm.weight"].astype(float)) == pytest.approx(1, abs=0.1)
    assert 0 < np.abs(tensors["gate.e_score_correction_bias"]).max() < 0.1


def test_activations_stay_near_one(written):
    x = tokens_of(32, TINY.hidden_size, seed=5)
    run = jax.jit(functools.partial(moe_layer, config=TINY))
    for layer in TINY.moe_layers:
        y = run(load_layer(written, layer, TINY, progress=False), x)
        assert 0.3 < float(np.std(np.asarray(y, np.float32))) < 3


def test_a_layer_depends_on_seed_and_index_alone(tmp_path, written):
    want = read_checkpoint(written)
    write_checkpoint(tmp_path / "one", TINY, [2], seed=3)
    alone = read_checkpoint(tmp_path / "one")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == 1
    assert alone.keys() == {name for name in want if name.startswith(PREFIX.format(2))}
    assert all(array.tobytes() == want[name].tobytes() for name, array in alone.items())
    write_checkpoint(tmp_path / "other", TINY, [2], seed=4)
    other = read_checkpoint(tmp_path / "other")
    assert all(array.tobytes() != want[name].tobytes() for name, array in other.items())


def test_a_tensor_over_the_shard_size_gets_its_own(tmp_path):
    write_checkpoint(tmp_path / "new", TINY, [1], shard_bytes=1)
    assert len(list((tmp_path / "new").glob("*.safetensors"))) == len(layer_tensors(TINY))
    load_layer(tmp_path / "new", 1, TINY)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"latent_norm": False, "num_shared_experts": 0, "situ_linear_beta": None},
        {"renormalize": False, "routed_scaling_factor": 2.5, "situ_beta": 1.5},
        {"rms_norm_eps": 1e-6, "num_layers": 5, "first_moe_layer": 3},
    ],
)
def test_config_round_trips_and_the_layer_loads(tmp_path, change):
    config = dataclasses.replace(TINY, **change)
    write_checkpoint(tmp_path, config, [config.first_moe_layer])
    assert MoEConfig.from_hf(tmp_path) == config
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["model_type"] == "kimi_k3"
    assert "hidden_size" not in raw
    assert "hidden_size" in raw["text_config"]
    params = load_layer(tmp_path, config.first_moe_layer, config)
    assert (params.routed_expert_norm is None) == (not config.latent_norm)
    assert (params.shared_experts is None) == (not config.num_shared_experts)


def test_refusals(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(FileExistsError, match=f"{name} is not an empty folder"):
            write_checkpoint(tmp_path / name, TINY)
    new = tmp_path / "new"
    for layers in ([0], [3], [1, 3], [-1]):
        bad = re.escape(str([layer for layer in layers if layer != 1]))
        with pytest.raises(ValueError, match=rf"layers={bad} must be among .* 1-2"):
            write_checkpoint(new, TINY, layers)
    with pytest.raises(ValueError, match=r"layers=\[\] must be"):
        write_checkpoint(new, TINY, [])
    with pytest.raises(ValueError, match="seed=-1 must be at least 0"):
        write_checkpoint(new, TINY, seed=-1)
    with pytest.raises(ValueError, match="shard_bytes=0 must be at least 1"):
        write_checkpoint(new, TINY, shard_bytes=0)
    assert not new.exists()
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match="has 1,000 bytes free, the checkpoint takes"):
        write_checkpoint(new, TINY)
    assert not list(new.iterdir())


def test_default_layers_are_all_moe_layers(written):
    layers = {int(name.split(".")[3]) for name in read_checkpoint(written)}
    assert layers == set(TINY.moe_layers)
    assert jax.tree.structure(load_layer(written, 1, TINY)) == jax.tree.structure(
        load_layer(written, 2, TINY)
    )
