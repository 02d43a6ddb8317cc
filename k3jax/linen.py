"""The layer as a Flax Linen module, over `k3jax.layer.moe_layer`.

Written out rather than made by `flax.nnx.bridge.to_linen`: the bridge builds the NNX module anew in
every `apply`, and with it draws a layer's 16 GB of parameters again unless jit removes that.
"""

from typing import Any

import jax
from flax import linen as nn

from k3jax.config import MoEConfig
from k3jax.layer import moe_layer
from k3jax.ops.experts.packing import PackedExperts, infos_of
from k3jax.parallel import Parallel
from k3jax.params import MoEParams, ParamInfo, as_dict, from_dict, init_part, param_infos
from k3jax.plan import LayerPlan

MXFP4_COLLECTION = "mxfp4"
"""Variables that hold the experts' bytes: not among "params", so that gradients pass them by."""


class KimiK3MoE(nn.Module):
    """One Kimi K3 MoE layer.

    Variables are named as in the checkpoint: `params/gate/weight`, ...,
    `mxfp4/experts/w1/packed`. `init` boxes each with the names of its axes (`nn.get_partition_spec`
    reads them; `nn.logical_to_mesh` where they are logical). Under `nn.scan` pass
    `variable_axes={"params": 0, "mxfp4": 0}`.

    Attributes:
        config: shapes and constants.
        parallel: mesh and axis for tensor parallelism; None for one device.
        logical_axis: name for the split axis in the boxes, for users of logical axis rules; it
            stands for `parallel.axis`, which is the name if None.
    """

    config: MoEConfig
    parallel: Parallel | None = None
    logical_axis: str | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        plan: LayerPlan | None = None,
        router_logits: jax.Array | None = None,
        routed_input: jax.Array | None = None,
        token_mask: jax.Array | None = None,
        output: str = "replicated",
    ) -> jax.Array:
        """`moe_layer` with this module's parameters; the arguments are described there.

        Gradients need `plan=plan_layer(..., experts="reference")`; other tiers refuse.
        """
        parts = vars(param_infos(self.config)).items()
        held = {name: self._held(name, part) for name, part in parts if part is not None}
        experts = None
        if "w1" not in held["experts"]:  # kernel order, under its tag
            ((layout, packed),) = held["experts"].items()
            experts = infos_of(PackedExperts(**packed, layout=layout), self.config, self.parallel)
            held["experts"] = packed
        return moe_layer(
            from_dict(self.config, held, experts),
            x,
            config=self.config,
            parallel=self.parallel,
            plan=plan,
            router_logits=router_logits,
            routed_input=routed_input,
            token_mask=token_mask,
            output=output,
        )

    def _held(self, name: str, infos: Any) -> Any:
        """The part of the parameters called `name`, drawn if this is `init`."""

        def draw(key: jax.Array) -> Any:
            return as_dict(jax.tree.map(self._box, infos, init_part(infos, key)))

        if name != "experts":
            return self.param(name, draw)
        return self.variable(MXFP4_COLLECTION, name, lambda: draw(self.make_rng("params"))).value

    def _box(self, info: ParamInfo, array: jax.Array) -> Any:
        axis = self.logical_axis or (self.parallel and self.parallel.axis)
        return nn.LogicallyPartitioned(array, info.axes(axis)) if axis else array


def variables_of(params: MoEParams) -> dict[str, Any]:
    """The variables of a `KimiK3MoE` that holds `params`, for `apply`.

    Experts in kernel order (`prepare_params`) are under the tag of their order.
    """
    parts = as_dict(params)
    if isinstance(params.experts, PackedExperts):
        parts["experts"] = {params.experts.layout: parts["experts"]}
    return {MXFP4_COLLECTION: {"experts": parts.pop("experts")}, "params": parts}
