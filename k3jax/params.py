"""Parameters of one MoE layer, as a pytree that carries the checkpoint's names."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from operator import getitem
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from k3jax.config import MXFP4_GROUP_SIZE, MoEConfig
from k3jax.quant import mxfp4
from k3jax.quant.mxfp4 import Leaf, Mxfp4Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GateParams:
    """The router: weight bfloat16 [E, H], e_score_correction_bias float32 [E]."""

    weight: Leaf
    e_score_correction_bias: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertParams:
    """The routed experts, stacked: w1 (gate) and w3 (up) [E, I, L], w2 (down) [E, L, I]."""

    w1: Mxfp4Array
    w3: Mxfp4Array
    w2: Mxfp4Array

    def expert(self, index) -> tuple[Mxfp4Array, Mxfp4Array, Mxfp4Array]:
        """w1, w3 and w2 of one expert."""
        return self.w1[index], self.w3[index], self.w2[index]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedExpertParams:
    """The shared expert, bfloat16: gate_proj and up_proj [S, H], down_proj [H, S]."""

    gate_proj: Leaf
    up_proj: Leaf
    down_proj: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEParams:
    """All parameters of one layer.

    Attributes:
        gate: the router.
        routed_expert_down_proj: bfloat16 [L, H], into the latent.
        experts: the routed experts, `ExpertParams` or `ops.experts.packing.PackedExperts`.
        routed_expert_norm: bfloat16 [L], or None if the config has no latent norm.
        routed_expert_up_proj: bfloat16 [H, L], out of the latent.
        shared_experts: the shared expert, or None.
    """

    gate: GateParams
    routed_expert_down_proj: Leaf
    experts: Any
    routed_expert_norm: Leaf | None
    routed_expert_up_proj: Leaf
    shared_experts: SharedExpertParams | None


@dataclass(frozen=True)
class ParamInfo:
    """One leaf of `MoEParams`.

    Attributes:
        name: path in the pytree, which is the checkpoint's name without the expert number.
        shape: global shape.
        dtype: of the array.
        sharded_axis: axis that is split over ranks, or None for a replicated array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    sharded_axis: int | None = None

    def axes(self, axis_name: str) -> tuple[str | None, ...]:
        """One entry an axis: `axis_name` on the split one, None on the others."""
        return tuple(
            axis_name if axis == self.sharded_axis else None for axis in range(len(self.shape))
        )

    def spec(self, axis_name: str) -> P:
        """The PartitionSpec with the split axis on mesh axis `axis_name`."""
        return P(*self.axes(axis_name))


