"""Which implementation each part of a layer takes, decided from static facts before tracing."""

import logging
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType

from k3jax.config import MoEConfig
from k3jax.ops.check import distrust
from k3jax.ops.experts import decode, grouped
from k3jax.ops.experts.api import UNPACKED, ExpertsTier
from k3jax.ops.router.api import RouterTier
from k3jax.ops.router.api import kernel_refusal as router_refusal
from k3jax.ops.tail.api import TailTier, fusion_refusal
from k3jax.runtime.target import Target

logger = logging.getLogger("k3jax")

DEFAULT_OVERLAP_LIMIT = 256
"""Most tokens for which the shared all-reduce is overlapped rather than merged."""
OVERLAP_LIMITS = {("h200", 2): 0}
"""The same where it was measured, in one process, by device and ranks; 0: it was never faster."""
FUSION_LIMITS = {("h200", 2): 128}
"""Most tokens for which the fused tail was faster than every other tier, by device and ranks."""


@dataclass(frozen=True)
class Choice[Tier]:
    """A tier, why it was taken, and why each of the others was not."""

    tier: Tier
    reason: str
    declined: tuple[tuple[Tier, str], ...] = ()


@dataclass(frozen=True)
class LayerPlan:
    """Every choice for one layer at one token count; equal on all ranks, hashable.

    Attributes:
        num_tokens: tokens of one rank's batch.
        tp: ranks that split the weights.
        target: device that the plan is for.
        output: "replicated" or "scattered".
        packed: whether the experts are in kernel order.
        router: tier of the router.
        experts: tier of the routed experts.
        tail: tier of the latent tail.
        unfinalised: whether the fused tail weighs and sums the experts' rows.
    """

    num_tokens: int
    tp: int
    target: Target
    output: str
    packed: bool
    router: Choice[RouterTier]
    experts: Choice[ExpertsTier]
    tail: Choice[TailTier]
    unfinalised: bool = False

    def __str__(self) -> str:
        """One line, for the log."""
        parts = (
            f"{part}={getattr(self, part).tier} ({getattr(self, part).reason})" for part in PARTS
        )
        weighed = "; the tail weighs the experts' rows" if self.unfinalised else ""
        head = f"{self.num_tokens} tokens, tp={self.tp}, {self.target.kind}: "
        return head + "; ".join(parts) + weighed


PARTS = ("router", "experts", "tail")


