"""The static facts of a Kimi K3 mixture-of-experts layer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MXFP4_GROUP_SIZE = 32
"""Elements along the contraction axis that share one scale (OCP Microscaling Formats v1.0)."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Shapes and constants of one MoE layer; hashable, so it can be a static argument of `jax.jit`.

    Attributes:
        hidden_size: width of the residual stream, read by router and shared expert.
        latent_size: width of the latent that the routed experts read and write.
        num_experts: routed experts.
        experts_per_token: experts chosen for each token (top-k).
        expert_intermediate_size: inner width of one routed expert.
        num_shared_experts: shared experts, stored as one MLP of
            `num_shared_experts * expert_intermediate_size`; 0 for none.
        activation: gated activation of routed and shared experts; only "situ".
        situ_beta: soft cap of the gate.
        situ_linear_beta: soft cap of the linear branch; None for no cap.
        rms_norm_eps: epsilon of the latent RMSNorm.
        latent_norm: whether the latent is normalised before the up-projection.
        renormalize: whether the chosen weights are divided by their sum.
        routed_scaling_factor: factor on the chosen weights, after renormalising.
        num_layers: decoder layers of the model, dense ones included.
        first_moe_layer: index of the first layer with this MoE block.
    """

    hidden_size: int
    latent_size: int
    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    num_shared_experts: int
    activation: str = "situ"
    situ_beta: float = 4.0
    situ_linear_beta: float | None = 25.0
    rms_norm_eps: float = 1e-5
    latent_norm: bool = True
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_layers: int = 1
    first_moe_layer: int = 0

    def __post_init__(self) -> None:
        """Refuses every combination that no layer can have."""
        for name in ("hidden_size", "latent_size", "expert_intermediate_size"):
            _check_int(
                name, getattr(self, name), low=MXFP4_GROUP_SIZE, multiple_of=MXFP4_GROUP_SIZE
            )
        _check_int("num_experts", self.num_experts, low=1)
        _check_int("experts_per_token", self.experts_per_token, low=1)
        _check_int("num_shared_experts", self.num_shared_experts, low=0)
        _check_int("num_layers", self.num_layers, low=1)
        _check_int("first_moe_layer", self.first_moe_layer, low=0)
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than "
                f"num_experts={self.num_experts}; a token cannot choose an expert twice"
            )
        if self.first_moe_layer >= self.num_layers:
            raise ValueError(
                f"first_moe_layer={self.first_moe_layer} leaves no MoE layer in "
                f"num_layers={self.num_layers}; it must be smaller"
            )
        if self.activation != "situ":
            raise ValueError(
                f"activation={self.activation!r} is not known; only 'situ' (SiTU-GLU) exists"
            )
        _check_positive("situ_beta", self.situ_beta)
        if self.situ_linear_beta is not None:
            _check_positive("situ_linear_beta", self.situ_linear_beta)
        _check_positive("rms_norm_eps", self.rms_norm_eps)
        _check_positive("routed_scaling_factor", self.routed_scaling_factor)

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of the shared expert; 0 if there is none."""
        return self.num_shared_experts * self.expert_intermediate_size

    @property
    def moe_layers(self) -> range:
        """Indices of the decoder layers that hold this block."""
        return range(self.first_moe_layer, self.num_layers)

    def supports_tp(self, tp: int) -> bool:
        """Whether every sharded width divides evenly, whole MXFP4 groups included."""
        return (
            tp >= 1
            and self.expert_intermediate_size % (tp * MXFP4_GROUP_SIZE) == 0
            and self.hidden_size % tp == 0
            and self.latent_size % tp == 0
            and self.shared_intermediate_size % tp == 0
        )

    def check_tp(self, tp: int) -> None:
        """Raises ValueError unless `supports_tp(tp)`, naming the sizes that work."""
        if not self.supports_tp(tp):
            good = [n for n in range(1, 65) if self.supports_tp(n)]
            raise ValueError(
                f"tp={tp} does not divide this config: expert_intermediate_size="
                f"{self.expert_intermediate_size} must split into whole groups of "
                f"{MXFP4_GROUP_SIZE}, hidden_size={self.hidden_size}, "
                f"latent_size={self.latent_size} and shared_intermediate_size="
                f"{self.shared_intermediate_size} evenly; tensor-parallel sizes that work: {good}"
            )

    @classmethod
    def kimi_k3(cls) -> "MoEConfig":
        """The published Kimi K3: 92 MoE layers of 896 experts, top-16, in a 3584-wide latent."""
        return cls(
            hidden_size=7168,
            latent_size=3584,
            num_experts=896,
            experts_per_token=16,
            expert_intermediate_size=3072,
            num_shared_experts=2,
            num_layers=93,
            first_moe_layer=1,
        )

    @classmethod
    def tiny(cls) -> "MoEConfig":
        """A small layer of the same structure, for tests and demos; splits up to 16 ways."""
        return cls(
            hidden_size=256,
            latent_size=128,
            num_experts=32,
            experts_per_token=4,
            expert_intermediate_size=512,
            num_shared_experts=2,
            num_layers=3,
            first_moe_layer=1,
        )

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> "MoEConfig":
        """Reads a Hugging Face `config.json` of Kimi K3.

        Args:
            source: the parsed JSON, the path of the file, or of the folder that holds it. The text
                model's keys may sit under `text_config`, as published, or at the top level.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a key is missing or asks for something this layer does not do.
        """
        raw = source if isinstance(source, Mapping) else _read_json(Path(source))
        text = raw.get("text_config", raw)
        missing = [key for key in _HF_KEYS if key not in text]
        if missing:
            raise ValueError(
                f"config lacks {missing}; a Kimi K3 text config has the keys {sorted(_HF_KEYS)}"
            )
        for key, wanted in _HF_FIXED.items():
            if key in text and text[key] not in wanted:
                raise ValueError(
                    f"config has {key}={text[key]!r}; this layer implements only "
                    f"{' or '.join(repr(value) for value in wanted)}"
                )
        _check_hf_quantization(text.get("quantization_config"))
        return cls(
            **{field: text[key] for key, field in _HF_KEYS.items()},
            situ_beta=text.get("activation_situ_beta") or 1.0,
            situ_linear_beta=text.get("activation_situ_linear_beta"),
            latent_norm=text.get("latent_moe_use_norm", True),
            renormalize=text.get("moe_renormalize", True),
            routed_scaling_factor=text.get("routed_scaling_factor", 1.0),
            first_moe_layer=text.get("first_k_dense_replace", 0),
        )


