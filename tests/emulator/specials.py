"""Special registers, parameters' symbols and variables' addresses as arrays."""

import numpy as np

from .types import LANES, RAW

_PER_AXIS = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid",
             "cluster_nctaid")  # fmt: skip
_SIMPLE = {
    "laneid": lambda grid: np.broadcast_to(np.arange(LANES), (grid.num_warps, LANES)),
    "warpid": lambda grid: grid.warp_in_block[:, None],
    "nwarpid": lambda grid: grid.warps_per_block,
    "smid": lambda grid: (grid.block_of % grid.device.num_sms)[:, None],
    "nsmid": lambda grid: grid.device.num_sms,
    "gridid": lambda grid: grid.launch.number,
    "cluster_ctarank": lambda grid: (grid.block_of % grid.cluster_size)[:, None],
    "cluster_nctarank": lambda grid: grid.cluster_size,
    "is_explicit_cluster": lambda grid: int(grid.cluster_size > 1),
    "dynamic_smem_size": lambda grid: grid.launch.shared_bytes,
    "total_smem_size": lambda grid: grid.launch.total_shared,
    "lanemask_eq": lambda grid: _lane_mask(grid, lambda i, j: i == j),
    "lanemask_lt": lambda grid: _lane_mask(grid, lambda i, j: j < i),
    "lanemask_le": lambda grid: _lane_mask(grid, lambda i, j: j <= i),
    "lanemask_gt": lambda grid: _lane_mask(grid, lambda i, j: j > i),
    "lanemask_ge": lambda grid: _lane_mask(grid, lambda i, j: j >= i),
}


def is_special(name: str) -> bool:
    """Whether a name is a special register that is implemented."""
    base, _, axis = name[1:].partition(".")
    per_axis = base in _PER_AXIS and axis in ("x", "y", "z")
    return name.startswith("%") and (per_axis or (not axis and base in _SIMPLE))


def special_values(grid, name: str, bits: int) -> np.ndarray:
    """Value of a special register or variable address for every lane of a grid.

    Returns an array of shape [warps, 32], or narrower where the value is uniform.
    """
    values = np.asarray(_values(grid, name))
    if values.ndim == 0:
        values = values.reshape(1, 1)
    return values.astype(RAW[bits])


def _values(grid, name: str):
    if not name.startswith("%"):
        return grid.launch.variable_address(grid, name)
    base, _, axis = name[1:].partition(".")
    if axis:
        return _index(grid, base, "xyz".index(axis))
    return _SIMPLE[base](grid)


def _index(grid, base: str, axis: int):
    launch = grid.launch
    cluster = launch.cluster[axis]
    if base == "tid":
        linear = grid.warp_in_block[:, None] * LANES + np.arange(LANES)
        return unravel(linear, launch.block)[axis]
    sizes = {
        "ntid": launch.block[axis],
        "nctaid": launch.grid[axis],
        "nclusterid": launch.grid[axis] // cluster,
        "cluster_nctaid": cluster,
    }
    if base in sizes:
        return sizes[base]
    block = grid.block_coordinates[axis][:, None]
    return {"ctaid": block, "clusterid": block // cluster, "cluster_ctaid": block % cluster}[base]


def unravel(linear, extents):
    x, y, _ = extents
    return linear % x, linear // x % y, linear // (x * y)


def _lane_mask(grid, relation):
    lanes = np.arange(LANES)
    bits = relation(lanes[:, None], lanes[None]).astype(np.uint64) << lanes.astype(np.uint64)
    return np.broadcast_to(bits.sum(axis=1), (grid.num_warps, LANES))
