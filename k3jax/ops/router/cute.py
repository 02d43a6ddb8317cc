"""The router as CuTe kernels: what they support, and the programs they form.

Up to `MAX_TOKENS` tokens one program does it all: logits, then the choice, launched so that it
starts while the logits are still being computed. For more tokens the logits are a real matrix
product, which XLA does well, and a kernel makes the choice.
"""

import functools

import jax
import numpy as np

from k3jax.config import MoEConfig
from k3jax.ops.router import reference
from k3jax.runtime.buckets import token_bucket
from k3jax.runtime.ffi import call_program
from k3jax.runtime.program import ArraySpec, Launch, Operand, Program, Result
from k3jax.runtime.target import Target

MAX_TOKENS = 32
"""Most tokens whose logits the kernel computes; at 64 the library's product is as fast on H200."""
MAX_BLOCKS = 128
"""Blocks of the logits kernel: within one wave of every supported device (132 or 148 SMs)."""
MAX_STEPS = 28
"""16-byte loads that a lane of the logits kernel keeps in registers."""
MAX_ROW_TILES = 8
"""Warps of a block of the logits kernel; more leave too few registers for `MAX_STEPS`."""


def choose_refusal(config: MoEConfig) -> str | None:
    """Why the kernel cannot choose experts for this config; None if it can."""
    if config.num_experts > 1024:
        return f"num_experts={config.num_experts}, and the kernel scores at most 1024"
    if config.experts_per_token > 32:
        return f"experts_per_token={config.experts_per_token}, and the kernel picks at most 32"
    return None


def logits_refusal(config: MoEConfig, num_tokens: int) -> str | None:
    """Why the kernel cannot compute the logits of this many tokens; None if it can."""
    if not 1 <= num_tokens <= MAX_TOKENS:
        return f"{num_tokens} tokens, and the kernel takes 1 to {MAX_TOKENS}"
    if _geometry(config.num_experts, config.hidden_size) is None:
        return (
            f"num_experts={config.num_experts} by hidden_size={config.hidden_size} does not split "
            f"into at most {MAX_BLOCKS} blocks of whole 8 x 32 tiles with the weights in registers"
        )
    return None


@functools.cache
def _geometry(num_experts: int, hidden_size: int) -> tuple[int, int] | None:
    """(row_tiles, k_splits) with most blocks, then fewest slices of the hidden size."""
    if num_experts % 8 or hidden_size % 32:
        return None
    tiles, steps = num_experts // 8, hidden_size // 32
    fits = [
        (tiles // rows * splits, -splits, rows)
        for rows in range(1, MAX_ROW_TILES + 1)
        for splits in range(1, steps + 1)
        if tiles % rows == 0
        and steps % splits == 0
        and steps // splits <= MAX_STEPS
        and tiles // rows * splits <= MAX_BLOCKS
    ]
    if not fits:
        return None
    _, minus_splits, rows = max(fits)
    return rows, -minus_splits


def route_program(config: MoEConfig, num_tokens: int) -> Program:
    """x [T, H] bf16, weight [E, H] bf16, bias [E] f32 -> ids [T, K] i32, weights [T, K] f32."""
    from k3jax.ops.router.kernel_logits import LogitsKernel

    geometry = _geometry(config.num_experts, config.hidden_size)
    assert geometry is not None, logits_refusal(config, num_tokens)
    row_tiles, k_splits = geometry
    bucket = token_bucket(num_tokens)
    logits = LogitsKernel(config.num_experts, config.hidden_size, row_tiles, k_splits, bucket)
    partials = Result(2)
    return Program(
        name="k3jax_route",
        launches=(
            Launch(logits, logits.grid, (Operand(0), Operand(1), partials, num_tokens)),
            _select(config, num_tokens, k_splits, partials, Operand(2), overlaps_previous=True),
        ),
        operands=(
            _bfloat16(num_tokens, config.hidden_size),
            _bfloat16(config.num_experts, config.hidden_size),
            _float32(config.num_experts),
        ),
        results=(*_results(config, num_tokens), _float32(k_splits, num_tokens, config.num_experts)),
        num_scratch=1,
    )


def choose_program(config: MoEConfig, num_tokens: int) -> Program:
    """logits [T, E] f32, bias [E] f32 -> ids [T, K] i32, weights [T, K] f32."""
    return Program(
        name="k3jax_choose",
        launches=(_select(config, num_tokens, 1, Operand(0), Operand(1)),),
        operands=(_float32(num_tokens, config.num_experts), _float32(config.num_experts)),
        results=_results(config, num_tokens),
    )


def choose(
    logits: jax.Array, bias: jax.Array, *, config: MoEConfig, target: Target
) -> tuple[jax.Array, jax.Array]:
    """`reference.choose` by a kernel; logits float32 [T, E], bias float32 [E]."""
    ids, weights = call_program(
        choose_program(config, logits.shape[0]), logits, bias, target=target
    )
    return ids, weights


def route(
    x: jax.Array, weight: jax.Array, bias: jax.Array, *, config: MoEConfig, target: Target
) -> tuple[jax.Array, jax.Array]:
    """`reference.logits` and `reference.choose` by kernels, the logits of many tokens by XLA."""
    if logits_refusal(config, x.shape[0]):
        return choose(reference.logits(x, weight), bias, config=config, target=target)
    program = route_program(config, x.shape[0])
    ids, weights = call_program(program, x, weight, bias, target=target)
    return ids, weights


def _select(
    config: MoEConfig,
    num_tokens: int,
    num_partials: int,
    partials: Operand | Result,
    bias: Operand,
    overlaps_previous: bool = False,
) -> Launch:
    from k3jax.ops.router.kernel_select import SelectKernel

    kernel = SelectKernel(
        num_experts=config.num_experts,
        top_k=config.experts_per_token,
        num_partials=num_partials,
        renormalize=config.renormalize,
        scaling_factor=float(config.routed_scaling_factor),
        experts_per_thread=1 if num_tokens <= MAX_TOKENS else 2,
    )
    arguments = (partials, bias, Result(0), Result(1), num_tokens)
    return Launch(kernel, (num_tokens, 1, 1), arguments, overlaps_previous)


def _results(config: MoEConfig, num_tokens: int) -> tuple[ArraySpec, ArraySpec]:
    shape = (num_tokens, config.experts_per_token)
    return ArraySpec(shape, np.dtype(np.int32)), _float32(*shape)


def _float32(*shape: int) -> ArraySpec:
    return ArraySpec(shape, np.dtype(np.float32))


def _bfloat16(*shape: int) -> ArraySpec:
    return ArraySpec(shape, np.dtype(jax.numpy.bfloat16))