_HF_KEYS = {
    "hidden_size": "hidden_size",
    "routed_expert_hidden_size": "latent_size",
    "num_experts": "num_experts",
    "num_experts_per_token": "experts_per_token",
    "moe_intermediate_size": "expert_intermediate_size",
    "num_shared_experts": "num_shared_experts",
    "hidden_act": "activation",
    "rms_norm_eps": "rms_norm_eps",
    "num_hidden_layers": "num_layers",
}
_HF_FIXED = {
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "num_expert_group": (1,),
    "topk_group": (1,),
    "moe_layer_freq": (1,),
    "dtype": ("bfloat16",),
}


def _read_json(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error


def _check_hf_quantization(quantization: Mapping[str, Any] | None) -> None:
    if quantization is None:
        return
    got = quantization.get("format")
    if got != "mxfp4-pack-quantized":
        raise ValueError(
            f"quantization_config.format={got!r}; only 'mxfp4-pack-quantized' checkpoints are read"
        )
    for name, group in quantization.get("config_groups", {}).items():
        weights = group.get("weights", {})
        found = (weights.get("num_bits"), weights.get("type"), weights.get("group_size"))
        if found != (4, "float", MXFP4_GROUP_SIZE):
            raise ValueError(
                f"quantization_config.config_groups.{name}.weights has (num_bits, type, group_size)"
                f"={found}; MXFP4 is (4, 'float', {MXFP4_GROUP_SIZE})"
            )


def _check_int(name: str, value: object, *, low: int, multiple_of: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be an int, got {type(value).__name__}")
    if value < low or value % multiple_of:
        extra = f" and a multiple of {multiple_of}" if multiple_of > 1 else ""
        raise ValueError(f"{name}={value} must be at least {low}{extra}")


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be a number, got {type(value).__name__}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}={value} must be positive and finite")
