"""The routed experts of many tokens as one custom call of Hopper kernels: support, and the program.

Launches: routes are sorted, tokens permuted meanwhile; gate/up with SiTU; down; the weighted sum.
"""

import dataclasses

import jax
import numpy as np

from k3jax.config import MoEConfig
from k3jax.ops.experts.operands import program_operands
from k3jax.ops.experts.packing import order_refusal
from k3jax.runtime.program import ArraySpec, Launch, Operand, Program, Result
from k3jax.runtime.target import Target

ARCH = "sm_90a"
"""The one architecture with warpgroup matrix instructions."""
FASTER_PAST = 128
"""Tokens past which these kernels beat those for few, where both run."""
CALL_TOKENS = 8192
"""Tokens of one call: more were not checked on a card, and would need gigabytes of scratch."""
NARROW_ROUTES = 40
"""Routes an expert, on average, up to which the narrow shape is the faster one."""
MAX_LATENT = 8192
MAX_OFFSET = 1 << 31
"""Hidden values and tokens are addressed with 31 bits."""
MAX_ROUNDS = 4
"""More quads a warpgroup than this hide nothing more."""
MAX_STAGES = 6
"""More stages than this hide nothing more."""


def refusal(config: MoEConfig, num_tokens: int, tp: int, target: Target) -> str | None:
    """Why the kernels cannot run this, or None if they can."""
    inner, latent = config.expert_intermediate_size // tp, config.latent_size
    if reason := order_refusal(config, tp, target):
        return reason
    if target.arch != ARCH:
        return f"{target.kind} is {target.arch} and has no warpgroup matrix instructions (wgmma)"
    if latent > MAX_LATENT:
        return f"latent_size={latent} is more than the {MAX_LATENT} that it gathers"
    most = (MAX_OFFSET - 1) // (2 * max(latent, config.experts_per_token * inner))
    if num_tokens > most:
        return f"{num_tokens} tokens are more than the {most} that it addresses"
    return None


def grouped_program(
    config: MoEConfig,
    num_tokens: int,
    tp: int,
    target: Target,
    weighted: bool = True,
    widths: tuple[int, ...] | None = None,
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
        widths: numbers of routes that units are computed for, or None for those meant for K3.

    Raises:
        NotImplementedError: what `refusal` says.
    """
    reason = refusal(config, num_tokens, tp, target)
    if reason is not None:
        raise NotImplementedError(f"experts='grouped': {reason}; use experts='xla'")
    return _program(config, num_tokens, tp, target, weighted, widths)


def _program(config, num_tokens, tp, target, weighted, widths) -> Program:
    # Kernel modules import the CuTe DSL, which only whoever builds a program needs.
    from k3jax.ops.experts.kernel_combine import CombineKernel
    from k3jax.ops.experts.kernel_grouped import RECORD_BYTES, header_bytes
    from k3jax.ops.experts.kernel_grouped_prepare import PermuteKernel, SortKernel

    E, K, L = config.num_experts, config.experts_per_token, config.latent_size
    inner = config.expert_intermediate_size // tp
    routes = num_tokens * K
    shape = _shape(routes / E, widths)
    gate_up = _product(config, tp, target, shape, down=False)
    down = _down(config, tp, target, shape) or _product(config, tp, target, shape, down=True)
    sort = SortKernel(E, gate_up.widths, routes)
    permute = PermuteKernel(E, L, K, clears=not weighted)
    max_units = min(routes, E + routes // gate_up.widths[-1])

    bfloat16 = np.dtype(jax.numpy.bfloat16)
    int32 = np.dtype(np.int32)
    rows = ArraySpec((num_tokens, K, L), bfloat16)
    tokens = ArraySpec((num_tokens, L), bfloat16)
    table_bytes = header_bytes(gate_up.widths) + max_units * RECORD_BYTES
    results = (
        tokens if weighted else rows,
        tokens,
        ArraySpec((routes,), int32),
        ArraySpec((table_bytes // 4,), int32),
        ArraySpec((routes, inner), bfloat16),
        *([rows] if weighted else []),
    )
    operands = program_operands(config, num_tokens, tp)
    z, ids, weights, gate_up_bytes, down_bytes = map(Operand, range(5))
    permuted, order, units, hidden = map(Result, range(1, 5))
    target_rows = Result(5 if weighted else 0)
    launches = [
        Launch(sort, sort.grid, (ids, order, units, routes)),
        Launch(
            permute,
            permute.grid(num_tokens),
            (z, ids, permuted, target_rows, num_tokens),
            overlaps_previous=True,
        ),
        Launch(
            gate_up,
            gate_up.grid,
            (permuted, gate_up_bytes, order, units, hidden),
            overlaps_previous=True,
        ),
        Launch(
            down,
            down.grid,
            (hidden, down_bytes, order, units, target_rows),
            overlaps_previous=True,
        ),
    ]
    if weighted:
        combine = CombineKernel(E, L, K)
        arguments = (target_rows, ids, weights, Result(0))
        launches.append(Launch(combine, (num_tokens, 1, 1), arguments, overlaps_previous=True))
    return Program(
        f"experts_grouped_{num_tokens}",
        tuple(launches),
        operands,
        results,
        num_scratch=len(results) - 1,
    )


def _shape(routes_an_expert: float, widths):
    """What suits these routes, computed with other widths if any are given."""
    from k3jax.ops.experts.kernel_grouped import NARROW, WIDE

    shape = NARROW if routes_an_expert <= NARROW_ROUTES else WIDE
    return dataclasses.replace(shape, widths=widths) if widths else shape


def _down(config: MoEConfig, tp: int, target: Target, shape):
    """The second product where K is small enough to be in shared memory at once; or None."""
    from k3jax.ops.experts.kernel_grouped_down import DownKernel

    for rounds in range(MAX_ROUNDS, 1, -1):
        kernel = DownKernel(
            num_tiles=config.latent_size // 16,
            depth=config.expert_intermediate_size // tp,
            num_blocks=target.num_sms,
            shape=shape,
            rounds=rounds,
        )
        if kernel.shared_bytes <= target.shared_bytes:
            return kernel
    return None


def _product(config: MoEConfig, tp: int, target: Target, shape, down: bool):
    """One of the two products, with as deep a ring as shared memory allows."""
    from k3jax.ops.experts.kernel_grouped import GroupedKernel

    inner, latent = config.expert_intermediate_size // tp, config.latent_size
    for stages in range(MAX_STAGES, 1, -1):
        kernel = GroupedKernel(
            down=down,
            num_tiles=latent // 16 if down else inner // 8,
            depth=inner if down else latent,
            top_k=config.experts_per_token,
            num_blocks=target.num_sms,
            shape=shape,
            stages=stages,
            beta=config.situ_beta,
            linear_beta=config.situ_linear_beta,
        )
        if kernel.shared_bytes <= target.shared_bytes:
            return kernel
    raise NotImplementedError(
        f"experts='grouped': its ring does not fit the {target.shared_bytes} bytes of shared "
        f"memory of {target.kind}; use experts='xla'"
    )
