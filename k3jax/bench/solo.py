"""One rank of the fused tail whose peers' words are there already, on one GPU.

The rank's mailboxes are an ordinary array that its program reads and writes; its peers are another
one, which takes what it publishes. In front of each call `kernel_refill` puts the peers' words into
the slot that the call will poll, so the call waits for nobody. Calls are ordered by an operand that
no kernel reads: the result of the call before.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import MoEConfig
from k3jax.ops.tail import fused, reference
from k3jax.ops.tail.geometry import MAX_TOKENS, goes_in_two_shots
from k3jax.runtime.ffi import call_program
from k3jax.runtime.program import ArraySpec, Launch, Operand, Program, Workspace
from k3jax.runtime.target import Target
from k3jax.runtime.workspace import ARMED, EPOCH_WORD, FAILED_WORD, TailLayout


@dataclass(frozen=True)
class SoloRank:
    """Rank R / 2 of R, and the inputs of all ranks.

    Attributes:
        config: the layer.
        target: the device.
        latent: bfloat16 [R, T, L], everybody's partials.
        shared: bfloat16 [R, T, H].
        gain: bfloat16 [L].
        others: bfloat16 [T, H], the output; its columns of other ranks are what these send.
    """

    config: MoEConfig
    target: Target
    latent: np.ndarray
    shared: np.ndarray
    gain: np.ndarray
    others: np.ndarray

    @classmethod
    def draw(
        cls, config: MoEConfig, target: Target, ranks: int, num_tokens: int, rng
    ) -> "SoloRank":
        """Random inputs."""

        def normal(*shape):
            return np.asarray(rng.standard_normal(shape), jnp.bfloat16)

        L, H = config.latent_size, config.hidden_size
        rows = normal(ranks, num_tokens, L), normal(ranks, num_tokens, H)
        return cls(config, target, *rows, normal(L), normal(num_tokens, H))

    @property
    def ranks(self) -> int:
        """R."""
        return len(self.latent)

    @property
    def rank(self) -> int:
        """Which one runs."""
        return self.ranks // 2

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.latent.shape[1]

    @property
    def layout(self) -> TailLayout:
        """Of its workspace."""
        return TailLayout(self.ranks, MAX_TOKENS, self.config.latent_size, self.config.hidden_size)

    @property
    def columns(self) -> slice:
        """Of the output that it computes."""
        width = self.layout.columns
        return slice(self.rank * width, (self.rank + 1) * width)

    @functools.cached_property
    def sums(self) -> tuple[jax.Array, jax.Array]:
        """n [T, L] and the shared sum [T, H], of all ranks, as the specification rounds them."""
        m, shared = (
            jnp.sum(jnp.asarray(part, jnp.float32), axis=0).astype(jnp.bfloat16)
            for part in (self.latent, self.shared)
        )
        return reference.rms_norm(m, jnp.asarray(self.gain), self.config.rms_norm_eps), shared

    def want(self, up_proj: jax.Array) -> np.ndarray:
        """The output [T, H] where this rank's rows of the up-projection are `up_proj`."""
        normed, shared = self.sums
        out = _published(self.others)
        out[:, self.columns] = reference.up_project(normed, up_proj) + shared[:, self.columns]
        return out

    def image(self) -> np.ndarray:
        """What the peers send in one call, as `RefillKernel` takes it: uint32 words."""
        ranks, columns = self.ranks, self.layout.columns
        peers = np.arange(ranks) != self.rank
        rows = np.arange(self.num_tokens)
        mine = np.ones(self.num_tokens, bool)
        if goes_in_two_shots(self.num_tokens, ranks):
            mine = rows % ranks == self.rank
        latent = _words(self.latent)
        latent[~peers] = ARMED
        latent[:, ~mine] = ARMED
        shared = _words(self.shared[:, :, self.columns])
        shared[~peers] = ARMED
        normed = _words(np.asarray(self.sums[0]))
        normed[mine] = ARMED
        output = _words(self.others).reshape(self.num_tokens, ranks, columns // 2)
        output[:, self.rank] = ARMED
        return np.concatenate([part.reshape(-1) for part in (latent, shared, normed, output)])

    def tail(self) -> Program:
        """The library's program for this rank, on its own rows of the up-projection."""
        return fused.tail_program(
            ranks=self.ranks,
            latent_size=self.config.latent_size,
            hidden_size=self.config.hidden_size,
            num_tokens=self.num_tokens,
            eps=self.config.rms_norm_eps,
            up_proj_rows=self.layout.columns,
        )

    def refill(self) -> Launch:
        """The launch before each call; operand 0 is the image."""
        from k3jax.bench.kernel_refill import RefillKernel

        facts = (self.ranks, MAX_TOKENS, self.config.latent_size, self.config.hidden_size)
        kernel = RefillKernel(*facts, blocks=self.target.num_sms)
        arguments = (Operand(0), Workspace(self.layout.slot), self.num_tokens)
        return Launch(kernel, (kernel.blocks, 1, 1), arguments)


def with_refill(tail: Program, refill: Launch, times: int = 1) -> Program:
    """The program with as many refills in front; the image is its last operand."""
    image = ArraySpec((_image_words(refill),), np.dtype(np.uint32))
    last = (Operand(len(tail.operands)), *refill.arguments[1:])
    refills = (dataclasses.replace(refill, arguments=last),) * times
    return dataclasses.replace(
        tail, launches=(*refills, *tail.launches), operands=(*tail.operands, image)
    )


def _image_words(refill: Launch) -> int:
    kernel: Any = refill.kernel
    tokens = refill.arguments[2]
    row = (kernel.ranks + 1) * kernel.latent_size + 2 * kernel.hidden_size
    assert isinstance(tokens, int)
    return tokens * row // 2


def on_operands(program: Program, layout: TailLayout) -> Program:
    """The program with two more operands: its workspace, and an array that it only comes after.

    That array has the shape of the first result, so that calls can be ordered by it.
    """
    index = len(program.operands)
    launches = tuple(
        dataclasses.replace(
            launch,
            arguments=tuple(
                Operand(index, value.offset) if isinstance(value, Workspace) else value
                for value in launch.arguments
            ),
        )
        for launch in program.launches
    )
    workspace = ArraySpec((layout.num_bytes // 4,), np.dtype(np.uint32))
    operands = (*program.operands, workspace, program.results[0])
    return dataclasses.replace(program, launches=launches, operands=operands)


class SoloMailboxes:
    """The rank's workspace and the one that stands for its peers, on the current device."""

    def __init__(self, solo: SoloRank):
        """Allocates and arms them.

        Raises:
            RuntimeError: JAX did not fill the array in place.
        """
        words = solo.layout.num_bytes // 4
        self.peers = jnp.zeros(words, jnp.uint32)
        empty = jnp.zeros(words, jnp.uint32)
        address = empty.unsafe_buffer_pointer()
        addresses = [self.peers.unsafe_buffer_pointer()] * solo.ranks
        addresses[solo.rank] = address
        fill = jax.jit(lambda array, words: array.at[:].set(words), donate_argnums=0)
        self.own = fill(empty, solo.layout.armed(solo.rank, addresses))
        if self.own.unsafe_buffer_pointer() != address:
            raise RuntimeError("the workspace moved while it was filled")

    def header(self) -> np.ndarray:
        """Its words, read from the device."""
        return np.asarray(jax.jit(lambda words: words[:64] + 0)(self.own))

    def check(self) -> None:
        """Raises RuntimeError if a call gave up waiting, after which none computes anything."""
        header = self.header()
        if header[FAILED_WORD]:
            raise RuntimeError(
                f"the tail gave up in call {header[FAILED_WORD] - 1} of {header[EPOCH_WORD]}"
            )


def solo_chain(
    solo: SoloRank,
    mailboxes: SoloMailboxes,
    ups: Sequence[jax.Array],
    *,
    rounds: int,
    refills: int = 1,
    last: bool = False,
):
    """A function that goes `rounds` times through a call for each of `ups`, and its arguments.

    Args:
        solo: the rank.
        mailboxes: made for it.
        ups: its rows of the up-projection, in each layer.
        rounds: how often.
        refills: in front of each call; it needs one, and another tells what one costs.
        last: return the last output alone.
    """
    program = on_operands(with_refill(solo.tail(), solo.refill(), refills), solo.layout)
    rank = solo.rank
    rows = [jnp.asarray(a) for a in (solo.latent[rank], solo.shared[rank], solo.gain)]

    @jax.jit
    def chain(rows, ups, image, own):
        out, outputs = jnp.zeros_like(rows[1]), []
        for up in ups * rounds:
            (out,) = call_program(
                program, *rows, up, image, own, out, target=solo.target, has_side_effect=True
            )
            outputs.append(out)
        return outputs[-1:] if last else outputs

    return chain, (rows, list(ups), jnp.asarray(solo.image()), mailboxes.own)


def _published(values: np.ndarray) -> np.ndarray:
    """A copy with +0 for every -0, as values are sent."""
    return np.asarray(values + np.zeros_like(values))


def _words(values: np.ndarray) -> np.ndarray:
    """bfloat16 [.., 2 n] as published words uint32 [.., n]."""
    return np.ascontiguousarray(_published(values)).view(np.uint32)