def plan_layer(
    config: MoEConfig,
    num_tokens: int,
    *,
    tp: int = 1,
    target: Target | str | None = None,
    output: str = "replicated",
    packed: bool = False,
    overlap_limit: int | None = None,
    router: RouterTier | str | None = None,
    experts: ExpertsTier | str | None = None,
    tail: TailTier | str | None = None,
    unfinalised: bool = False,
    one_process: bool = True,
) -> LayerPlan:
    """Chooses the tiers of one layer.

    Args:
        config: the layer.
        num_tokens: tokens in the batch, 0 included.
        tp: tensor-parallel size.
        target: device, or its kind ("cpu", "h200", "b200"); the current one if None.
        output: "replicated" for [T, H] on every rank, "scattered" for [T, H / tp].
        packed: whether the experts are in kernel order (`pack_params`), as their kernels need.
        overlap_limit: most tokens for ALLREDUCE_OVERLAP; if None, what was measured on such
            devices, or DEFAULT_OVERLAP_LIMIT.
        router: force this tier.
        experts: force this tier.
        tail: force this tier.
        unfinalised: hand the experts' rows to the fused tail unweighted; it weighs them.
        one_process: whether all ranks of a group are devices of one process; if not, the fused tail
            is taken only by name, since it needs them on one machine.

    Raises:
        ValueError: an argument is out of range, or a forced tier cannot run; the message says why.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens={num_tokens} must be 0 or more")
    if output not in ("replicated", "scattered"):
        raise ValueError(f"output={output!r} must be 'replicated' or 'scattered'")
    config.check_tp(tp)
    if not isinstance(target, Target):
        target = Target.current() if target is None else Target.named(target)
    if overlap_limit is None:
        measured = OVERLAP_LIMITS.get((target.kind, tp)) if one_process else None
        overlap_limit = DEFAULT_OVERLAP_LIMIT if measured is None else measured
    plan = LayerPlan(
        num_tokens,
        tp,
        target,
        output,
        packed,
        router=_choose("router", RouterTier, _router_table(config, target), router),
        experts=_choose(
            "experts", ExpertsTier, _experts_table(config, num_tokens, tp, target, packed), experts
        ),
        tail=_choose(
            "tail",
            TailTier,
            _tail_table(config, num_tokens, tp, target, output, overlap_limit, one_process),
            tail,
        ),
        unfinalised=unfinalised,
    )
    if unfinalised and plan.tail.tier != TailTier.TAIL_FUSION:
        raise ValueError(
            f"unfinalised=True needs tail='tail_fusion', got {str(plan.tail.tier)!r}: "
            f"{dict(plan.tail.declined).get(TailTier.TAIL_FUSION, plan.tail.reason)}"
        )
    return plan


@dataclass(frozen=True)
class _Row[Tier]:
    """A line of a tier table; the first with neither `refusal` nor `passed_over` is taken.

    Attributes:
        tier: the tier.
        reason: why it is taken, if it is.
        refusal: why it cannot run.
        passed_over: why it is not taken unless it is asked for.
    """

    tier: Tier
    reason: str
    refusal: str | None = None
    passed_over: str | None = None


def _router_table(config: MoEConfig, target: Target) -> list[_Row[RouterTier]]:
    return [
        _Row(
            RouterTier.KERNEL,
            f"compiled for {target.arch}",
            router_refusal(config, target) or distrust("router", target),
        ),
        _Row(RouterTier.XLA, "runs everywhere"),
    ]


def _experts_table(
    config: MoEConfig, num_tokens: int, tp: int, target: Target, packed: bool
) -> list[_Row[ExpertsTier]]:
    def refusal(kernels: ModuleType) -> str | None:
        reason = kernels.refusal(config, num_tokens, tp, target)
        return reason or (None if packed else UNPACKED) or distrust("experts", target)

    compiled = f"compiled for {target.arch}"
    many = refusal(grouped)
    slower = None
    if num_tokens > grouped.FASTER_PAST and many is None:
        slower = f"grouped is faster past {grouped.FASTER_PAST} tokens; take it by name"
    return [
        _Row(ExpertsTier.DECODE, compiled, refusal(decode), slower),
        _Row(ExpertsTier.GROUPED, compiled, many),
        _Row(ExpertsTier.XLA, "runs everywhere"),
        _Row(ExpertsTier.REFERENCE, "", passed_over="slow; take it by name for gradients"),
        _Row(ExpertsTier.W4A8, "", passed_over="other numbers; take it by name"),
    ]


def _tail_table(
    config: MoEConfig,
    num_tokens: int,
    tp: int,
    target: Target,
    output: str,
    overlap_limit: int,
    one_process: bool,
) -> list[_Row[TailTier]]:
    if tp == 1:
        merged = "tp is 1: there is nothing to reduce"
    elif not config.num_shared_experts:
        merged = "the config has no shared expert to merge with"
    elif output == "scattered":
        merged = "the output is scattered"
    else:
        merged = None
    limit = FUSION_LIMITS.get((target.kind, tp), 0)
    by_name = None
    if target.arch is None:
        by_name = "slower than all-reduces between CPU devices; take it by name"
    elif not one_process:
        by_name = "a group spans processes; take it by name where they share a machine"
    elif num_tokens > limit:
        by_name = f"not measured as faster on {tp} x {target.kind}; take it by name"
    fused = f"measured as faster up to {limit} tokens"
    within = f"within the overlap limit of {overlap_limit} tokens"
    past = f"past the overlap limit of {overlap_limit} tokens"
    overlaps = num_tokens <= overlap_limit
    return [
        _Row(TailTier.TAIL_FUSION, fused, fusion_refusal(config, num_tokens, tp, target), by_name),
        _Row(TailTier.ALLREDUCE_OVERLAP, within, merged, None if overlaps else past),
        _Row(TailTier.COLUMN_PARALLEL, past, merged, within if overlaps else None),
        _Row(
            TailTier.UNFUSED,
            merged or "",
            None,
            None if merged else "the tiers before it merge or hide its all-reduces",
        ),
    ]


def _choose[Tier: StrEnum](
    part: str, kind: type[Tier], table: list[_Row[Tier]], forced: Tier | str | None
) -> Choice[Tier]:
    if forced is not None:
        try:
            forced = kind(forced)
        except ValueError:
            names = [str(tier) for tier in kind]
            raise ValueError(f"{part}={forced!r} is not a tier; choose one of {names}") from None
        row = next(row for row in table if row.tier == forced)
        if row.refusal:
            raise ValueError(f"{part}={str(forced)!r} cannot run here: {row.refusal}")
        return Choice(row.tier, "asked for")
    taken = next(row for row in table if not (row.refusal or row.passed_over))
    declined = tuple(
        (row.tier, row.refusal or row.passed_over or f"{taken.tier} comes first")
        for row in table
        if row is not taken
    )
    return Choice(taken.tier, taken.reason, declined)
