"""Time the routed experts of one rank against the memory floor: `k3jax bench experts`.

One rank's share of the routed experts: both products, SiTU and the weighted sum, routing given. The
floor is the MXFP4 bytes of the experts that are chosen, over the card's measured read bandwidth.

Every call of a chain has routes of its own, so that its weights are not in L2 from the call before.
A chain is one jitted program of independent calls; the time of a call is the difference between a
long and a short chain over the difference in length, which leaves out what a dispatch costs, as the
median of several pairs. A time is printed only once every timed call's output was compared with the
plain XLA implementation of the same numbers, on some of its tokens.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.bench.bandwidth import measure_read_bandwidth
from k3jax.cli.arguments import integers
from k3jax.config import MXFP4_GROUP_SIZE, MoEConfig
from k3jax.ops.experts.api import ExpertsTier, routed_experts
from k3jax.ops.experts.check import random_experts
from k3jax.ops.experts.packing import PackedExperts, pack_experts
from k3jax.plan import plan_layer
from k3jax.runtime.target import Target

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TENSOR_PARALLEL = (8, 16, 2)
ROUTINGS = ("uniform", "zipf")
LIMIT = 3e-3
"""Largest relative L2 error: half a bf16 ulp of the output, and roundings that flip inside."""
CHECKED_TOKENS = 4
XLA_TOKENS = 32
"""Most tokens for which the XLA implementation is timed: past it a call takes milliseconds."""
CHAINS = 4, 12
PAIRS = 7


@dataclass(frozen=True)
class Row:
    """One line of a table; times in microseconds a call.

    Attributes:
        routing: how experts were drawn.
        tp: ranks that share the experts.
        num_tokens: T.
        distinct: mean number of experts that a call touches.
        tier: implementation.
        floor: least time that reading these experts takes.
        ours: of the implementation that the plan takes.
        xla: of the plain XLA implementation, where it was timed.
        error: largest relative L2 error of a timed output.
    """

    routing: str
    tp: int
    num_tokens: int
    distinct: float
    tier: str
    floor: float
    ours: float
    xla: float | None
    error: float

    @property
    def ratio(self) -> float:
        """Time over floor."""
        return self.ours / self.floor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the benchmark takes."""
    parser.add_argument("--tokens", type=integers, default=TOKENS, help="token counts, 1,8,64")
    parser.add_argument("--tp", type=integers, default=TENSOR_PARALLEL, help="ranks, 8,16,2")
    parser.add_argument("--routing", choices=ROUTINGS, action="append", help="default: both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--plot", type=Path, help="also draw time over floor into this PNG")


def run(args: argparse.Namespace) -> int:
    """Prints a table for each routing and tensor-parallel size; status 1 if an output is wrong."""
    target = Target.current()
    bandwidth = target.read_bytes_per_second
    if bandwidth is None:
        if target.arch is None:
            raise NotImplementedError(f"{target.kind!r} has no kernels to time: run it on a GPU")
        bandwidth = measure_read_bandwidth()
    print(f"floors by {bandwidth / 1e12:.2f} TB/s")
    rows, wrong = [], []
    for tp in args.tp:
        experts = jax.jit(pack_experts)(random_experts(_CONFIG, tp, jax.random.key(args.seed)))
        for routing in args.routing or ROUTINGS:
            print(f"\n{target.kind}, one rank of TP={tp}, {routing} routing\n{_HEADING}")
            for num_tokens in args.tokens:
                try:
                    rows.append(
                        measure(num_tokens, tp, routing, experts, target, bandwidth, args.seed)
                    )
                except WrongOutputError as error:
                    wrong.append(str(error))
                    print(f"{num_tokens:6d}  {error}", file=sys.stderr)
                else:
                    print(_line(rows[-1]), flush=True)
    if args.json:
        facts = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows]
        args.json.write_text(json.dumps({"target": target.kind, "rows": facts}, indent=2))
    if args.plot:
        draw(rows, args.plot)
    return 1 if wrong else 0


class WrongOutputError(Exception):
    """A timed output is not that of the XLA implementation."""


_CONFIG = MoEConfig.kimi_k3()


