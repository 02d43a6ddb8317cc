"""The layer: route, run the experts, and bring the latent back.

x [T, H] --gate--> ids, weights [T, K]
    |----down----> z [T, L] ----experts (own shard)----> m [T, L]   partial
    |----shared expert (own shard)--------------------> s [T, H]   partial
tail: sum m over ranks -> RMSNorm -> up-projection -> + sum of s over ranks = y [T, H]
"""

import functools

import jax
import jax.numpy as jnp

from k3jax.config import MoEConfig
from k3jax.ops.experts.api import UNPACKED, routed_experts
from k3jax.ops.experts.packing import infos_of
from k3jax.ops.rounding import to_bfloat16
from k3jax.ops.router.api import route
from k3jax.ops.shared_expert.reference import shared_expert
from k3jax.ops.tail.api import TailTier, create_workspaces, latent_tail
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
    packed = infos_of(params.experts, config, parallel)
    check_params(params, config, packed)
    batch = x.shape[:-1]
    inputs = _fold_tokens(
        config,
        batch,
        x=x,
        router_logits=router_logits,
        routed_input=routed_input,
        token_mask=token_mask,
    )
    num_tokens = inputs["x"].shape[0]
    plan = _resolve_plan(plan, config, num_tokens, parallel, output, packed is not None)
    if parallel and plan.tail.tier == TailTier.TAIL_FUSION:
        create_workspaces(config, parallel, f"{plan.num_tokens} tokens a rank, {output} output")
    y = _moe_sharded(params, inputs, config=config, parallel=parallel, plan=plan)
    return y.reshape(*batch, config.hidden_size)


@functools.partial(jax.jit, static_argnames=("config", "parallel", "plan"))
def _moe_sharded(
    params: MoEParams,
    inputs: dict[str, jax.Array],
    *,
    config: MoEConfig,
    parallel: Parallel | None,
    plan: LayerPlan,
) -> jax.Array:
    """The layer over all ranks; jitted, so that a call outside `jax.jit` compiles once too."""
    local = functools.partial(_moe_local, config=config, plan=plan)
    if parallel is None:
        return run_sharded(local, None, None, None, params, inputs)
    tokens = parallel.tokens_spec
    specs = {name: tokens() if array.ndim == 1 else tokens(None) for name, array in inputs.items()}
    columns = parallel.axis if plan.output == "scattered" else None
    packed = infos_of(params.experts, config, parallel)
    weights = param_specs(config, parallel.axis, packed)
    # The fused tail gives every rank the same rows, which JAX cannot see in a custom call.
    known = plan.tail.tier != TailTier.TAIL_FUSION
    return run_sharded(
        local, parallel, (weights, specs), tokens(columns), params, inputs, check_vma=known
    )


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
        weighted=not plan.unfinalised,
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
        target=plan.target,
        routes=(ids, weights) if plan.unfinalised else None,
    )


def _linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    out = jnp.einsum("tk,mk->tm", x, weight, preferred_element_type=jnp.float32)
    return to_bfloat16(out)


def _fold_tokens(
    config: MoEConfig, batch: tuple[int, ...], **arrays: jax.Array | None
) -> dict[str, jax.Array]:
    """Checks the arguments that are there, and makes one token axis of the batch axes."""
    kinds = {
        "x": (jnp.bfloat16, (config.hidden_size,)),
        "router_logits": (jnp.float32, (config.num_experts,)),
        "routed_input": (jnp.bfloat16, (config.latent_size,)),
        "token_mask": (jnp.bool_, ()),
    }
    folded = {}
    for name, array in arrays.items():
        if array is None:
            continue
        dtype, width = kinds[name]
        if array.dtype != dtype:
            raise TypeError(
                f"{name} is {array.dtype}, want {jnp.dtype(dtype)}: cast it before the call"
            )
        if not batch or array.shape != batch + width:
            want = ", ".join(map(str, (batch or ("T",)) + width))
            raise ValueError(f"{name} has shape {array.shape}, want [{want}]")
        folded[name] = array.reshape(-1, *width)
    return folded


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
        plan = plan_layer(
            config,
            num_tokens // shards,
            tp=tp,
            output=output,
            packed=packed,
            one_process=parallel is None or parallel.one_process,
        )
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
    unfused = dict(plan.tail.declined).get(TailTier.TAIL_FUSION)
    if unfused and plan.tp > 1:
        logger.info("tail=%s rather than tail_fusion: %s", plan.tail.tier, unfused)
    if any(reason == UNPACKED for _, reason in plan.experts.declined):
        logger.warning("experts run in XLA on %s: %s", plan.target.kind, UNPACKED)
