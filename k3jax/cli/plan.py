"""Print which implementation each token count takes, and why.

Nothing runs: the choice follows from the numbers given here alone.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from k3jax.cli.arguments import integers

if TYPE_CHECKING:
    from k3jax.plan import LayerPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the verb takes."""
    parser.add_argument("--tokens", type=integers, required=True, help="batch sizes, as 1,8,64")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    parser.add_argument("--target", help="device kind, such as b200 (default: the one here)")
    parser.add_argument("--config", help="config.json or its folder (default: Kimi K3)")
    parser.add_argument("--output", choices=("replicated", "scattered"), default="replicated")
    parser.add_argument("--overlap-limit", type=int, help="most tokens for allreduce_overlap")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> None:
    """Prints the plans."""
    from k3jax.config import MoEConfig
    from k3jax.plan import plan_layer

    config = MoEConfig.from_hf(args.config) if args.config else MoEConfig.kimi_k3()
    plans = [
        plan_layer(
            config,
            num_tokens,
            tp=args.tp,
            target=args.target,
            output=args.output,
            overlap_limit=args.overlap_limit,
        )
        for num_tokens in args.tokens
    ]
    print(json.dumps([as_json(plan) for plan in plans], indent=2) if args.json else render(plans))


def render(plans: Sequence["LayerPlan"]) -> str:
    """Plans for one device and tensor-parallel size as a table, with the refusals below it."""
    from k3jax.plan import PARTS

    head = ["tokens", *(title for part in PARTS for title in (part, "because"))]
    rows = [head]
    refused = defaultdict(list)
    for plan in plans:
        row = [str(plan.num_tokens)]
        for part in PARTS:
            choice = getattr(plan, part)
            row += [str(choice.tier), choice.reason]
            for tier, reason in choice.declined:
                refused[f"{part}={tier}", reason].append(plan.num_tokens)
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    first = plans[0]
    title = f"{first.target.kind}, tp={first.tp}, {first.output} output"
    return "\n".join([title, *lines, *_refusals(refused, len(plans))])


def as_json(plan: "LayerPlan") -> dict[str, Any]:
    """A plan as plain data."""
    from k3jax.plan import PARTS

    facts: dict[str, Any] = {
        "num_tokens": plan.num_tokens,
        "tp": plan.tp,
        "target": plan.target.kind,
        "output": plan.output,
    }
    for part in PARTS:
        choice = getattr(plan, part)
        declined = {str(tier): reason for tier, reason in choice.declined}
        facts[part] = {"tier": str(choice.tier), "reason": choice.reason, "declined": declined}
    return facts


def _refusals(refused: dict[tuple[str, str], list[int]], num_plans: int) -> list[str]:
    lines = []
    for (tier, reason), tokens in refused.items():
        where = "" if len(tokens) == num_plans else f" at {', '.join(map(str, tokens))} tokens"
        lines.append(f"  {tier}{where}: {reason}")
    return ["declined:", *lines] if lines else []
