"""Time the routed experts of one rank against the memory floor: `k3jax bench experts`.

One rank's share of the routed experts: both products, SiTU and the weighted sum, routing given. The
floor is the MXFP4 bytes of the experts that are chosen, over the card's measured read bandwidth.

A chain is one jitted program of independent calls. Every call has routes of its own, and a chain
reads many times what L2 holds, so that no weights are left there from an earlier call. Chains are
queued one behind another, which leaves out what dispatching costs. Between samples the card rests,
so that neither ours nor a peer is throttled by its own heat or by that of what ran before; with
`--rest 0` all are timed under sustained load instead. A time is printed only once every call's
output was compared with the plain XLA implementation of the same numbers, on some of its tokens,
and the chain with the calls by themselves; peers too are held to the first.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.bench.bandwidth import read_bandwidth
from k3jax.bench.facts import facts_of, write_json
from k3jax.bench.peers import (
    DEFAULT_PEERS,
    PEERS,
    Implementation,
    JaxImplementation,
    Routes,
    peer_names,
    peers,
)
from k3jax.bench.rows import Row, WrongOutputError, heading, line, table, title
from k3jax.bench.timing import add_rest
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
CHAIN_SECONDS = 2e-3
"""How long a chain should keep the device busy, several times what dispatching it takes."""
CHAIN_CALLS = 4, 96
"""Fewest and most calls of a chain."""
PEER_CALLS = 4


_CONFIG = MoEConfig.kimi_k3()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the benchmark takes."""
    parser.add_argument("--tokens", type=integers, default=TOKENS, help="token counts, 1,8,64")
    parser.add_argument("--tp", type=integers, default=TENSOR_PARALLEL, help="ranks, 8,16,2")
    parser.add_argument("--routing", choices=ROUTINGS, action="append", help="default: both")
    parser.add_argument(
        "--peers",
        default=",".join(DEFAULT_PEERS),
        help=f"what else to time, some of {','.join(PEERS)}, or none (default: all but the last)",
    )
    add_rest(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--plot", type=Path, help="also draw the rows into this PNG")
    parser.add_argument("--load", type=Path, help="print and draw this JSON instead of timing")


def run(args: argparse.Namespace) -> int:
    """Prints a table for each routing and tensor-parallel size; status 1 if an output is wrong."""
    if args.load:
        facts = json.loads(args.load.read_text())
        rows = [Row(**row) for row in facts["rows"]]
        print(table(rows, facts.get("rest_seconds")))
    else:
        target = Target.current()
        bandwidth = read_bandwidth(target)
        print(f"{target.kind}, floors by {bandwidth / 1e12:.2f} TB/s")
        rows, facts = [], facts_of([], bandwidth, args.rest)
        for row in _time_all(args, target, bandwidth):
            rows.append(row)
            facts = facts_of(filter(None, rows), bandwidth, args.rest)
            if args.json:  # a run that is cut short leaves what it measured
                write_json(facts, args.json)
    if args.plot:
        from k3jax.bench.plot import draw

        draw([row for row in rows if row], facts["device"], args.plot)
    return 0 if all(rows) else 1


def _time_all(args, target: Target, bandwidth: float) -> Iterator[Row | None]:
    """Every row as it is measured, None for a wrong output."""
    names = peer_names(args.peers)
    for tp in args.tp:
        experts = jax.jit(pack_experts)(random_experts(_CONFIG, tp, jax.random.key(args.seed)))
        bench = Bench(tp, target, bandwidth, args.seed, args.rest, experts)
        bench.peers += peers(names, experts, _CONFIG, print)
        for routing in args.routing or ROUTINGS:
            print(f"\n{title(routing, tp, args.rest)}\n{heading([p.name for p in bench.peers])}")
            for num_tokens in args.tokens:
                try:
                    row = bench.measure(num_tokens, routing)
                except WrongOutputError as error:
                    row = None
                    print(f"{num_tokens:6d}  {error}", file=sys.stderr)
                else:
                    print(line(row, [peer.name for peer in bench.peers]), flush=True)
                yield row
        del experts, bench  # they may take half of the memory


@dataclass
class Bench:
    """What the rows of one tensor-parallel size share.

    Attributes:
        tp: ranks that share the experts.
        target: the device.
        bandwidth: what floors are computed with, in bytes per second.
        seed: of routes and tokens.
        rest: seconds of idling between samples.
        experts: one rank's share.
        peers: what else to time. One that fails is dropped.
        tiers: ours, by tier; both routings share a compiled chain.
    """

    tp: int
    target: Target
    bandwidth: float
    seed: int
    rest: float
    experts: PackedExperts
    peers: list[Implementation] = dataclasses.field(default_factory=list)
    tiers: dict[ExpertsTier, Implementation] = dataclasses.field(default_factory=dict)

    def measure(self, num_tokens: int, routing: str) -> Row:
        """Times one case.

        Raises:
            WrongOutputError: an output of ours is wrong.
        """
        rng = np.random.default_rng([self.seed, num_tokens, self.tp, ROUTINGS.index(routing)])
        plan = plan_layer(_CONFIG, num_tokens, tp=self.tp, target=self.target, packed=True)
        most = min(num_tokens * _CONFIG.experts_per_token, _CONFIG.num_experts)
        fewest_calls, most_calls = CHAIN_CALLS
        calls = min(max(int(CHAIN_SECONDS / self._floor(most)), fewest_calls), most_calls)
        routes = [draw_routes(rng, num_tokens, routing) for _ in range(calls)]
        z = jnp.asarray(rng.standard_normal((num_tokens, _CONFIG.latent_size)), jnp.bfloat16)

        seconds, error = self._time(self._ours(plan.experts.tier), z, routes, rng)
        distinct = statistics.mean(len(np.unique(ids)) for ids, _ in routes)
        return Row(
            routing=routing,
            tp=self.tp,
            num_tokens=num_tokens,
            distinct=distinct,
            tier=str(plan.experts.tier),
            floor=1e6 * self._floor(distinct),
            ours=1e6 * seconds,
            error=error,
            peers=self._time_peers(z, routes[:PEER_CALLS], rng),
        )

    def _floor(self, num_experts: float) -> float:
        weights = 3 * _CONFIG.latent_size * _CONFIG.expert_intermediate_size // self.tp
        expert_bytes = weights // 2 + weights // MXFP4_GROUP_SIZE
        return num_experts * expert_bytes / self.bandwidth

    def _ours(self, tier: ExpertsTier) -> Implementation:
        if tier not in self.tiers:
            call = functools.partial(
                routed_experts, config=_CONFIG, tier=tier, tp=self.tp, target=self.target
            )
            self.tiers[tier] = JaxImplementation(
                str(tier), max(TOKENS), call, self.experts, chained=True
            )
        return self.tiers[tier]

    def _time_peers(self, z: jax.Array, routes: Routes, rng) -> dict[str, float]:
        times = {}
        for peer in list(self.peers):
            if len(z) > peer.max_tokens:
                continue
            try:
                times[peer.name] = 1e6 * self._time(peer, z, routes, rng)[0]
            except Exception as error:  # whatever it is, it should not cost our table
                print(f"peer {peer.name} is dropped: {error}", file=sys.stderr)
                self.peers.remove(peer)
        return times

    def _time(
        self, implementation: Implementation, z: jax.Array, routes: Routes, rng
    ) -> tuple[float, float]:
        """Seconds a call, and the largest error of its outputs."""
        placed = jax.device_put(routes)
        errors = [
            self._error(z, ids, weights, out, rng)
            for (ids, weights), out in zip(routes, implementation.outputs(z, placed), strict=True)
        ]
        error = float(np.max(errors))  # NaN if any is
        if not error <= LIMIT:
            raise WrongOutputError(
                f"{implementation.name} with {len(z)} tokens, tp={self.tp}: relative error "
                f"{error:.1e} is past {LIMIT}; no time is printed"
            )
        return implementation.seconds(z, placed, self.rest) / len(routes), error

    def _error(self, z, ids, weights, out: jax.Array, rng) -> float:
        """Relative L2 error of some tokens against the XLA implementation; NaN if any is NaN."""
        # Always as many, so that what they are compared with is compiled once.
        some = np.resize(rng.permutation(len(ids)), CHECKED_TOKENS)
        rows = jax.device_put((np.asarray(z)[some], ids[some], weights[some]))
        want = np.asarray(_reference(*rows, self.experts), np.float32)
        got = np.asarray(out, np.float32)
        error = np.linalg.norm(got[some] - want) / np.linalg.norm(want)
        return float(error if np.isfinite(got).all() else np.nan)


@jax.jit
def _reference(z, ids, weights, experts):
    return routed_experts(z, ids, weights, experts, config=_CONFIG, tier=ExpertsTier.XLA)


def draw_routes(rng: np.random.Generator, num_tokens: int, routing: str):
    """ids int32 [T, K], weights float32 [T, K]; `zipf` chooses the n-th expert as often as 1/n."""
    E, K = _CONFIG.num_experts, _CONFIG.experts_per_token
    popularity = np.ones(E) if routing == "uniform" else 1 / np.arange(1, E + 1)
    # The K largest of log p + Gumbel noise are K draws without replacement.
    keys = np.log(rng.permutation(popularity)) + rng.gumbel(size=(num_tokens, E))
    ids = np.argpartition(-keys, K, axis=1)[:, :K].astype(np.int32)
    weights = rng.uniform(0.02, 0.12, ids.shape).astype(np.float32)
    return ids, weights
