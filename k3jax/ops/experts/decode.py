"""The routed experts as one custom call of CuTe kernels: what they support, and the program.

One launch, the persistent kernel; past 128 routes another before it, which groups them and prepares
scratch. Or, for a single token, a kernel of its own (`single`).
"""

import jax
import numpy as np

from k3jax.config import MoEConfig
from k3jax.ops.experts.operands import program_operands
from k3jax.ops.experts.packing import CHUNK, GROUP_SIZE, order_refusal
from k3jax.ops.experts.single import single_program
from k3jax.runtime.buckets import token_bucket
from k3jax.runtime.program import ArraySpec, Kept, KeptSpec, Launch, Operand, Program, Result
from k3jax.runtime.target import Target

MAX_TOKENS = 256
"""Most tokens of a program: past it a unit of 8 routes is too small to pay for its weights."""
MAX_ROUTES = 1 << 14
"""Most routes that are grouped in shared memory."""
MAX_SUMMED_TOKENS = 64
"""Most tokens whose rows stay in shared memory for the weighted sum."""
MAX_STAGES = 8
"""Most slots of the ring."""
MIN_STAGES = 2
WINDOW_BYTES = 60 << 10
"""Of copies that a block has on their way at a time (on the H200): more than keep the memory busy
only delay each other, and the loads of tokens and hidden values."""
MAX_BATCH = 8
"""Most chunks of hidden values that a lane's registers hold."""
MAX_WARPS = 30
"""Compute warps of a block: two more make the 1024 threads that a block may have."""


def refusal(config: MoEConfig, num_tokens: int, tp: int, target: Target) -> str | None:
    """Why the kernels cannot run this, or None if they can."""
    inner, latent = config.expert_intermediate_size // tp, config.latent_size
    if reason := order_refusal(config, tp, target):
        return reason
    if num_tokens > MAX_TOKENS:
        return f"{num_tokens} tokens are more than the {MAX_TOKENS} that it serves"
    routes = token_bucket(max(num_tokens, 1)) * config.experts_per_token
    if routes > MAX_ROUTES:
        return f"{routes} routes are more than the {MAX_ROUTES} that it groups"
    if not 2 <= latent // GROUP_SIZE <= MAX_WARPS:
        return f"latent_size={latent} is not from {2 * GROUP_SIZE} to {MAX_WARPS * GROUP_SIZE}"
    if inner > MAX_BATCH * CHUNK and inner % GROUP_SIZE:
        return (
            f"expert_intermediate_size / tp = {inner} is past {MAX_BATCH * CHUNK} and not a "
            f"multiple of {GROUP_SIZE}"
        )
    if inner > latent:
        return f"{inner} neurons a rank are more than latent_size={latent}"
    return None


def decode_program(
    config: MoEConfig, num_tokens: int, tp: int, target: Target, weighted: bool = True
) -> Program:
    """The custom call for `num_tokens` tokens on one rank.

    Operands: z bfloat16 [T, L], ids int32 [T, K], weights float32 [T, K], gate_up and down in
    kernel order. Result: the weighted sum bfloat16 [T, L], or the unweighted rows [T, K, L] with
    zeros where an id is -1.

    Args:
        config: the layer.
        num_tokens: T, at least 1.
        tp: ranks that share each expert.
        target: the device.
        weighted: the sum, or the rows.

    Raises:
        NotImplementedError: what `refusal` says.
    """
    reason = refusal(config, num_tokens, tp, target)
    if reason is not None:
        raise NotImplementedError(f"experts='decode': {reason}; use experts='xla'")
    single = single_program(config, tp, target, weighted) if num_tokens == 1 else None
    return single or _program(config, num_tokens, tp, target, weighted)


def _program(config, num_tokens, tp, target, weighted) -> Program:
    # Kernel modules import the CuTe DSL, which only whoever builds a program needs.
    from k3jax.ops.kernel_ptx import NOT_WRITTEN

    inner = config.expert_intermediate_size // tp
    main = _main_kernel(config, num_tokens, inner, target, weighted)
    bfloat16 = np.dtype(jax.numpy.bfloat16)
    rows = ArraySpec((num_tokens, config.experts_per_token, config.latent_size), bfloat16)
    out = ArraySpec((num_tokens, config.latent_size), bfloat16) if weighted else rows
    results = [out, rows] if weighted and not main.keeps_rows else [out]
    target_rows = Result(len(results) - 1)
    launches, kept = [], []
    if main.groups_itself:
        hidden = units = Kept(0)
        kept.append(KeptSpec(main.kept_bytes(num_tokens), NOT_WRITTEN))
    else:
        hidden, units = Result(len(results)), Result(len(results) + 1)
        launch, scratch = _prepare(config, num_tokens, inner, hidden, units)
        launches.append(launch)
        results += scratch
    z, ids, weights, gate_up, down = map(Operand, range(5))
    places = (z, ids, weights, gate_up, down, hidden, units, target_rows, Result(0))
    launches.append(
        Launch(main, main.grid, (*places, num_tokens), overlaps_previous=bool(launches))
    )
    return Program(
        f"experts_decode_{num_tokens}",
        tuple(launches),
        program_operands(config, num_tokens, tp),
        tuple(results),
        num_scratch=len(results) - 1,
        kept=tuple(kept),
    )


def _prepare(config, num_tokens, inner, hidden, units):
    """The launch that fills `hidden` and `units`, and what these are."""
    from k3jax.ops.experts.kernel_prepare import PrepareKernel
    from k3jax.ops.experts.kernel_units import table_bytes

    E, K = config.num_experts, config.experts_per_token
    routes = num_tokens * K
    kernel = PrepareKernel(E, max_routes=token_bucket(num_tokens) * K)
    values = ArraySpec((routes, inner), np.dtype(jax.numpy.bfloat16))
    table = ArraySpec((table_bytes(E, routes) // 4,), np.dtype(np.int32))
    arguments = (Operand(1), hidden, units, routes, values.num_bytes)
    return Launch(kernel, kernel.grid(values.num_bytes), arguments), [values, table]


def _main_kernel(config, num_tokens, inner, target, weighted):
    """The persistent kernel with as deep a ring as shared memory allows."""
    from dataclasses import replace

    from k3jax.ops.experts.kernel_decode import DecodeKernel

    kernel = DecodeKernel(
        num_experts=config.num_experts,
        latent=config.latent_size,
        inner=inner,
        top_k=config.experts_per_token,
        max_tokens=token_bucket(num_tokens, smallest=1),
        num_blocks=target.num_sms,
        stages=0,
        window=0,
        beta=config.situ_beta,
        linear_beta=config.situ_linear_beta,
        weighted=weighted,
        keeps_rows=weighted and num_tokens <= MAX_SUMMED_TOKENS,
    )
    stages = min((target.shared_bytes - kernel.ring_offset) // kernel.slot_bytes, MAX_STAGES)
    if stages < MIN_STAGES:
        raise NotImplementedError(
            f"experts='decode': a ring of {MIN_STAGES} slots of {kernel.slot_bytes} bytes does not "
            f"fit {target.shared_bytes} bytes of shared memory; use experts='xla'"
        )
    window = max(round(WINDOW_BYTES / kernel.slot_bytes), 2)
    return replace(kernel, stages=stages, window=min(window, stages))
