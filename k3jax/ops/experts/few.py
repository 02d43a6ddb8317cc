"""The program of the experts for a few tokens: two launches, where both fit a multiprocessor."""

import jax
import numpy as np

from k3jax.config import MoEConfig
from k3jax.ops.experts.operands import program_operands
from k3jax.runtime.program import ArraySpec, Launch, Operand, Program, Result
from k3jax.runtime.target import Target

RESERVED_BYTES = 1024
"""Shared memory that the system keeps of each block's, beside the block's own limit."""
STAGES = 3
"""Slots of a gate/up ring."""


def few_program(
    config: MoEConfig, num_tokens: int, tp: int, target: Target, weighted: bool = True
) -> Program | None:
    """The custom call, or None where the decode kernel serves better.

    Operands and result are those of `decode_program`.

    Args:
        config: the layer.
        num_tokens: T, at least 1.
        tp: ranks that share each expert.
        target: the device.
        weighted: the sum, or the rows.
    """
    # Kernel modules import the CuTe DSL, which only whoever builds a program needs.
    from k3jax.ops.experts.kernel_few import MAX_TOKENS

    if num_tokens > MAX_TOKENS:
        return None
    kernels = _kernels(config, num_tokens, tp, target, weighted)
    if kernels is None:
        return None
    gate_up, down = kernels
    K, L = config.experts_per_token, config.latent_size
    bfloat16 = np.dtype(jax.numpy.bfloat16)
    out = ArraySpec((num_tokens, L) if weighted else (num_tokens, K, L), bfloat16)
    hidden = ArraySpec((num_tokens * K, gate_up.inner), bfloat16)
    operands = program_operands(config, num_tokens, tp)
    z, ids, weights, gate_up_bytes, down_bytes = map(Operand, range(5))
    first = (z, ids, gate_up_bytes, Result(1), num_tokens)
    second = (ids, weights, down_bytes, Result(1), Result(0), num_tokens)
    return Program(
        f"experts_few_{num_tokens}",
        (
            Launch(gate_up, gate_up.grid, first),
            Launch(down, down.grid, second, overlaps_previous=True),
        ),
        operands,
        (out, hidden),
        num_scratch=1,
    )


def _kernels(config: MoEConfig, num_tokens: int, tp: int, target: Target, weighted: bool):
    """Both kernels, or None if they do not fit a multiprocessor together."""
    from k3jax.ops.experts.kernel_few import DOWN_WARPS, FewDownKernel, FewGateUpKernel

    shape = {
        "num_experts": config.num_experts,
        "top_k": config.experts_per_token,
        "max_tokens": num_tokens,
        "latent": config.latent_size,
        "inner": config.expert_intermediate_size // tp,
    }
    gate_up = FewGateUpKernel(
        **shape,
        num_blocks=target.num_sms,
        stages=STAGES,
        beta=config.situ_beta,
        linear_beta=config.situ_linear_beta,
    )
    down = FewDownKernel(**shape, max_blocks=target.num_sms, warps=DOWN_WARPS, weighted=weighted)
    room = target.shared_bytes - gate_up.shared_bytes - RESERVED_BYTES
    return (gate_up, down) if down.shared_bytes <= room else None