def measure(
    num_tokens: int,
    tp: int,
    routing: str,
    experts: PackedExperts,
    target: Target,
    bandwidth: float,
    seed: int,
) -> Row:
    """Times one case; `bandwidth` is what the floor is computed with, in bytes per second.

    Raises:
        WrongOutputError: an output that was timed is wrong.
    """
    plan = plan_layer(_CONFIG, num_tokens, tp=tp, target=target, packed=True)
    tier = plan.experts.tier
    rng = np.random.default_rng([seed, num_tokens, tp, ROUTINGS.index(routing)])
    routes = [draw_routes(rng, num_tokens, routing) for _ in range(CHAINS[1])]
    z = jnp.asarray(rng.standard_normal((num_tokens, _CONFIG.latent_size)), jnp.bfloat16)

    def run(tier):
        return time_chain(
            functools.partial(routed_experts, config=_CONFIG, tier=tier, tp=tp, target=target),
            z,
            routes,
            experts,
        )

    outputs, ours = run(tier)
    error = max(
        check(z, ids, weights, experts, out, rng)
        for (ids, weights), out in zip(routes, outputs, strict=True)
    )
    if not error <= LIMIT:
        raise WrongOutputError(
            f"{tier} with {num_tokens} tokens, tp={tp}, {routing}: relative error {error:.1e} is "
            f"past {LIMIT}; no time is printed"
        )
    xla = None
    if num_tokens <= XLA_TOKENS and tier != ExpertsTier.XLA:
        xla = run(ExpertsTier.XLA)[1]
    distinct = statistics.mean(len(np.unique(ids)) for ids, _ in routes)
    return Row(
        routing,
        tp,
        num_tokens,
        distinct,
        str(tier),
        1e6 * distinct * expert_bytes(tp) / bandwidth,
        ours,
        xla,
        error,
    )


def expert_bytes(tp: int) -> int:
    """Bytes of one rank's share of one expert, scales included."""
    weights = 3 * _CONFIG.latent_size * _CONFIG.expert_intermediate_size // tp
    return weights // 2 + weights // MXFP4_GROUP_SIZE


def draw_routes(rng: np.random.Generator, num_tokens: int, routing: str):
    """ids int32 [T, K], weights float32 [T, K]; `zipf` chooses the n-th expert as often as 1/n."""
    E, K = _CONFIG.num_experts, _CONFIG.experts_per_token
    popularity = np.ones(E) if routing == "uniform" else 1 / np.arange(1, E + 1)
    # The K largest of log p + Gumbel noise are K draws without replacement.
    keys = np.log(rng.permutation(popularity)) + rng.gumbel(size=(num_tokens, E))
    ids = np.argpartition(-keys, K, axis=1)[:, :K].astype(np.int32)
    weights = rng.uniform(0.02, 0.12, ids.shape).astype(np.float32)
    return ids, weights


def time_chain(
    call: Callable, z: jax.Array, routes: list, experts: PackedExperts
) -> tuple[list[np.ndarray], float]:
    """Outputs of a call on each of `routes`, and microseconds a call."""
    once = jax.jit(call)  # traced once, however long the chain
    chain = jax.jit(
        lambda z, routes, experts: [once(z, ids, weights, experts) for ids, weights in routes]
    )

    def seconds(routes):
        start = time.perf_counter()
        jax.block_until_ready(chain(z, routes, experts))
        return time.perf_counter() - start

    long = jax.device_put(routes)
    short = long[: CHAINS[0]]
    outputs = [np.asarray(out, np.float32) for out in chain(z, long, experts)]
    seconds(short)
    extra = [seconds(long) - seconds(short) for _ in range(PAIRS)]
    return outputs, 1e6 * statistics.median(extra) / (len(long) - len(short))


def check(z, ids, weights, experts: PackedExperts, out: np.ndarray, rng) -> float:
    """Relative L2 error of some tokens against the XLA implementation; inf if any is not finite."""
    some = rng.permutation(len(ids))[:CHECKED_TOKENS]
    if not np.isfinite(out).all():
        return float("inf")
    want = np.asarray(_reference(z[some], ids[some], weights[some], experts), np.float32)
    return float(np.linalg.norm(out[some] - want) / np.linalg.norm(want))


@jax.jit
def _reference(z, ids, weights, experts):
    return routed_experts(z, ids, weights, experts, config=_CONFIG, tier=ExpertsTier.XLA)


_HEADING = "tokens  experts   floor us    ours us  ratio     xla us  tier"


def _line(row: Row) -> str:
    xla = f"{row.xla:10.1f}" if row.xla is not None else " " * 9 + "-"
    return (
        f"{row.num_tokens:6d}  {row.distinct:7.1f}  {row.floor:9.1f}  {row.ours:9.1f}  "
        f"{row.ratio:5.2f} {xla}  {row.tier}"
    )


def draw(rows: list[Row], file: Path) -> None:
    """Time over floor by token count, one line for each routing and tensor-parallel size.

    Raises:
        NotImplementedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotImplementedError("--plot needs matplotlib: pip install k3jax[bench]") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for label, line in _lines(rows):
        axes.plot([r.num_tokens for r in line], [r.ratio for r in line], marker="o", label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens")
    axes.set_ylabel("time over the time that reading the chosen experts takes")
    axes.legend()
    figure.savefig(file, dpi=150)


def _lines(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    for routing, tp in dict.fromkeys((row.routing, row.tp) for row in rows):
        line = [row for row in rows if (row.routing, row.tp) == (routing, tp)]
        yield f"TP={tp}, {routing}", line
