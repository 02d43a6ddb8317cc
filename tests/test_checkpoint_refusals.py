"""Layers that cannot be loaded: one clear refusal, before any device work."""

import dataclasses
import json
import os
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from k3jax.checkpoint import Checkpoint, load_layer
from k3jax.parallel import Parallel
from tests.checkpoints import CONFIG, PREFIX, E, H, I, L, S, check, draw_layer, save
from tests.support import parallel_of


@pytest.fixture(scope="module")
def layers():
    return {1: draw_layer(1), 3: draw_layer(3)}


@pytest.fixture(scope="module")
def folder(layers, tmp_path_factory):
    return save(tmp_path_factory.mktemp("checkpoint") / "indexed", layers)


@pytest.fixture
def no_device_work(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("device work before every check was done")

    monkeypatch.setattr(jax, "device_put", refuse)


def refused(path, message, layer=1, config=CONFIG, parallel=None, error=ValueError, **options):
    with pytest.raises(error, match=message) as caught:
        load_layer(path, layer, config, parallel, **options)
    return str(caught.value)


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, array):
    return lambda tensors: tensors.update({name: array})


def rename(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


MISMATCHES = {
    "missing": (drop("gate.weight"), "missing: gate.weight"),
    "missing of one expert": (
        drop("experts.3.w2.weight_scale"),
        "missing: experts.3.w2.weight_scale",
    ),
    "unexpected": (put("gate.scale", np.ones(3, np.float32)), "unexpected: gate.scale"),
    "an expert too many": (
        put("experts.5.w1.weight_packed", np.ones((I, L // 2), np.uint8)),
        "unexpected: experts.5.w1.weight_packed",
    ),
    "misnamed": (
        rename("experts.0.w1.weight_packed", "experts.0.w1.weight"),
        "unexpected: experts.0.w1.weight (misnamed experts.0.w1.weight_packed?)",
    ),
    "transposed": (
        put("routed_expert_down_proj.weight", np.ones((H, L), ml_dtypes.bfloat16)),
        "BF16 [96, 64], want BF16 [64, 96]: routed_expert_down_proj.weight",
    ),
    "flat": (
        put("gate.weight", np.ones(E * H, ml_dtypes.bfloat16)),
        "BF16 [480], want BF16 [5, 96]: gate.weight",
    ),
    "bias in bfloat16": (
        put("gate.e_score_correction_bias", np.ones(E, ml_dtypes.bfloat16)),
        "BF16 [5], want F32 [5]: gate.e_score_correction_bias",
    ),
    "nibbles in int8": (
        put("experts.2.w3.weight_packed", np.ones((I, L // 2), np.int8)),
        f"I8 [{I}, {L // 2}], want U8 [{I}, {L // 2}]: experts.2.w3.weight_packed",
    ),
    "nibbles not packed": (
        put("experts.2.w3.weight_packed", np.ones((I, L), np.uint8)),
        f"U8 [{I}, {L}], want U8 [{I}, {L // 2}]: experts.2.w3.weight_packed",
    ),
    "float16 for bfloat16": (
        put("shared_experts.up_proj.weight", np.ones((S, H), np.float16)),
        f"F16 [{S}, {H}], want BF16 [{S}, {H}]: shared_experts.up_proj.weight",
    ),
}


@pytest.mark.parametrize("index", [True, False], ids=["index", "bare"])
@pytest.mark.parametrize(("change", "line"), MISMATCHES.values(), ids=MISMATCHES)
def test_mismatch(tmp_path, layers, change, line, index, no_device_work):
    tensors = dict(layers[1])
    change(tensors)
    message = refused(save(tmp_path / "bad", {1: tensors}, index), "nothing was loaded")
    assert message.startswith(f"layer 1 of {tmp_path / 'bad'} is not what config describes")
    lines = message.split("\n  ")[1:]
    assert line in lines
    assert len(lines) == (2 if "misnamed" in line else 1)


def test_all_mismatches_in_one_message(tmp_path, layers, no_device_work):
    tensors = dict(layers[1])
    for change in (
        drop("gate.weight"),
        drop("experts.0.w1.weight_scale"),
        drop("experts.1.w1.weight_scale"),
        drop("experts.4.w1.weight_scale"),
        rename("routed_expert_norm.weight", "routed_expert_norm.gain"),
        put("experts.1.w2.weight_packed", np.ones((1, 1), np.uint8)),
        put("experts.3.w2.weight_packed", np.ones((1, 1), np.uint8)),
    ):
        change(tensors)
    message = refused(save(tmp_path / "bad", {1: tensors}), "nothing was loaded")
    assert message.split("\n  ")[1:] == [
        "missing: experts.{0-1,4}.w1.weight_scale",
        "missing: gate.weight",
        "missing: routed_expert_norm.weight",
        "unexpected: routed_expert_norm.gain (misnamed routed_expert_norm.weight?)",
        f"U8 [1, 1], want U8 [{L}, {I // 2}]: experts.{{1,3}}.w2.weight_packed",
    ]


def test_another_config(folder, no_device_work):
    config = dataclasses.replace(CONFIG, num_experts=8)
    message = refused(folder, "nothing was loaded", config=config)
    assert "missing: experts.{5-7}.w1.weight_packed" in message
    assert "BF16 [5, 96], want BF16 [8, 96]: gate.weight" in message


def test_index_and_shards_disagree(tmp_path, layers, no_device_work):
    bad = save(tmp_path / "bad", {1: layers[1]})
    index = bad / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    named = content["weight_map"]
    first, *_, last = sorted(set(named.values()))
    gate = PREFIX.format(1) + "gate.weight"
    # The index names a tensor that no shard holds, misplaces one, and leaves one out.
    changed = {**named, PREFIX.format(1) + "gate.extra": first}
    changed[gate] = first if named[gate] != first else last
    index.write_text(json.dumps({"weight_map": changed}))
    message = refused(bad, "nothing was loaded")
    assert message.split("\n  ")[1:] == ["missing: gate.weight", "unexpected: gate.extra"]


def test_a_shard_holds_more_than_the_index_says(tmp_path, layers):
    """A stale copy in another shard is not read; a tensor outside the index is unexpected."""
    bad = save(tmp_path / "bad", {1: layers[1]})
    named = json.loads((bad / "model.safetensors.index.json").read_text())["weight_map"]
    gate = PREFIX.format(1) + "gate.weight"
    for file in set(named.values()) - {named[gate]}:
        shard = safetensors.numpy.load_file(bad / file)
        stale = {gate: np.zeros_like(layers[1]["gate.weight"])}
        safetensors.numpy.save_file(shard | stale, bad / file)
    check(load_layer(bad, 1, CONFIG), layers[1])
    shard = safetensors.numpy.load_file(bad / named[gate])
    shard[PREFIX.format(1) + "gate.scale"] = np.ones(1, np.float32)
    safetensors.numpy.save_file(shard, bad / named[gate])
    message = refused(bad, "nothing was loaded")
    assert message.split("\n  ")[1:] == ["unexpected: gate.scale"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "has no 'weight_map' object"),
        ("{}", "has no 'weight_map' object"),
        ('{"weight_map": ["a"]}', "has no 'weight_map' object"),
        ('{"weight_map": {"a": 3}}', "places 'a' in 3; want a file name"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "places 'a' in '../b.safetensors'"),
        ('{"weight_map": {"a": "/etc/b.safetensors"}}', "places 'a' in '/etc/b.safetensors'"),
        ('{"weight_map": {"a": ""}}', "places 'a' in ''"),
    ],
)
def test_broken_index(tmp_path, content, message):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refused(tmp_path, re.escape(message))


def test_the_same_tensor_in_two_bare_shards(tmp_path, layers):
    save(tmp_path / "twice", {1: layers[1]}, index=False)
    name = PREFIX.format(1) + "gate.weight"
    extra = {name: layers[1]["gate.weight"]}
    safetensors.numpy.save_file(extra, tmp_path / "twice" / "old.safetensors")
    refused(tmp_path / "twice", rf"'{re.escape(name)}' is in both .*old\.safetensors")


def test_nothing_there(tmp_path):
    refused(tmp_path / "no", "no is not there; pass its folder", error=FileNotFoundError)
    refused(tmp_path, r"has neither model\.safetensors\.index\.json nor", error=FileNotFoundError)


def test_truncated_shard(tmp_path, layers, no_device_work):
    bad = save(tmp_path / "cut", {1: layers[1]})
    shard = sorted(bad.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    message = refused(bad, "it was cut short")
    assert str(shard) in message
    assert "tensor 'language_model" in message


def test_shard_cut_while_open(tmp_path, layers):
    cut = save(tmp_path / "cut", {1: layers[1]})
    with Checkpoint(cut) as checkpoint:
        checkpoint.tensors(PREFIX.format(1))
        for shard in cut.glob("*.safetensors"):
            os.truncate(shard, 4096)
        refused(checkpoint, r"ended inside tensor .* while being read")


def test_which_layers(folder, no_device_work):
    refused(folder, r"layer=0 is dense \(its tensors are mlp\.\*\); the MoE layers are 1-3", 0)
    refused(folder, r"layer=4 is not in a model of 4; the MoE layers are 1-3", 4)
    refused(folder, r"layer=-1 is not in a model of 4; the MoE layers are 1-3", -1)
    refused(folder, r"layer=2 is not in .*indexed, which holds layers 1,3,11", 2)


def test_no_layer_at_all(tmp_path):
    safetensors.numpy.save_file({"a": np.ones(2)}, tmp_path / "a.safetensors")
    refused(tmp_path, r"layer=1 is not in .*, which has no tensor language_model\.model\.layers\.1")


def test_parallel_that_does_not_fit(folder, no_device_work):
    refused(folder, "tp=3 does not divide this config", parallel=parallel_of(3))
    abstract = Parallel(parallel_of(2).mesh.abstract_mesh)
    refused(folder, "parallel.mesh is AbstractMesh", parallel=abstract, error=TypeError)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bias_that_is_not_finite(tmp_path, layers, value, no_device_work):
    bias = layers[1]["gate.e_score_correction_bias"].copy()
    bias[[1, 2, 4]] = value
    tensors = {**layers[1], "gate.e_score_correction_bias": bias}
    bad = save(tmp_path / "bad", {1: tensors})
    refused(bad, r"layer 1 of .*e_score_correction_bias is not finite for experts 1-2,4;")
    refused(bad, "is not finite", parallel=parallel_of(8), allow_nan_scales=True)


@pytest.mark.parametrize("tp", [None, 8])
def test_nan_scales(tmp_path, layers, tp, monkeypatch):
    tensors = dict(layers[1])
    for name in ("experts.0.w1", "experts.1.w1", "experts.4.w2"):
        scale = tensors[f"{name}.weight_scale"].copy()
        scale[-1, -1] = 255
        tensors[f"{name}.weight_scale"] = scale
    bad = save(tmp_path / "bad", {1: tensors})
    parallel = parallel_of(tp) if tp else None
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", None)
        message = refused(bad, r"scale byte 255 \(NaN\)", parallel=parallel)
    assert "in experts.4.w2.weight_scale, experts.{0-1}.w1.weight_scale; nothing" in message
    assert "allow_nan_scales=True" in message
    params = load_layer(bad, 1, CONFIG, parallel, allow_nan_scales=True)
    check(params, tensors, parallel)
    values = np.asarray(params.experts.w2.dequantize(jnp.float32))
    assert np.isnan(values[4, -1, -32:]).all()
    assert np.isnan(values).sum() == 32
