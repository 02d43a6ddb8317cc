"""The layer as a Flax NNX module: a holder of parameters over `k3jax.layer.moe_layer`."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import MoEConfig
from k3jax.layer import moe_layer
from k3jax.ops.experts.packing import infos_of, packed_infos
from k3jax.parallel import Parallel
from k3jax.params import MoEParams, ParamInfo, as_dict, check_params, init_params, map_infos
from k3jax.plan import LayerPlan


class Mxfp4Variable(nnx.Variable):
    """Bytes of an MXFP4 array. Not an `nnx.Param`: filters for gradients leave it out."""


class KimiK3MoE(nnx.Module):
    """One Kimi K3 MoE layer.

    The state's paths are the checkpoint's names: `gate.weight`, `experts.w1.packed`, ... Each
    variable carries its partition (`nnx.get_partition_spec`) and, with `parallel`, is placed by it
    as it is made; inside `nnx.jit` on an Explicit mesh JAX asks for `jax.set_mesh(mesh)` around.
    `nnx.eval_shape(lambda: KimiK3MoE(...))` allocates nothing.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        rngs: nnx.Rngs,
        parallel: Parallel | None = None,
        logical_axis: str | None = None,
    ) -> None:
        """Draws random parameters.

        Args:
            config: shapes and constants.
            rngs: the stream `params` is drawn from.
            parallel: mesh and axis for tensor parallelism; None for one device.
            logical_axis: name for the split axis in the variables' metadata, for users of logical
                axis rules; it stands for `parallel.axis`, which is the name if None.
        """
        self.config = config
        self.parallel = parallel
        self.packed = False

        def variable(info: ParamInfo, value: jax.Array) -> nnx.Variable:
            kind = Mxfp4Variable if info.dtype == jnp.uint8 else nnx.Param
            return kind(value, **_partition(info, parallel, logical_axis))

        variables = map_infos(variable, config, init_params(config, rngs.params()))
        for name, part in as_dict(variables).items():
            setattr(self, name, _hold(part))

    @classmethod
    def from_params(
        cls,
        config: MoEConfig,
        params: MoEParams,
        parallel: Parallel | None = None,
        logical_axis: str | None = None,
    ) -> Self:
        """A module that holds `params`, for instance loaded ones; shards in place are not copied.

        Experts in kernel order (`prepare_params`) are held as `experts.gate_up` and `experts.down`.

        Args:
            config: shapes and constants that `params` must fit.
            params: the arrays.
            parallel: as in the constructor.
            logical_axis: as in the constructor.

        Raises:
            TypeError: a dtype of `params` does not fit.
            ValueError: the structure or a shape of `params` does not fit.
        """
        experts = infos_of(params.experts, config, parallel)
        check_params(params, config, experts)
        module = nnx.eval_shape(
            lambda: cls(config, rngs=nnx.Rngs(0), parallel=parallel, logical_axis=logical_axis)
        )
        if parallel is not None:
            axis = parallel.axis

            def place(info: ParamInfo, array: jax.Array) -> jax.Array:
                return jax.device_put(array, parallel.sharding(info.spec(axis)))

            params = map_infos(place, config, params, experts=experts)
        if experts is not None:
            module.packed = True
            held = {
                name: Mxfp4Variable(
                    getattr(params.experts, name), **_partition(info, parallel, logical_axis)
                )
                for name, info in as_dict(experts).items()
            }
            setattr(module, "experts", nnx.Dict(held))  # noqa: B010 (set by name in __init__)
        nnx.update(module, as_dict(params))
        return module

    @property
    def params(self) -> MoEParams:
        """The arrays, as `moe_layer` takes them."""
        tp = self.parallel.tp if self.parallel else 1
        return map_infos(
            lambda info: attrgetter(info.name)(self).get_value(),
            self.config,
            experts=packed_infos(self.config, tp) if self.packed else None,
        )

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
        return moe_layer(
            self.params,
            x,
            config=self.config,
            parallel=self.parallel,
            plan=plan,
            router_logits=router_logits,
            routed_input=routed_input,
            token_mask=token_mask,
            output=output,
        )


def _hold(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    return nnx.Dict({name: _hold(child) for name, child in part.items()})


def _partition(
    info: ParamInfo, parallel: Parallel | None, logical_axis: str | None
) -> dict[str, Any]:
    """Metadata that makes Flax place the variable on the mesh, whatever the mesh context."""
    if parallel is None:
        return {} if logical_axis is None else {"out_sharding": info.axes(logical_axis)}
    if logical_axis is None:
        return {"out_sharding": info.axes(parallel.axis), "mesh": parallel.mesh}
    rules = ((logical_axis, parallel.axis),)
    axes = info.axes(logical_axis)
    return {"out_sharding": axes, "mesh": parallel.mesh, "sharding_rules": rules}
