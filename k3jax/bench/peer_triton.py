"""triton_kernels of Triton 3.6 as a peer: grouped products on MXFP4 weights in its Hopper layout.

PyTorch runs them, on arrays that it shares with JAX. Sorting, activation and weighted sum are done
outside of what is timed, which leaves the two products: a comparison that favours it.
"""

import dataclasses
import importlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.bench.timing import device_seconds
from k3jax.config import MoEConfig
from k3jax.ops.experts.packing import PackedExperts, unpack_experts
from k3jax.quant.mxfp4 import Mxfp4Array

_WARPS = 8
"""What its scale layout is made for."""


@dataclass(frozen=True)
class _Call:
    """Operands of one call: rows sorted by expert before each product, and how to undo that."""

    rows: Any
    routing: Any
    inverse: Any
    weights: Any
    hidden: Any = None


class TritonKernels:
    """See `k3jax.bench.peers.Implementation`."""

    name = "triton_kernels"
    max_tokens = 4096

    def __init__(self, experts: PackedExperts, config: MoEConfig):
        """Converts the weights.

        Raises:
            ImportError: PyTorch or triton_kernels is not installed, or another version of it.
        """
        self.torch: Any = importlib.import_module("torch")
        self.ogs: Any = importlib.import_module("triton_kernels.matmul_ogs")
        self.tensor: Any = importlib.import_module("triton_kernels.tensor")
        self.layout: Any = importlib.import_module("triton_kernels.tensor_details.layout")
        self.config = config
        params = jax.jit(unpack_experts)(experts)
        gate_up = jax.tree.map(lambda *pair: jnp.concatenate(pair, axis=1), params.w1, params.w3)
        self.gate_up, self.down = self._weights(gate_up), self._weights(params.w2)

    def _weights(self, matrices: Mxfp4Array) -> tuple[Any, Any]:
        """[E, N, K] in its layouts: values, and a precision config that holds the scales."""
        jax.block_until_ready(matrices)
        packed, scale = (
            self.torch.from_dlpack(part).transpose(1, 2)
            for part in (matrices.packed, matrices.scale)
        )
        value_layout, value_options = self.layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        scale_layout, scale_options = self.layout.make_default_matmul_mxfp4_w_scale_layout(
            mx_axis=1, num_warps=_WARPS
        )
        wrap, convert = self.tensor.wrap_torch_tensor, self.tensor.convert_layout
        values = convert(wrap(packed, dtype=self.tensor.FP4), value_layout, **value_options)
        scales = convert(wrap(scale), scale_layout, **scale_options)
        return values, self.ogs.PrecisionConfig(weight_scale=scales, out_dtype=self.torch.bfloat16)

    def _prepare(self, z: jax.Array, ids: jax.Array, weights: jax.Array) -> _Call:
        torch = self.torch
        E, K = self.config.num_experts, self.config.experts_per_token
        flat = torch.from_dlpack(ids).reshape(-1)
        order = torch.argsort(flat, stable=True)
        sizes = torch.bincount(flat, minlength=E).int()
        metadata = self.tensor.make_ragged_tensor_metadata(sizes, len(flat))
        rows = torch.from_dlpack(z)[order // K].contiguous()
        routing = self.ogs.RoutingData(None, sizes, E, 1, metadata)
        return _Call(rows, routing, torch.argsort(order), torch.from_dlpack(weights))

    def _first(self, call: _Call) -> Any:
        values, precision = self.gate_up
        return self.ogs.matmul_ogs(
            call.rows, values, None, call.routing, precision_config=precision
        )

    def _second(self, call: _Call) -> Any:
        values, precision = self.down
        return self.ogs.matmul_ogs(
            call.hidden, values, None, call.routing, precision_config=precision
        )

    def _activated(self, call: _Call) -> _Call:
        """The call with its first product done and activated."""
        torch, config = self.torch, self.config
        gate, up = self._first(call).float().chunk(2, dim=-1)
        if config.situ_linear_beta is not None:
            up = config.situ_linear_beta * torch.tanh(up / config.situ_linear_beta)
        hidden = config.situ_beta * torch.tanh(gate / config.situ_beta) * torch.sigmoid(gate) * up
        return dataclasses.replace(call, hidden=hidden.bfloat16())

    def _sum(self, call: _Call, rows: Any) -> Any:
        rows = rows[call.inverse].float().reshape(*call.weights.shape, -1)
        return (rows * call.weights[:, :, None]).sum(1).bfloat16()

    def _calls(self, z, routes) -> list[_Call]:
        jax.block_until_ready((z, routes))
        return [self._activated(self._prepare(z, ids, weights)) for ids, weights in routes]

    def outputs(self, z: jax.Array, routes) -> list[jax.Array]:
        """See `Implementation`."""
        outputs = [self._sum(call, self._second(call)) for call in self._calls(z, routes)]
        self.torch.cuda.synchronize()
        return [jax.dlpack.from_dlpack(out) for out in outputs]

    def seconds(self, z: jax.Array, routes, rest: float) -> float:
        """See `Implementation`; the calls are captured into one CUDA graph."""
        torch, calls = self.torch, self._calls(z, routes)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [(self._first(call), self._second(call)) for call in calls]
        seconds = device_seconds(graph.replay, lambda _: torch.cuda.synchronize(), rest)
        del kept  # the graph writes them
        return seconds
