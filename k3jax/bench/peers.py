"""What else runs the routed experts of one rank, for the benchmark to time beside ours.

A peer is a function of the same arguments over weights of its own. One whose software is not
installed is not in the list. The grouped products of JAX take bfloat16 weights, four times the
bytes of MXFP4, and are given what they need: sorted rows, activation and weighted sum around them.
triton_kernels takes MXFP4; of it, only the two products are timed.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.bench.rows import WrongOutputError
from k3jax.bench.timing import device_seconds
from k3jax.config import MoEConfig
from k3jax.ops.activation import situ_glu
from k3jax.ops.experts.api import ExpertsTier, routed_experts
from k3jax.ops.experts.packing import PackedExperts, unpack_experts
from k3jax.ops.experts.reference import combine
from k3jax.ops.rounding import to_bfloat16

MOSAIC_MODULE = "jax.experimental.pallas.ops.gpu.ragged_dot_mgpu"
MOSAIC_BLOCKS = {"block_m": 64, "block_n": 128, "block_k": 64}
MOSAIC_PIPELINE = {"max_concurrent_steps": 4, "grid_block_n": 1}
CHAIN_LIMIT = 1e-2
"""Kernels give equal bits; XLA may order its sums otherwise in another program."""


type Routes = Sequence[tuple[Any, Any]]
"""(ids int32 [T, K], weights float32 [T, K]) of each call."""


class Implementation(Protocol):
    """One way to run the routed experts.

    Attributes:
        name: heads its column.
        max_tokens: most tokens for which it is timed: where a call takes many milliseconds there
            is nothing left to compare.
    """

    name: str
    max_tokens: int

    def outputs(self, z: jax.Array, routes: Routes) -> list[jax.Array]:
        """The weighted sum of a call on each of `routes`."""
        ...

    def seconds(self, z: jax.Array, routes: Routes, rest: float) -> float:
        """What the device needs for these calls, one after another; see `device_seconds`."""
        ...


@dataclass(frozen=True)
class JaxImplementation(Implementation):
    """A JAX function; see `Implementation`.

    Attributes:
        name: heads its column.
        max_tokens: most tokens.
        call: (z, ids, weights, experts) -> the weighted sum.
        experts: its weights.
        chained: all calls are one program, which returns a number of each output: handling many
            arrays would cost the host more than a short call takes. Without, each is dispatched,
            which costs no time where the device needs longer for it than the host.
    """

    name: str
    max_tokens: int
    call: Callable[..., jax.Array]
    experts: Any
    chained: bool = False

    @functools.cached_property
    def _once(self) -> Callable[..., jax.Array]:
        return jax.jit(self.call)  # traced once, however many calls

    def _calls(self, z: jax.Array, routes: Routes, experts: Any) -> list[jax.Array]:
        return [self._once(z, ids, weights, experts) for ids, weights in routes]

    @functools.cached_property
    def _chain(self) -> Callable[..., jax.Array]:
        return jax.jit(lambda *args: jnp.stack([out[0, 0] for out in self._calls(*args)]))

    def outputs(self, z: jax.Array, routes: Routes) -> list[jax.Array]:
        """See `Implementation`."""
        return self._calls(z, routes, self.experts)

    def seconds(self, z: jax.Array, routes: Routes, rest: float) -> float:
        """See `Implementation`.

        Raises:
            WrongOutputError: calls in one program give other numbers than calls by themselves.
        """
        if not self.chained:
            return device_seconds(lambda: self.outputs(z, routes), rest=rest)
        chain = functools.partial(self._chain, z, routes, self.experts)
        got = np.asarray(chain(), np.float32)
        want = np.asarray([np.asarray(out)[0, 0] for out in self.outputs(z, routes)], np.float32)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        if not error < CHAIN_LIMIT:
            raise WrongOutputError(
                f"{self.name} with {len(z)} tokens: a chain of calls is {error:.1e} from the calls "
                "by themselves; no time is printed"
            )
        return device_seconds(chain, rest=rest)


PEERS = ("xla", "ragged_dot", "triton_kernels", "mosaic")
DEFAULT_PEERS = PEERS[:3]
"""Without the one that unrolls a loop over all experts, which compiles for half a minute a row."""


def peer_names(text: str) -> tuple[str, ...]:
    """Names joined by commas, or "none".

    Raises:
        ValueError: a name is not one of `PEERS`.
    """
    names = () if text == "none" else tuple(text.split(","))
    for name in names:
        if name not in PEERS:
            raise ValueError(f"--peers {name!r} is not one of {','.join(PEERS)}, or none")
    return names


def peers(
    names: Sequence[str], experts: PackedExperts, config: MoEConfig, say: Callable[[str], Any]
) -> Iterator[Implementation]:
    """The peers of these names that can be had; `say` is told about the others."""
    if "xla" in names:
        call = functools.partial(routed_experts, config=config, tier=ExpertsTier.XLA)
        yield JaxImplementation("xla", 32, call, jax.jit(unpack_experts)(experts))
    products: dict[str, tuple[int, Callable]] = {}
    if "ragged_dot" in names:
        products["ragged_dot"] = 128, _ragged_dot
    if "mosaic" in names and (product := _mosaic_product(say)):
        products["mosaic"] = 4096, product
    dense = jax.jit(_dense)(experts) if products else None
    for name, (max_tokens, product) in products.items():
        call = functools.partial(_grouped_experts, product=product, config=config)
        yield JaxImplementation(name, max_tokens, call, dense)
    if "triton_kernels" in names:
        try:
            from k3jax.bench.peer_triton import TritonKernels

            yield TritonKernels(experts, config)
        except ImportError as error:
            say(f"peer triton_kernels is absent: {error}")


def _mosaic_product(say: Callable[[str], Any]) -> Callable | None:
    try:
        ragged_dot = importlib.import_module(MOSAIC_MODULE).ragged_dot
    except ImportError as error:
        say(f"peer mosaic is absent: {error}")
        return None

    def product(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        missing = max(MOSAIC_BLOCKS["block_m"] - rows.shape[0], 0)
        padded = jnp.pad(rows, ((0, missing), (0, 0)))  # it needs a block of rows
        out = ragged_dot(
            padded,
            matrices,
            group_sizes=sizes,
            transpose_rhs=True,
            **MOSAIC_BLOCKS,
            **MOSAIC_PIPELINE,
        )
        return out[: rows.shape[0]]

    return product


def _ragged_dot(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(0,),
    )
    return to_bfloat16(
        lax.ragged_dot_general(
            rows, matrices, sizes, dimensions, preferred_element_type=jnp.float32
        )
    )


def _dense(experts: PackedExperts) -> tuple[jax.Array, jax.Array]:
    """Bfloat16 gate and up [E, 2 I, L], and down [E, L, I]."""

    def one(index):
        w1, w3, w2 = (matrix.dequantize() for matrix in experts.expert(index))
        return jnp.concatenate([w1, w3]), w2

    return lax.map(one, jnp.arange(experts.gate_up.shape[0]))


def _grouped_experts(z, ids, weights, dense, *, product: Callable, config: MoEConfig) -> jax.Array:
    """The experts by two products of sorted rows [T * K, .] with matrices [E, N, .], as groups."""
    gate_up, down = dense
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=config.num_experts).astype(jnp.int32)
    gate, up = jnp.split(product(z[order // ids.shape[1]], gate_up, sizes), 2, axis=1)
    hidden = to_bfloat16(situ_glu(gate, up, config.situ_beta, config.situ_linear_beta))
    sorted_rows = product(hidden, down, sizes)
    rows = jnp.zeros_like(sorted_rows).at[order].set(sorted_rows)
    return combine(rows.reshape(*ids.shape, -1), ids, weights)
