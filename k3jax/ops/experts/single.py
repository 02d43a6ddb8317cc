"""The program of the experts for a single token: one launch, where it fits a multiprocessor."""

import jax
import numpy as np

from k3jax.config import MoEConfig
from k3jax.ops.experts.operands import program_operands
from k3jax.runtime.program import ArraySpec, Kept, KeptSpec, Launch, Operand, Program, Result
from k3jax.runtime.target import Target

STAGES = 3
"""Gate/up tiles of the ring."""
MAX_THREADS = 1024


def single_program(
    config: MoEConfig, tp: int, target: Target, weighted: bool = True
) -> Program | None:
    """The custom call for one token, or None where only the decode kernel can serve it.

    Operands and result are those of `decode_program`.

    Args:
        config: the layer.
        tp: ranks that share each expert.
        target: the device.
        weighted: the sum, or the rows.
    """
    # Kernel modules import the CuTe DSL, which only whoever builds a program needs.
    from k3jax.ops.experts.kernel_single import MAX_SLOTS, SingleTokenKernel
    from k3jax.ops.kernel_ptx import NOT_WRITTEN

    K, L = config.experts_per_token, config.latent_size
    kernel = SingleTokenKernel(
        num_experts=config.num_experts,
        top_k=K,
        latent=L,
        inner=config.expert_intermediate_size // tp,
        num_blocks=target.num_sms,
        stages=STAGES,
        beta=config.situ_beta,
        linear_beta=config.situ_linear_beta,
        weighted=weighted,
    )
    fits = kernel.threads <= MAX_THREADS and kernel.shared_bytes <= target.shared_bytes
    if K > MAX_SLOTS or not fits:
        return None
    z, ids, weights, gate_up, down = map(Operand, range(5))
    hidden, runs = 2 * kernel.hidden_bytes, 4 * kernel.num_blocks
    kept = (Kept(0), Kept(0, hidden))
    return Program(
        "experts_single",
        (Launch(kernel, kernel.grid, (z, ids, weights, gate_up, down, *kept, Result(0))),),
        program_operands(config, 1, tp),
        (ArraySpec((1, L) if weighted else (1, K, L), np.dtype(jax.numpy.bfloat16)),),
        kept=(KeptSpec(hidden + runs, fill=NOT_WRITTEN),),
    )
