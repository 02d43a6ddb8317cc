"""Tensor parallelism: the only module that knows mesh axes and calls collectives.

`run_sharded` enters one `jax.shard_map`; inside it, ops receive a `RankGroup` and never an axis
name, so the same op code serves every number of ranks.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Parallel:
    """Where a layer runs: tensor parallel over one axis of a mesh.

    Attributes:
        mesh: any mesh that has the axis; axis types Auto and Explicit both work.
        axis: the axis that experts and shared expert are split over.
        token_axes: axes that split the tokens (data parallelism); others hold replicas.
    """

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    axis: str = "tp"
    token_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks the axis names."""
        for name in (self.axis, *self.token_axes):
            if name not in self.mesh.axis_names:
                raise ValueError(
                    f"axis {name!r} is not in the mesh, which has {self.mesh.axis_names}; pass "
                    f"Parallel(mesh, axis=...) with one of these"
                )
        if self.axis in self.token_axes:
            raise ValueError(f"axis {self.axis!r} cannot split both weights and tokens")

    @classmethod
    def over_devices(cls, tp: int) -> "Parallel | None":
        """The first `tp` devices of this machine; None, which is one device, for tp=1.

        Without a GPU the CPU stands for as many virtual devices as that takes, if JAX has not
        counted its devices yet.

        Raises:
            ValueError: there are fewer devices.
        """
        with contextlib.suppress(RuntimeError):  # devices exist already: they have to do
            jax.config.update("jax_num_cpu_devices", tp)
        devices = jax.devices()
        if len(devices) < tp:
            raise ValueError(
                f"tp={tp} needs {tp} devices, there are {len(devices)} ({devices[0].platform}); "
                f"use a smaller tp, or JAX_PLATFORMS=cpu in a new process for virtual ones"
            )
        if tp == 1:
            return None
        return cls(jax.make_mesh((tp,), ("tp",), (AxisType.Auto,), devices=devices[:tp]))

    @property
    def tp(self) -> int:
        """Ranks that split the weights."""
        return self.mesh.shape[self.axis]

    @property
    def token_shards(self) -> int:
        """Ranks that split the tokens."""
        shards = 1
        for name in self.token_axes:
            shards *= self.mesh.shape[name]
        return shards

    def device_groups(self) -> list[list[Any]]:
        """The devices of each group of ranks, rank r at index r; none for an abstract mesh."""
        if not isinstance(self.mesh, jax.sharding.Mesh):
            return []
        axis = self.mesh.axis_names.index(self.axis)
        return np.moveaxis(self.mesh.devices, axis, -1).reshape(-1, self.tp).tolist()

    @property
    def one_process(self) -> bool:
        """Whether the devices are known, and those of each group belong to one process."""
        homes = [{device.process_index for device in group} for group in self.device_groups()]
        return bool(homes) and all(len(home) == 1 for home in homes)

    def tokens_spec(self, *rest: str | None) -> P:
        """PartitionSpec of an array whose first axis is tokens."""
        return P(self.token_axes or None, *rest)

    def sharding(self, spec: P) -> NamedSharding:
        """`spec` on this mesh."""
        return NamedSharding(self.mesh, spec)


@dataclass(frozen=True)
class RankGroup:
    """The ranks that share one layer, as ops see them. `SINGLE` is the group of one.

    Every collective adds in the dtype it is given; callers choose the width. `axis` and
    `other_axes` are for this module alone. `devices` are JAX's numbers of the devices of all groups
    of the mesh, rank after rank and group after group; none for an abstract mesh.
    """

    size: int = 1
    axis: str | None = None
    other_axes: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()

    def index(self) -> jax.Array | int:
        """This rank's number, 0..size-1."""
        return 0 if self.axis is None else lax.axis_index(self.axis)

    def number(self) -> jax.Array | int:
        """This group's number among those of the mesh, the same on all its ranks."""
        return lax.axis_index(self.other_axes) if self.other_axes else 0

    def all_reduce(self, x: jax.Array) -> jax.Array:
        """Sum over ranks, the same bits on every rank."""
        return x if self.axis is None else lax.psum(x, self.axis)

    def reduce_scatter(self, x: jax.Array) -> jax.Array:
        """Sum over ranks; each keeps its equal share of the last axis."""
        if self.axis is None:
            return x
        return lax.psum_scatter(x, self.axis, scatter_dimension=x.ndim - 1, tiled=True)


SINGLE = RankGroup()


def run_sharded(
    function: Callable[..., Any],
    parallel: Parallel | None,
    in_specs,
    out_specs,
    *args,
    check_vma: bool = True,
) -> Any:
    """Calls `function(group, *args)` on every rank's shards.

    Without `parallel` it is called once, on the whole arrays, with the group of one. Arguments on
    an Explicit mesh are resharded to `in_specs` first; on an Auto mesh `jax.shard_map` does it.
    `check_vma=False` is for results that all ranks hold alike without JAX being able to see it.
    """
    if parallel is None:
        return function(SINGLE, *args)
    mesh = parallel.mesh
    others = tuple(name for name in mesh.axis_names if name != parallel.axis)
    devices = tuple(device.id for group in parallel.device_groups() for device in group)
    group = RankGroup(parallel.tp, parallel.axis, others, devices)
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        args = jax.tree.map(
            lambda spec, tree: jax.tree.map(lambda leaf: _reshard(leaf, parallel, spec), tree),
            tuple(in_specs),
            args,
            is_leaf=lambda node: isinstance(node, P),
        )
    sharded = jax.shard_map(
        lambda *local: function(group, *local),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=check_vma,
    )
    return sharded(*args)


def _reshard(leaf: jax.Array, parallel: Parallel, spec: P) -> jax.Array:
    return jax.sharding.reshard(leaf, parallel.sharding(spec))


def match_varying(x: jax.Array, *others: jax.Array) -> jax.Array:
    """`x`, marked as varying over every mesh axis that one of `others` varies over.

    The initial value of a loop must carry the marks of what the loop computes.
    """
    missing = frozenset().union(*(_varying(other) for other in others)) - _varying(x)
    return lax.pcast(x, tuple(missing), to="varying") if missing else x


def zeros_varying(shape: tuple[int, ...], dtype, *like: jax.Array) -> jax.Array:
    """Zeros that vary like `like`."""
    return match_varying(jnp.zeros(shape, dtype), *like)


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