def param_infos(config: MoEConfig, experts: Any = None) -> MoEParams:
    """A pytree like `MoEParams` whose leaves are the `ParamInfo` of each array.

    Args:
        config: the layer.
        experts: infos of the experts where they are not in the checkpoint's order.
    """
    H, L, E = config.hidden_size, config.latent_size, config.num_experts
    I, S = config.expert_intermediate_size, config.shared_intermediate_size  # noqa: E741

    def dense(name, *shape, sharded=None):
        return ParamInfo(name, shape, jnp.bfloat16, sharded)

    def mxfp4(name, *shape, sharded):
        return Mxfp4Array(
            ParamInfo(f"{name}.packed", (*shape[:-1], shape[-1] // 2), jnp.uint8, sharded),
            ParamInfo(
                f"{name}.scale", (*shape[:-1], shape[-1] // MXFP4_GROUP_SIZE), jnp.uint8, sharded
            ),
        )

    shared = SharedExpertParams(
        dense("shared_experts.gate_proj", S, H, sharded=0),
        dense("shared_experts.up_proj", S, H, sharded=0),
        dense("shared_experts.down_proj", H, S, sharded=1),
    )
    return MoEParams(
        gate=GateParams(
            dense("gate.weight", E, H), ParamInfo("gate.e_score_correction_bias", (E,), jnp.float32)
        ),
        routed_expert_down_proj=dense("routed_expert_down_proj", L, H),
        experts=experts
        or ExpertParams(
            w1=mxfp4("experts.w1", E, I, L, sharded=1),
            w3=mxfp4("experts.w3", E, I, L, sharded=1),
            w2=mxfp4("experts.w2", E, L, I, sharded=2),
        ),
        routed_expert_norm=dense("routed_expert_norm", L) if config.latent_norm else None,
        routed_expert_up_proj=dense("routed_expert_up_proj", H, L),
        shared_experts=shared if S else None,
    )


def map_infos(
    function: Callable[..., Any], config: MoEConfig, *trees: MoEParams, experts: Any = None
) -> MoEParams:
    """`jax.tree.map` over `param_infos` and further pytrees of the same structure."""
    return jax.tree.map(function, param_infos(config, experts), *trees)


def iter_infos(config: MoEConfig) -> Iterator[ParamInfo]:
    """The infos of all arrays."""
    return iter(jax.tree.leaves(param_infos(config)))


def param_specs(config: MoEConfig, axis_name: str, experts: Any = None) -> MoEParams:
    """PartitionSpec of each array, for tensor parallelism on mesh axis `axis_name`.

    Expert and shared gate/up are split by rows, expert and shared down by columns (whole MXFP4
    groups); router, latent projections and norm are replicated. `experts` as in `param_infos`.
    """
    return map_infos(lambda info: info.spec(axis_name), config, experts=experts)


def abstract_params(config: MoEConfig, experts: Any = None) -> MoEParams:
    """The `jax.ShapeDtypeStruct` of each array; `experts` as in `param_infos`."""
    return map_infos(
        lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), config, experts=experts
    )


def init_params(config: MoEConfig, key: jax.Array) -> MoEParams:
    """Random parameters: normal, with the variance that keeps activations near 1.

    The latent norm's gain is drawn around 1 and the router's bias around 0, so that neither is
    trivial. Experts are drawn and rounded to MXFP4 one at a time.
    """
    return init_part(param_infos(config), key)


def init_part[Part](infos: Part, key: jax.Array) -> Part:
    """`init_params` for any part of a `param_infos` tree."""
    nodes, tree = jax.tree.flatten(infos, is_leaf=lambda node: isinstance(node, Mxfp4Array))
    keys = jax.random.split(key, len(nodes))
    return jax.tree.unflatten(tree, [_init(n, k) for n, k in zip(nodes, keys, strict=True)])


def as_dict(part: Any) -> Any:
    """A part of `MoEParams` as nested dicts keyed by field, without what is None.

    Static fields, such as the tag of experts in kernel order, are not part of it.
    """
    ours = is_dataclass(part) and type(part).__module__.startswith("k3jax.")
    if not ours or jax.tree_util.all_leaves([part]):
        return part
    children = {f.name: getattr(part, f.name) for f in fields(part) if not f.metadata.get("static")}
    return {name: as_dict(child) for name, child in children.items() if child is not None}


def from_dict(config: MoEConfig, tree: Mapping[str, Any], experts: Any = None) -> MoEParams:
    """The inverse of `as_dict` for the whole of `MoEParams`; `experts` as in `param_infos`."""
    return map_infos(
        lambda info: reduce(getitem, info.name.split("."), tree), config, experts=experts
    )


def _init(node: ParamInfo | Mxfp4Array, key: jax.Array) -> jax.Array | Mxfp4Array:
    if isinstance(node, Mxfp4Array):
        num_experts, rows, half = node.packed.shape

        def one(expert_key):
            return mxfp4.quantize(
                jax.random.normal(expert_key, (rows, 2 * half)) / (2 * half) ** 0.5
            )

        return jax.lax.map(one, jax.random.split(key, num_experts))
    draw = jax.random.normal(key, node.shape)
    if node.name == "routed_expert_norm":
        return (1 + 0.1 * draw).astype(node.dtype)
    if node.name == "gate.e_score_correction_bias":
        return 0.01 * draw
    return (draw / node.shape[-1] ** 0.5).astype(node.dtype)


def check_params(params: MoEParams, config: MoEConfig, experts: Any = None) -> None:
    """Raises TypeError or ValueError, naming the array, unless `params` fits `param_infos`."""
    want = jax.tree.structure(param_infos(config, experts))
    got = jax.tree.structure(params)
    if got != want:
        raise ValueError(
            f"params do not have the structure that config asks for (latent_norm="
            f"{config.latent_norm}, num_shared_experts={config.num_shared_experts}): got {got}"
        )

    def check(info: ParamInfo, array) -> None:
        if array.dtype != info.dtype:
            hint = "; MXFP4 bytes hold two codes: reinterpret, never convert" * (
                info.dtype == jnp.uint8
            )
            raise TypeError(
                f"params.{info.name} is {array.dtype}, want {jnp.dtype(info.dtype)}{hint}"
            )
        if array.shape != info.shape:
            raise ValueError(f"params.{info.name} has shape {array.shape}, want {info.shape}")

    map_infos(check, config, params, experts=experts)
