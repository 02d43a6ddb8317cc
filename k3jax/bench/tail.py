"""Time the latent tail: `k3jax bench tail`.

Sum over ranks, RMSNorm, up-projection and the shared expert's sum, in microseconds a tail.

- real: on 2 or more GPUs, the fused tail, the two tiers of collectives, and the plain order as XLA
  compiles it. What is timed is a program over all of them, so it is the slowest rank that counts.
- solo: one rank on one GPU, its peers' words being there already (`k3jax.bench.solo`), that is
  without NVLink; beside it the arithmetic of the plain order without anything to exchange.

The floor is the rank's rows of the up-projection over the card's measured read bandwidth. Layers
have weights of their own, more than L2 holds, and one waits for the one before. A run goes through
them so often that the devices take longer for it than the host for dispatching it, which is up to a
millisecond for so many arguments; runs follow one another, on outputs in the same memory, so that
XLA replays its CUDA graphs as they are. A time is printed only once the outputs of all layers and
ranks were compared with the plain order in one device's memory.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from k3jax.bench.bandwidth import read_bandwidth
from k3jax.bench.facts import facts_of, write_json
from k3jax.bench.rows import WrongOutputError
from k3jax.bench.solo import SoloMailboxes, SoloRank, solo_chain
from k3jax.bench.timing import REST, add_rest, device_seconds, regime
from k3jax.cli.arguments import integers
from k3jax.config import MoEConfig
from k3jax.ops.tail import fused, reference
from k3jax.ops.tail.api import TailTier, create_workspaces, latent_tail
from k3jax.parallel import SINGLE, Parallel, RankGroup, run_sharded
from k3jax.runtime.ffi import call_program
from k3jax.runtime.program import ArraySpec
from k3jax.runtime.target import Target

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
LAYERS = 24
"""Layers with weights of their own."""
ROUNDS = 2
"""How often a run goes through them, to keep the devices longer than the host."""
FUSED_ROUNDS = 12
"""The same for tails as short as the fused one."""
PLAIN_ROUNDS = 6
"""The same for the plain order with nothing to exchange."""
MODES = ("real", "solo")
LIMIT = 6e-3
"""Largest relative L2 error; some tiers add their partials in bfloat16."""
REAL_TIERS = (
    TailTier.TAIL_FUSION,
    TailTier.ALLREDUCE_OVERLAP,
    TailTier.COLUMN_PARALLEL,
    TailTier.UNFUSED,
)


@dataclass(frozen=True)
class Row:
    """One line of a table; times in microseconds a tail.

    Attributes:
        mode: "real" or "solo".
        tp: ranks.
        num_tokens: T.
        floor: least time that reading a rank's rows of the up-projection takes.
        times: by tier; of the solo mode, "plain" is the plain order with nothing to exchange.
    """

    mode: str
    tp: int
    num_tokens: int
    floor: float
    times: dict[str, float]


_CONFIG = MoEConfig.kimi_k3()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the benchmark takes."""
    parser.add_argument("--tokens", type=integers, default=TOKENS, help="token counts, 1,8,64")
    parser.add_argument("--mode", choices=MODES, help="default: what the devices here can do")
    parser.add_argument("--real", type=int, help="ranks of the real mode, default all GPUs")
    parser.add_argument(
        "--solo", type=integers, default=(8, 16, 4, 2), help="ranks of the solo mode, 8,16,4,2"
    )
    add_rest(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")


def run(args: argparse.Namespace) -> int:
    """Prints a table for each mode and size; status 1 if an output is wrong."""
    target = Target.current()
    bandwidth = read_bandwidth(target)
    print(f"{target.kind}, floors by {bandwidth / 1e12:.2f} TB/s")
    cases: list[tuple[str, int, Callable[..., dict[str, float]]]] = []
    if args.mode == "real" or (args.mode is None and len(jax.devices()) > 1):
        real = Real.over(args.real or _most_ranks(), target, args.rest)
        cases.append(("real", real.parallel.tp, real.times))
    if args.mode == "solo" or (args.mode is None and target.arch):
        cases += [("solo", tp, Solo(tp, target, args.rest).times) for tp in args.solo]

    rows, wrong = [], False
    for mode, tp, times in cases:
        print(f"\n{mode}, TP={tp}, microseconds, {regime(args.rest)}")
        for num_tokens in args.tokens:
            rng = np.random.default_rng([args.seed, num_tokens, tp])
            floor = 1e6 * 2 * _CONFIG.hidden_size * _CONFIG.latent_size / tp / bandwidth
            try:
                row = Row(mode, tp, num_tokens, floor, times(num_tokens, rng))
            except WrongOutputError as error:
                wrong = True
                print(f"{num_tokens:6d}  {error}", file=sys.stderr)
            else:
                rows.append(row)
                if args.json:  # a run that is cut short leaves what it measured
                    write_json(facts_of(rows, bandwidth, args.rest), args.json)
                parts = "  ".join(f"{name} {time:.1f}" for name, time in row.times.items())
                print(f"{num_tokens:6d}  floor {floor:.1f}  {parts}", flush=True)
    return 1 if wrong else 0


def _most_ranks() -> int:
    return max((ranks for ranks in fused.RANKS if ranks <= len(jax.devices())), default=1)


def _random_bfloat16(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0):
    """Made on the device, since a layer's up-projection alone has 26 million numbers."""
    key = jax.random.key(int(rng.integers(1 << 31)))
    return (jax.random.normal(key, shape) * scale).astype(jnp.bfloat16)


def _check(name: str, num_tokens: int, got: np.ndarray, want: np.ndarray) -> None:
    got, want = got.astype(np.float32), want.astype(np.float32)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    if not error <= LIMIT:
        raise WrongOutputError(
            f"{name} with {num_tokens} tokens: relative error {error:.1e} is past {LIMIT}; no time "
            "is printed"
        )


@dataclass
class Real:
    """All ranks on devices of their own.

    Attributes:
        parallel: the ranks.
        target: their kind.
        rest: seconds of idling between samples.
        ups: [H, L] of each layer, replicated; made at first use.
    """

    parallel: Parallel
    target: Target
    rest: float = REST
    ups: list[jax.Array] = dataclasses.field(default_factory=list)

    @classmethod
    def over(cls, ranks: int, target: Target, rest: float = REST) -> "Real":
        """The first `ranks` devices.

        Raises:
            ValueError: there are fewer, or only one is asked for.
        """
        parallel = Parallel.over_devices(ranks)
        if parallel is None:
            raise ValueError("the real mode needs 2 or more GPUs: use --mode solo")
        return cls(parallel, target, rest)

    def times(self, num_tokens: int, rng: np.random.Generator) -> dict[str, float]:
        """Microseconds a tail of every tier that can run.

        Raises:
            WrongOutputError: an output is wrong, or ranks hold different bits.
        """
        tp, H, L = self.parallel.tp, _CONFIG.hidden_size, _CONFIG.latent_size
        whole, split = (self.parallel.sharding(spec) for spec in (P(), P(self.parallel.axis)))
        if not self.ups:
            self.ups = [
                jax.device_put(_random_bfloat16(rng, (H, L), L**-0.5), whole) for _ in range(LAYERS)
            ]
        latent, shared = (_random_bfloat16(rng, (tp, num_tokens, width)) for width in (L, H))
        gain = _random_bfloat16(rng, (L,))
        want = [
            _plain(latent, shared, gain, up) for up in jax.device_put(self.ups, jax.devices()[0])
        ]
        arguments = (
            *jax.device_put((latent, shared), split),
            jax.device_put(gain, whole),
            self.ups,
            jnp.bfloat16(0),
        )
        tiers = list(REAL_TIERS)
        if fused.unsupported(
            ranks=tp, latent_size=L, hidden_size=H, num_tokens=num_tokens, target=self.target
        ):
            tiers.remove(TailTier.TAIL_FUSION)
        else:
            create_workspaces(_CONFIG, self.parallel)
        return {str(tier): self._time(tier, arguments, want) for tier in tiers}

    def _time(self, tier: TailTier, arguments: tuple, want: list) -> float:
        for out, wanted in zip(self._chain(tier, 1)(*arguments), want, strict=True):
            ranks = [np.asarray(shard.data)[0] for shard in out.addressable_shards]
            if any((rank.view(np.uint16) != ranks[0].view(np.uint16)).any() for rank in ranks):
                raise WrongOutputError(f"{tier}: ranks hold different bits; no time is printed")
            _check(str(tier), len(ranks[0]), ranks[0], np.asarray(wanted))
        rounds = FUSED_ROUNDS if tier == TailTier.TAIL_FUSION else ROUNDS
        chain = self._chain(tier, rounds, last=True)
        return 1e6 * device_seconds(lambda: chain(*arguments), rest=self.rest) / (rounds * LAYERS)

    def _chain(self, tier: TailTier, rounds: int, last: bool = False) -> Callable[..., list]:
        """A function that runs all layers `rounds` times, over all ranks.

        It returns every output of each rank, [R, T, H], or the last one alone: returning many
        arrays would cost the host more than a short layer takes.
        """

        def local(group: RankGroup, latent, shared, gain, ups, zero):
            m, s = latent[0], shared[0]
            outputs = _layers(
                functools.partial(self._layer, tier, group, m, s, gain, zero), ups * rounds, s
            )
            return [out[None] for out in (outputs[-1:] if last else outputs)]

        split = P(self.parallel.axis)
        specs = (split, split, P(), P(), P())
        return jax.jit(
            lambda *args: run_sharded(local, self.parallel, specs, split, *args, check_vma=False)
        )

    def _layer(self, tier, group: RankGroup, m, s, gain, zero, up, before) -> jax.Array:
        if tier == TailTier.TAIL_FUSION and self.target.arch:
            return _fused_after(before, m, s, gain, up, group=group, target=self.target)
        return latent_tail(
            *_after(before, m, s, zero),
            gain,
            up,
            eps=_CONFIG.rms_norm_eps,
            group=group,
            tier=tier,
            target=self.target,
        )


def _layers(layer: Callable[..., jax.Array], ups: Sequence[jax.Array], s: jax.Array) -> list:
    """Outputs of `layer(up, before)` for each of `ups`, `before` being the output before."""
    outputs, out = [], jnp.zeros_like(s)
    for up in ups:
        out = layer(up, out)
        outputs.append(out)
    return outputs


def _after(before, m, s, zero) -> tuple[jax.Array, jax.Array]:
    """`m` and `s`, known only once `before` is: a sum that XLA fuses into what reads them.

    Without it XLA would merge the all-reduces of all layers. It cannot know that `zero` is zero.
    """
    return m + zero * before[:, : m.shape[1]], s + zero * before


def _fused_after(before, m, s, gain, up, *, group: RankGroup, target: Target) -> jax.Array:
    """The fused tail with one more operand, which only says what it comes after."""
    program = fused.tail_program(
        ranks=group.size,
        latent_size=m.shape[1],
        hidden_size=s.shape[1],
        num_tokens=m.shape[0],
        eps=_CONFIG.rms_norm_eps,
        up_proj_rows=up.shape[0],
    )
    operands = (*program.operands, ArraySpec(before.shape, np.dtype(before.dtype)))
    program = dataclasses.replace(program, operands=operands)
    call: Any = call_program(program, m, s, gain, up, before, target=target, has_side_effect=True)
    return call[0]


@jax.jit
def _plain(latent, shared, gain, up) -> jax.Array:
    """The tail of all ranks in one device's memory: latent [R, T, L], shared [R, T, H]."""
    m, s = (
        jnp.sum(part.astype(jnp.float32), axis=0).astype(jnp.bfloat16) for part in (latent, shared)
    )
    return reference.tail(m, s, gain, up, _CONFIG.rms_norm_eps)


@dataclass
class Solo:
    """One rank of `tp`.

    Attributes:
        tp: ranks.
        target: the device.
        rest: seconds of idling between samples.
        ups: [H / tp, L] of each layer; made at first use.
        wholes: [H, L] of each layer, for the plain order.
    """

    tp: int
    target: Target
    rest: float = REST
    ups: list[jax.Array] = dataclasses.field(default_factory=list)
    wholes: list[jax.Array] = dataclasses.field(default_factory=list)

    def times(self, num_tokens: int, rng: np.random.Generator) -> dict[str, float]:
        """Microseconds of the fused tail and of the plain order with nothing to exchange.

        Raises:
            WrongOutputError: an output is wrong.
        """
        H, L = _CONFIG.hidden_size, _CONFIG.latent_size
        if not self.ups:
            self.ups = [_random_bfloat16(rng, (H // self.tp, L), L**-0.5) for _ in range(LAYERS)]
            self.wholes = [_random_bfloat16(rng, (H, L), L**-0.5) for _ in range(LAYERS)]
        solo = SoloRank.draw(_CONFIG, self.target, self.tp, num_tokens, rng)
        mailboxes = SoloMailboxes(solo)
        wants = [solo.want(up) for up in self.ups]
        first, arguments = solo_chain(solo, mailboxes, self.ups, rounds=1)
        for out, want in zip(first(*arguments), wants, strict=True):
            got, mine = np.asarray(out), solo.columns
            _check("its columns of tail_fusion", num_tokens, got[:, mine], want[:, mine])
            _check("tail_fusion", num_tokens, got, want)
        once, twice = (self._seconds(solo, mailboxes, arguments, refills) for refills in (1, 2))
        mailboxes.check()
        return {
            "tail_fusion": 1e6 * (once - (twice - once)),
            "plain": self._plain(num_tokens, rng),
        }

    def _seconds(self, solo: SoloRank, mailboxes: SoloMailboxes, arguments, refills: int) -> float:
        """Of a call and the refills in front of it."""
        chain, _ = solo_chain(
            solo, mailboxes, self.ups, rounds=FUSED_ROUNDS, refills=refills, last=True
        )
        return device_seconds(lambda: chain(*arguments), rest=self.rest) / (LAYERS * FUSED_ROUNDS)

    def _plain(self, num_tokens: int, rng: np.random.Generator) -> float:
        H, L = _CONFIG.hidden_size, _CONFIG.latent_size
        m, s = (_random_bfloat16(rng, (num_tokens, width)) for width in (L, H))
        gain = _random_bfloat16(rng, (L,))

        def layer(m, s, gain, zero, up, before):
            options = {"eps": _CONFIG.rms_norm_eps, "group": SINGLE, "tier": TailTier.UNFUSED}
            return latent_tail(*_after(before, m, s, zero), gain, up, **options)

        @jax.jit
        def chain(m, s, gain, ups, zero):
            return _layers(functools.partial(layer, m, s, gain, zero), ups * PLAIN_ROUNDS, s)[-1]

        arguments = (m, s, gain, self.wholes, jnp.bfloat16(0))
        want = _plain(m[None], s[None], gain, self.wholes[-1])
        _check("plain", num_tokens, np.asarray(chain(*arguments)), np.asarray(want))
        seconds = device_seconds(lambda: chain(*arguments), rest=self.rest)
        return 1e6 * seconds / (LAYERS * PLAIN_ROUNDS)
