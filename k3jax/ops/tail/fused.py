"""Tier 0: the whole tail in one custom call over peer memory (docs/protocol.md).

The group's workspaces must exist before the program runs (`tail_workspaces`). On CPU devices the
call is the native library's host implementation of the same protocol, which makes those of a group
within one process by itself.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops.tail.geometry import MAX_TOKENS, TailGeometry, goes_in_two_shots, kernel_facts
from k3jax.parallel import RankGroup
from k3jax.runtime import ffi
from k3jax.runtime.mailboxes import ELSEWHERE, TailWorkspaces
from k3jax.runtime.program import ArraySpec, Launch, Operand, Program, Result, Workspace
from k3jax.runtime.target import Target
from k3jax.runtime.workspace import TailLayout

RANKS = (2, 4, 8, 16)

POLL_BUDGET = 1 << 22
"""Polls of a lane on the device before it gives up: some seconds."""

BUDGET_MS = 20_000
"""How long the host implementation waits for another rank."""


def unsupported(
    *, ranks: int, latent_size: int, hidden_size: int, num_tokens: int, target: Target
) -> str | None:
    """Why the fused tail cannot run, from facts that all ranks share; None if it can."""
    if ranks not in RANKS:
        return f"ranks={ranks} is not one of {RANKS}"
    if not 0 < num_tokens <= MAX_TOKENS:
        return f"num_tokens={num_tokens} is not in 1..{MAX_TOKENS}"
    if target.arch is None:
        even = hidden_size % (2 * ranks) == 0 and latent_size % 2 == 0
        return None if even else f"hidden_size={hidden_size} has no even share a rank"
    try:
        geometry = TailGeometry(**kernel_facts(ranks, latent_size, hidden_size, num_tokens))
    except ValueError as error:
        return str(error)
    if geometry.grid[0] > target.num_sms:
        return (
            f"its {geometry.grid[0]} blocks wait for one another and must all be resident, but "
            f"{target.kind} has {target.num_sms} multiprocessors"
        )
    if geometry.shared_bytes > target.shared_bytes:
        return (
            f"a block needs {geometry.shared_bytes} bytes of shared memory, {target.kind} has "
            f"{target.shared_bytes}"
        )
    return None


def tail_workspaces(devices: Sequence[Any], latent_size: int, hidden_size: int) -> TailWorkspaces:
    """The workspaces of a group, rank r on devices[r]; `create` them before they are used."""
    own, on_gpus = jax.process_index(), devices[0].platform == "gpu"
    ordinals = [
        int(device.local_hardware_id) if device.process_index == own else ELSEWHERE
        for device in devices
    ]
    return TailWorkspaces(
        TailLayout(len(devices), MAX_TOKENS, latent_size, hidden_size),
        members=tuple(device.id for device in devices),
        homes=tuple(device.process_index for device in devices),
        devices=tuple(ordinals) if on_gpus else (),
    )


def tail_program(
    *,
    ranks: int,
    latent_size: int,
    hidden_size: int,
    num_tokens: int,
    eps: float,
    up_proj_rows: int,
    experts_per_token: int = 0,
    scattered: bool = False,
) -> Program:
    """The custom call of one tail on one rank.

    Operands: latent bfloat16 [T, L], or rows [T, K, L], weights float32 [T, K], ids int32 [T, K];
    shared [T, H]; gain [L]; up-projection [H, L] or the rank's own rows [H / R, L]. Result [T, H],
    or [T, H / R] if scattered.
    """
    from k3jax.ops.tail.kernel_tail import TailKernel

    kernel = TailKernel(
        **kernel_facts(ranks, latent_size, hidden_size, num_tokens, experts_per_token),
        scattered=scattered,
    )
    bfloat16 = np.dtype(jnp.bfloat16)
    rows = (num_tokens, experts_per_token) if experts_per_token else (num_tokens,)
    operands = [ArraySpec((*rows, latent_size), bfloat16)]
    if experts_per_token:
        operands += [ArraySpec(rows, np.dtype(np.float32)), ArraySpec(rows, np.dtype(np.int32))]
    operands += [
        ArraySpec((num_tokens, hidden_size), bfloat16),
        ArraySpec((latent_size,), bfloat16),
        ArraySpec((up_proj_rows, latent_size), bfloat16),
    ]
    others = [Operand(i) for i in range(len(operands) - 3, len(operands))]
    unfinalised = [Operand(1), Operand(2)] if experts_per_token else [Operand(0)] * 2
    columns = kernel.layout.columns
    arguments = (
        Operand(0),
        *unfinalised,
        *others,
        Result(0),
        Workspace(kernel.layout.slot),
        0,
        num_tokens,
        columns if up_proj_rows == hidden_size else 0,
        POLL_BUDGET,
        float(eps),
    )
    return Program(
        name=f"tail_{num_tokens}",
        launches=(Launch(kernel, kernel.grid, arguments),),
        operands=tuple(operands),
        results=(ArraySpec((num_tokens, kernel.result_width), bfloat16),),
    )


def fused_tail(
    latent: jax.Array,
    shared: jax.Array,
    gain: jax.Array,
    up_proj: jax.Array,
    *,
    eps: float,
    group: RankGroup,
    target: Target,
    number: jax.Array | int = 0,
    weights: jax.Array | None = None,
    ids: jax.Array | None = None,
    scattered: bool = False,
) -> jax.Array:
    """r(r(RMSNorm(sum over ranks of m) W_up^T) + sum over ranks of s), the same bits on all ranks.

    Inside `shard_map`, where `unsupported` has no reason against it.

    Args:
        latent: bfloat16 [T, L], this rank's partial m; or its K expert rows [T, K, L] unweighted,
            with `weights` float32 [T, K] and `ids` int32 [T, K], where -1 drops a row, whatever it
            holds.
        shared: bfloat16 [T, H], this rank's partial s.
        gain: bfloat16 [L].
        up_proj: bfloat16 [H, L], replicated, or this rank's own rows [H / R, L].
        eps: epsilon of the norm.
        group: the ranks.
        target: the device.
        number: tells groups of one process apart; the same on all ranks of a group.
        weights: see `latent`.
        ids: see `latent`.
        scattered: return only this rank's H / R columns.

    Returns:
        bfloat16 [T, H], or [T, H / R] if scattered.
    """
    unfinalised = () if weights is None or ids is None else (weights, ids)
    operands = (latent, *unfinalised, shared, gain, up_proj)

    def on_host(latent: jax.Array, *rest: jax.Array) -> jax.Array:
        *pair, shared, gain, up_proj = rest
        return fused_tail_host(
            latent,
            shared,
            gain,
            up_proj,
            eps=eps,
            group=group,
            number=number,
            weights=pair[0] if pair else None,
            ids=pair[1] if pair else None,
            scattered=scattered,
        )

    if target.arch is None:
        return on_host(*operands)
    program = tail_program(
        ranks=group.size,
        latent_size=latent.shape[-1],
        hidden_size=shared.shape[1],
        num_tokens=latent.shape[0],
        eps=eps,
        up_proj_rows=up_proj.shape[0],
        experts_per_token=0 if weights is None else weights.shape[1],
        scattered=scattered,
    )

    def on_device(*operands: jax.Array) -> jax.Array:
        return ffi.call_program(program, *operands, target=target, has_side_effect=True)[0]

    return ffi.platform_choice(on_device, on_host)(*operands)


def fused_tail_host(
    latent: jax.Array,
    shared: jax.Array,
    gain: jax.Array,
    up_proj: jax.Array,
    *,
    eps: float,
    group: RankGroup,
    number: jax.Array | int = 0,
    weights: jax.Array | None = None,
    ids: jax.Array | None = None,
    scattered: bool = False,
    max_tokens: int = MAX_TOKENS,
    two_shot: bool | None = None,
    budget_ms: int = BUDGET_MS,
) -> jax.Array:
    """The fused tail on CPU devices; see `fused_tail`.

    Args:
        latent: see `fused_tail`, as all that is not listed here.
        max_tokens: tokens that the mailboxes are made for.
        two_shot: overrides `goes_in_two_shots`.
        budget_ms: how long to wait for another rank before the call fails on all of them.
    """
    num_tokens = latent.shape[0]
    if two_shot is None:
        two_shot = goes_in_two_shots(num_tokens, group.size)
    place = jnp.stack([jnp.int32(number), jnp.int32(group.index())])
    unfinalised = () if weights is None or ids is None else (weights, ids)
    width = shared.shape[1] // group.size if scattered else shared.shape[1]
    return ffi.call_host(
        ffi.TAIL_TARGET,
        ArraySpec((num_tokens, width), np.dtype(jnp.bfloat16)),
        *(place, latent, *unfinalised, shared, gain, up_proj),
        ranks=np.int64(group.size),
        max_tokens=np.int64(max_tokens),
        eps=np.float32(eps),
        two_shot=np.bool_(two_shot),
        scattered=np.bool_(scattered),
        budget_ms=np.int64(budget_ms),
        members=np.array(group.devices, np.int64),
    )
