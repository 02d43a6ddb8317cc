"""Programs at small shapes, run once on the card and compared with the reference, for checkers.

    JAX_PLATFORMS=cpu compute-sanitizer --tool memcheck --report-api-errors no \\
        python -m tests.gpu.small_runs decode

A second argument is the number of lanes that arrive at a barrier for their warp, 32 for racecheck,
which follows each lane's arrivals apart.

JAX computes the reference on the CPU, so that all a checker sees is our kernels.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import MoEConfig
from k3jax.ops import kernel_ptx
from k3jax.ops.experts import decode, grouped
from k3jax.ops.experts.api import ExpertsTier, routed_experts
from k3jax.ops.experts.check import random_experts
from k3jax.ops.experts.packing import pack_experts
from k3jax.ops.router import cute, reference
from k3jax.runtime.cache import default_directory
from k3jax.runtime.program import Program
from k3jax.runtime.target import Target
from tests.emulator_tests import cute_kernels as small
from tests.gpu import handover
from tests.gpu.driver import Driver
from tests.gpu.on_card import CardProgram, card_target
from tests.support import ONE_OP

CONFIG = dataclasses.replace(MoEConfig.kimi_k3(), num_experts=24, experts_per_token=4)
"""K3's widths; every expert gets units of several sizes."""

type Case = tuple[Program, list[np.ndarray], Callable[..., bool]]


def experts(
    build: Callable[..., Program], token_counts, target: Target, tp: int = 16
) -> Iterator[Case]:
    rng = np.random.default_rng()
    seed = int(rng.integers(1 << 31))
    packed = jax.jit(pack_experts)(random_experts(CONFIG, tp, jax.random.key(seed)))
    plain = jax.jit(functools.partial(routed_experts, config=CONFIG, tier=ExpertsTier.XLA))
    for num_tokens in token_counts:
        z = jnp.asarray(rng.standard_normal((num_tokens, CONFIG.latent_size)), jnp.bfloat16)
        ids = rng.permuted(np.tile(np.arange(24, dtype=np.int32), (num_tokens, 1)), axis=1)[:, :4]
        ids = np.where(rng.random(ids.shape) < 0.1, -1, ids)
        weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
        want = np.asarray(plain(z, ids, weights, packed), np.float64)

        def right(got, want=want):
            error = np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)
            return error < ONE_OP

        operands = [z, ids, weights, packed.gate_up, packed.down]
        yield build(CONFIG, num_tokens, tp, target), [np.asarray(x) for x in operands], right


def router(target: Target) -> Iterator[Case]:
    del target
    rng = np.random.default_rng()
    config = MoEConfig.kimi_k3()
    weight = jnp.asarray(rng.standard_normal((896, config.hidden_size)) / 85, jnp.bfloat16)
    bias = rng.standard_normal(896).astype(np.float32) / 8
    for num_tokens in (1, 9, 32):
        x = jnp.asarray(rng.standard_normal((num_tokens, config.hidden_size)), jnp.bfloat16)
        ids, weights = reference.choose(
            reference.logits(x, weight), bias, 16, config.renormalize, config.routed_scaling_factor
        )

        def right(got_ids, got_weights, ids=ids, weights=weights):
            close = np.allclose(got_weights, weights, rtol=1e-4, atol=0)
            return bool((got_ids == ids).all() and close)

        yield (
            cute.route_program(config, num_tokens),
            [np.asarray(x), np.asarray(weight), bias],
            right,
        )


def example(program: Program) -> Iterator[Case]:
    """A small kernel of the emulator's tests; with a fault in it, any numbers are right."""
    rng = np.random.default_rng()
    operands = [rng.standard_normal(spec.shape).astype(np.float32) for spec in program.operands]
    yield program, operands, lambda *results: True


CASES: dict[str, Callable[[Target], Iterator[Case]]] = {
    "router": router,
    "single": functools.partial(experts, decode.decode_program, (1,), tp=2),
    "decode": functools.partial(experts, decode.decode_program, (2, 9, 65)),
    "grouped": functools.partial(experts, grouped.grouped_program, (70,)),
    "grouped on wide ranks": functools.partial(experts, grouped.grouped_program, (70,), tp=4),
    "handover": lambda target: example(handover.handover_program(32)),
    "handover by one lane": lambda target: example(handover.handover_program(1)),
    "early handover": lambda target: example(handover.handover_program(32, early=True)),
    "ring": lambda target: example(small.ring_program(3, 9, 3)),
    "overrun": lambda target: example(small.scale_program(1024, 3.0, "one too many")),
    "race": lambda target: example(small.sum_program(4, "missing barrier")),
}


def let_arrive(lanes: int) -> None:
    """From now on kernels are built so that as many lanes arrive for their warp."""
    kernel_ptx.ARRIVING_LANES = lanes
    # Where compiled kernels are kept, nothing tells these from others.
    os.environ["K3JAX_CACHE_DIR"] = str(default_directory() / f"arriving-{lanes}")


def main(name: str, lanes: str = "") -> int:
    """Runs a case; status 1 if its numbers are wrong."""
    if lanes:
        let_arrive(int(lanes))
    driver, target = Driver(), card_target()
    for program, operands, right in CASES[name](target):
        card = CardProgram(driver, program, target.arch)
        addresses = [driver.upload(operand) for operand in operands]
        good = True
        for _ in range(2):  # a second run starts from what the first one kept
            card.run(addresses)
            good = good and right(*card.outputs())
        print(f"{program.name}: {'right' if good else 'WRONG'}", flush=True)
        card.free()
        for address in addresses:
            driver.free(address)
        if not good:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
