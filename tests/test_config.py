"""The config: the published file, and every combination that no layer can have."""

import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest

from k3jax.config import MoEConfig

PUBLISHED = Path(__file__).parent / "data" / "kimi_k3_config.json"
TINY = MoEConfig.tiny()


@pytest.fixture
def published():
    return json.loads(PUBLISHED.read_text())


def refused(error, message, function, *args, **kwargs):
    with pytest.raises(error, match=re.escape(message)):
        function(*args, **kwargs)


def test_published_config_nested_and_bare(published, tmp_path):
    want = MoEConfig.kimi_k3()
    assert "text_config" in published
    assert MoEConfig.from_hf(published) == want
    assert MoEConfig.from_hf(published["text_config"]) == want
    assert MoEConfig.from_hf(PUBLISHED) == want
    assert MoEConfig.from_hf(str(PUBLISHED)) == want
    (tmp_path / "config.json").write_text(json.dumps(published["text_config"]))
    assert MoEConfig.from_hf(tmp_path) == want


def test_published_numbers():
    config = MoEConfig.kimi_k3()
    assert dataclasses.asdict(config) == {
        "hidden_size": 7168,
        "latent_size": 3584,
        "num_experts": 896,
        "experts_per_token": 16,
        "expert_intermediate_size": 3072,
        "num_shared_experts": 2,
        "activation": "situ",
        "situ_beta": 4.0,
        "situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "latent_norm": True,
        "renormalize": True,
        "routed_scaling_factor": 1.0,
        "num_layers": 93,
        "first_moe_layer": 1,
    }
    assert config.shared_intermediate_size == 6144
    assert list(config.moe_layers) == list(range(1, 93))
    assert hash(config) == hash(MoEConfig.kimi_k3())


@pytest.mark.parametrize(
    ("key", "value", "field", "want"),
    [
        ("activation_situ_beta", 2.5, "situ_beta", 2.5),
        ("activation_situ_beta", None, "situ_beta", 1.0),
        ("activation_situ_beta", 0, "situ_beta", 1.0),
        ("activation_situ_linear_beta", None, "situ_linear_beta", None),
        ("activation_situ_linear_beta", 7, "situ_linear_beta", 7),
        ("latent_moe_use_norm", False, "latent_norm", False),
        ("moe_renormalize", False, "renormalize", False),
        ("routed_scaling_factor", 2.5, "routed_scaling_factor", 2.5),
        ("first_k_dense_replace", 3, "first_moe_layer", 3),
        ("rms_norm_eps", 1e-6, "rms_norm_eps", 1e-6),
        ("num_experts_per_token", 8, "experts_per_token", 8),
        ("num_shared_experts", 0, "num_shared_experts", 0),
    ],
)
def test_every_key_reaches_its_field(published, key, value, field, want):
    published["text_config"][key] = value
    config = MoEConfig.from_hf(published)
    assert getattr(config, field) == want
    assert dataclasses.replace(config, **{field: getattr(MoEConfig.kimi_k3(), field)}) == (
        MoEConfig.kimi_k3()
    )


@pytest.mark.parametrize(
    ("key", "default", "field"),
    [
        ("activation_situ_beta", 1.0, "situ_beta"),
        ("activation_situ_linear_beta", None, "situ_linear_beta"),
        ("latent_moe_use_norm", True, "latent_norm"),
        ("moe_renormalize", True, "renormalize"),
        ("routed_scaling_factor", 1.0, "routed_scaling_factor"),
        ("first_k_dense_replace", 0, "first_moe_layer"),
        ("quantization_config", None, None),
        ("topk_method", None, None),
    ],
)
def test_keys_that_may_be_absent(published, key, default, field):
    del published["text_config"][key]
    config = MoEConfig.from_hf(published)
    if field:
        assert getattr(config, field) == default
    else:
        assert config == MoEConfig.kimi_k3()


def test_missing_keys_are_all_named(published):
    text = published["text_config"]
    del text["hidden_size"], text["num_experts"]
    refused(
        ValueError,
        "config lacks ['hidden_size', 'num_experts']; a Kimi K3 text config has the keys",
        MoEConfig.from_hf,
        published,
    )
    refused(ValueError, "config lacks ['hidden_size', 'routed_expert_", MoEConfig.from_hf, {})


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("moe_router_activation_func", "softmax", "'sigmoid'"),
        ("topk_method", "greedy", "'noaux_tc'"),
        ("num_expert_group", 8, "1"),
        ("topk_group", 4, "1"),
        ("moe_layer_freq", 2, "1"),
        ("dtype", "float16", "'bfloat16'"),
    ],
)
def test_what_the_layer_does_not_do(published, key, value, wanted):
    published["text_config"][key] = value
    message = f"config has {key}={value!r}; this layer implements only {wanted}"
    refused(ValueError, message, MoEConfig.from_hf, published)


