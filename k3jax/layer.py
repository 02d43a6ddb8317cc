"""The layer: route, run the experts, and bring the latent back.

x [T, H] --gate--> ids, weights [T, K]
    |----down----> z [T, L] ----experts (own shard)----> m [T, L]   partial
    |----shared expert (own shard)--------------------> s [T, H]   partial
tail: sum m over ranks -> RMSNorm -> up-projection -> + sum of s over ranks = y [T, H]
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from k3jax.config import MoEConfig
from k3jax.ops.experts.api import routed_experts
from k3jax.ops.experts.packing import PackedExperts, check_layout, packed_infos
from k3jax.ops.router.api import route
from k3jax.ops.shared_expert.reference import shared_expert
from k3jax.ops.tail.api import latent_tail
from k3jax.parallel import Parallel, RankGroup, run_sharded
from k3jax.params import MoEParams, check_params, param_specs
from k3jax.plan import LayerPlan, logger, plan_layer


def moe_layer(
    params: MoEParams,
    x: jax.Array,
    *,
    config: MoEConfig,
    parallel: Parallel | None = None,
    plan: LayerPlan | None = None,
    router_logits: jax.Array | None = None,
    routed_input: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    output: str = "replicated",
) -> jax.Array:
    """One Kimi K3 MoE layer.

        ids, w = top-k by sigmoid(x Wg^T) + bias, weighed by the sigmoid
        m = sum_k w_k * W2[e_k] SiTU(W1[e_k] z, W3[e_k] z)   with z = x W_down^T
        y = RMSNorm(m) W_up^T + shared_expert(x)

    Everything is bfloat16 between operations and float32 inside them. T = 0 works.

    Args:
        params: the layer's parameters, sharded as `param_specs` says if `parallel` is given.
        x: bfloat16 [T, H], or any leading batch dimensions in place of T.
        config: shapes and constants.
        parallel: mesh and axis for tensor parallelism; None for one device.
        plan: implementation choices; `plan_layer` decides if None.
        router_logits: float32 [T, E], in place of x Wg^T.
        routed_input: bfloat16 [T, L], in place of x W_down^T; x still feeds the shared expert.
        token_mask: bool [T]; False marks padding, whose rows come out zero and reach no expert.
        output: "replicated", or "scattered" over the hidden axis.

    Returns:
        bfloat16, the shape of x; with "scattered", its last axis is split over `parallel.axis`.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, the mesh, or the plan does not fit.
    """
    tp = parallel.tp if parallel else 1
    packed = packed_infos(config, tp) if isinstance(params.experts, PackedExperts) else None
    if packed:
        check_layout(params.experts, config.expert_intermediate_size // tp)
    check_params(params, config, packed)
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}, want [T, {config.hidden_size}]")
    _check("x", x, jnp.bfloat16, (*x.shape[:-1], config.hidden_size))
    batch = x.shape[:-1]
    inputs = {
        "x": (x, jnp.bfloat16, config.hidden_size),
        "router_logits": (router_logits, jnp.float32, config.num_experts),
        "routed_input": (routed_input, jnp.bfloat16, config.latent_size),
        "token_mask": (token_mask, jnp.bool_, None),
    }
    flat = {}
    for name, (array, dtype, width) in inputs.items():
        if array is not None:
            rest = () if width is None else (width,)
            _check(name, array, dtype, batch + rest)
            flat[name] = array.reshape(-1, *rest)
    num_tokens = flat["x"].shape[0]
    plan = _resolve_plan(plan, config, num_tokens, parallel, output, packed is not None)

    tokens = parallel.tokens_spec if parallel else P
    specs = {name: tokens() if name == "token_mask" else tokens(None) for name in flat}
    out_spec = tokens(parallel.axis if parallel and output == "scattered" else None)
    local = functools.partial(_moe_local, config=config, plan=plan)
    weights = param_specs(config, parallel.axis, packed) if parallel else None
    y = run_sharded(local, parallel, (weights, specs), out_spec, params, flat)
    return y.reshape(*batch, config.hidden_size)


def _moe_local(
    group: RankGroup, params: MoEParams, inputs: dict, *, config: MoEConfig, plan: LayerPlan
) -> jax.Array:
    """The layer on one rank's shards."""
    x, mask = inputs["x"], inputs.get("token_mask")
    if mask is not None:
        x = jnp.where(mask[:, None], x, 0)
    ids, weights = route(
        x,
        params.gate,
        config=config,
        tier=plan.router.tier,
        target=plan.target,
        logits=inputs.get("router_logits"),
    )
    z = inputs.get("routed_input")
    if z is None:
        z = _linear(x, params.routed_expert_down_proj)
    if mask is not None:
        ids = jnp.where(mask[:, None], ids, -1)
    m = routed_experts(
        z,
        ids,
        weights,
        params.experts,
        config=config,
        tier=plan.experts.tier,
        tp=group.size,
        target=plan.target,
    )
    shared = None
    if params.shared_experts is not None:
        betas = (config.situ_beta, config.situ_linear_beta)
        shared = shared_expert(x, params.shared_experts, betas)
    return latent_tail(
        m,
        shared,
        params.routed_expert_norm,
        params.routed_expert_up_proj,
        eps=config.rms_norm_eps,
        group=group,
        tier=plan.tail.tier,
        scattered=plan.output == "scattered",
    )


def _linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    out = jnp.einsum("tk,mk->tm", x, weight, preferred_element_type=jnp.float32)
    return out.astype(jnp.bfloat16)


def _resolve_plan(
    plan, config, num_tokens: int, parallel: Parallel | None, output: str, packed: bool
) -> LayerPlan:
    tp = parallel.tp if parallel else 1
    shards = parallel.token_shards if parallel else 1
    if parallel and num_tokens % shards:
        raise ValueError(
            f"x has {num_tokens} tokens, which token_axes={parallel.token_axes} cannot split "
            f"{shards} ways; pad the batch and pass token_mask"
        )
    if plan is None:
        plan = plan_layer(config, num_tokens // shards, tp=tp, output=output, packed=packed)
    for name, got, want in (
        ("num_tokens", plan.num_tokens, num_tokens // shards),
        ("tp", plan.tp, tp),
        ("output", plan.output, output),
        ("packed", plan.packed, packed),
    ):
        if got != want:
            raise ValueError(f"plan is for {name}={got}, this call has {want}; plan it anew")
    _log_once(plan)
    return plan


@functools.cache
def _log_once(plan: LayerPlan) -> None:
    logger.info("%s", plan)


def _check(name: str, array: jax.Array, dtype, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype:
        raise TypeError(
            f"{name} is {array.dtype}, want {jnp.dtype(dtype)}: cast it before the call"
        )
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, want {shape}")