def test_other_quantisation(published):
    quantization = published["text_config"]["quantization_config"]
    group = "quantization_config.config_groups.group_0.weights has (num_bits, type, group_size)="
    for key, value, found in (
        ("num_bits", 8, "(8, 'float', 32)"),
        ("type", "int", "(4, 'int', 32)"),
        ("group_size", 16, "(4, 'float', 16)"),
    ):
        changed = copy.deepcopy(published)
        weights = changed["text_config"]["quantization_config"]["config_groups"]["group_0"]
        weights["weights"][key] = value
        message = f"{group}{found}; MXFP4 is (4, 'float', 32)"
        refused(ValueError, message, MoEConfig.from_hf, changed)
    quantization["format"] = "nvfp4-pack-quantized"
    refused(
        ValueError,
        "quantization_config.format='nvfp4-pack-quantized'; only 'mxfp4-pack-quantized'",
        MoEConfig.from_hf,
        published,
    )


def test_files_that_are_not_configs(tmp_path):
    refused(FileNotFoundError, "config.json", MoEConfig.from_hf, tmp_path)
    (tmp_path / "config.json").write_text("{")
    refused(ValueError, f"{tmp_path / 'config.json'} is not JSON", MoEConfig.from_hf, tmp_path)


SIZE = "must be at least 32 and a multiple of 32"
IMPOSSIBLE = [
    ({"hidden_size": 0}, f"hidden_size=0 {SIZE}"),
    ({"hidden_size": -32}, f"hidden_size=-32 {SIZE}"),
    ({"hidden_size": 100}, f"hidden_size=100 {SIZE}"),
    ({"latent_size": 48}, f"latent_size=48 {SIZE}"),
    ({"expert_intermediate_size": 16}, f"expert_intermediate_size=16 {SIZE}"),
    ({"num_experts": 0}, "num_experts=0 must be at least 1"),
    ({"experts_per_token": 0}, "experts_per_token=0 must be at least 1"),
    ({"num_shared_experts": -1}, "num_shared_experts=-1 must be at least 0"),
    ({"num_layers": 0}, "num_layers=0 must be at least 1"),
    ({"first_moe_layer": -1}, "first_moe_layer=-1 must be at least 0"),
    (
        {"experts_per_token": 33},
        "experts_per_token=33 is more than num_experts=32; a token cannot choose an expert twice",
    ),
    (
        {"first_moe_layer": 3},
        "first_moe_layer=3 leaves no MoE layer in num_layers=3; it must be smaller",
    ),
    ({"activation": "silu"}, "activation='silu' is not known; only 'situ' (SiTU-GLU) exists"),
    ({"situ_beta": 0.0}, "situ_beta=0.0 must be positive and finite"),
    ({"situ_beta": float("inf")}, "situ_beta=inf must be positive and finite"),
    ({"situ_beta": float("nan")}, "situ_beta=nan must be positive and finite"),
    ({"situ_linear_beta": -1}, "situ_linear_beta=-1 must be positive and finite"),
    ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be positive and finite"),
    ({"routed_scaling_factor": -2.0}, "routed_scaling_factor=-2.0 must be positive and finite"),
]
MISTYPED = [
    ({"hidden_size": 256.0}, "hidden_size=256.0 must be an int, got float"),
    ({"num_experts": True}, "num_experts=True must be an int, got bool"),
    ({"num_layers": "3"}, "num_layers='3' must be an int, got str"),
    ({"situ_beta": "4"}, "situ_beta='4' must be a number, got str"),
    ({"situ_beta": None}, "situ_beta=None must be a number, got NoneType"),
    ({"rms_norm_eps": True}, "rms_norm_eps=True must be a number, got bool"),
]


@pytest.mark.parametrize(("change", "message"), IMPOSSIBLE)
def test_impossible(change, message):
    refused(ValueError, message, dataclasses.replace, TINY, **change)


@pytest.mark.parametrize(("change", "message"), MISTYPED)
def test_mistyped(change, message):
    refused(TypeError, message, dataclasses.replace, TINY, **change)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TINY.hidden_size = 512


def test_tensor_parallel_sizes():
    config = MoEConfig.kimi_k3()
    good = [tp for tp in range(1, 129) if config.supports_tp(tp)]
    # 3072 = 96 groups of 32; 7168 and 6144 divide by the same, 3584 = 2^9 * 7.
    assert good == [1, 2, 4, 8, 16, 32]
    for tp in good:
        config.check_tp(tp)
    for tp in (0, -1, 3, 64, 96):
        assert not config.supports_tp(tp)
        refused(
            ValueError,
            f"tp={tp} does not divide this config: expert_intermediate_size=3072 must split into "
            f"whole groups of 32, hidden_size=7168, latent_size=3584 and "
            f"shared_intermediate_size=6144 evenly; tensor-parallel sizes that work: {good}",
            config.check_tp,
            tp,
        )
    assert [tp for tp in range(1, 65) if TINY.supports_tp(tp)] == [1, 2, 4, 8, 16]
