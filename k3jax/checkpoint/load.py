"""One layer of a checkpoint onto its devices; each reads its own part and nothing else.

A layer is taken whole or not at all: names, dtypes and shapes, then the values that would poison a
run, are checked before the first byte reaches a device. Peak host memory is one device's part of
the largest array, an expert stack, since parts are read, sent and dropped one by one.
"""

import difflib
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from k3jax.checkpoint.header import StoredTensor
from k3jax.checkpoint.layout import (
    LAYER_NAME,
    LAYER_PREFIX,
    group_experts,
    is_stacked,
    layer_tensors,
    number_runs,
    tensor_names,
)
from k3jax.checkpoint.source import Checkpoint
from k3jax.config import MoEConfig
from k3jax.parallel import Parallel
from k3jax.params import MoEParams, ParamInfo, iter_infos, map_infos

type Part = tuple[slice, ...]
"""A part of an array: a slice with bounds for each axis."""

_NAN_SCALE = 255
_READERS = 8
"""Threads that read the experts of a stack; enough to keep a fast disk or network busy."""


def load_layer(
    source: str | Path | Checkpoint,
    layer: int,
    config: MoEConfig,
    parallel: Parallel | None = None,
    *,
    progress: bool = True,
    allow_nan_scales: bool = False,
) -> MoEParams:
    """Reads one layer of a Kimi K3 checkpoint.

    With several processes, each reads what its own devices hold; none waits for another. Scale
    bytes are read twice, first to look for NaN. Columns of a matrix share disk pages with their
    neighbours: these are not copied, but the file system may still fetch them.

    Args:
        source: folder of safetensors shards, with an index file or without; one shard; or an open
            `Checkpoint`.
        layer: index of the decoder layer.
        config: the layer; `MoEConfig.from_hf(folder)` reads it.
        parallel: mesh and axis that the result is split over; None for the default device.
        progress: whether to draw a bar on stderr, if that is a terminal.
        allow_nan_scales: accept scale byte 255, which makes 32 weights of an expert NaN.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: `layer` has no experts, `parallel` does not fit, a file is broken, tensors are
            missing, unexpected, misnamed, or of the wrong dtype or shape (one message lists all),
            the router's bias is not finite, or a scale byte is NaN.
    """
    _check_request(layer, config, parallel)
    with ExitStack() as stack:
        if not isinstance(source, Checkpoint):
            source = stack.enter_context(Checkpoint(source))
        tensors = _account(source, layer, config)
        pool = stack.enter_context(ThreadPoolExecutor(_READERS))
        reader = _LayerReader(source, layer, tensors, parallel, pool)
        infos = {info.name: info for info in iter_infos(config)}
        _check_bias(reader, infos["gate.e_score_correction_bias"])
        if not allow_nan_scales:
            _check_scales(reader, [infos[f"experts.{w}.scale"] for w in ("w1", "w3", "w2")])
        bar = stack.enter_context(
            tqdm(
                desc=f"layer {layer}",
                total=sum(map(reader.num_bytes, infos.values())),
                unit="B",
                unit_scale=True,
                disable=None if progress else True,
            )
        )
        return map_infos(lambda info: _load_array(reader, info, bar.update), config)


@dataclass(frozen=True)
class _LayerReader:
    """The tensors of one layer, read as parts of the arrays that they make up."""

    checkpoint: Checkpoint
    layer: int
    tensors: dict[str, StoredTensor]
    parallel: Parallel | None
    pool: Executor

    def parts(self, info: ParamInfo) -> dict[Part, list[Any]]:
        """The parts of an array that this process holds, and the devices that hold each.

        Without `parallel` the whole array, and None for the default device.
        """
        if self.parallel is None:
            return {_bounded((slice(None),) * len(info.shape), info.shape): [None]}
        devices = defaultdict(list)
        sharding = self.parallel.sharding(info.spec(self.parallel.axis))
        for device, part in sharding.devices_indices_map(info.shape).items():
            if device in sharding.addressable_devices:
                devices[_bounded(part, info.shape)].append(device)
        return devices

    def num_bytes(self, info: ParamInfo) -> int:
        """Bytes of the parts of an array that this process reads."""
        sizes = (np.prod(_shape(part), dtype=np.int64) for part in self.parts(info))
        return int(sum(sizes)) * np.dtype(info.dtype).itemsize

    def read(
        self, info: ParamInfo, part: Part, report: Callable[[int], object] = lambda count: None
    ) -> np.ndarray:
        """One part on the host; `report` is told the bytes of each tensor as it comes in."""
        host = np.empty(_shape(part), info.dtype)
        names, pieces, index = tensor_names(info), [host], part
        if is_stacked(info):
            names, pieces, index = names[part[0]], list(host), part[1:]

        def read_piece(name: str, piece: np.ndarray) -> int:
            self.checkpoint.read_into(piece, self.tensors[name], index)
            return piece.nbytes

        for count in self.pool.map(read_piece, names, pieces):
            report(count)
        return host


def _load_array(
    reader: _LayerReader, info: ParamInfo, report: Callable[[int], object]
) -> jax.Array:
    def send(host: np.ndarray, devices: list[Any]) -> list[jax.Array]:
        return jax.block_until_ready([jax.device_put(host, device) for device in devices])

    arrays = []
    for part, devices in reader.parts(info).items():
        # No name is kept for the host's copy: it must be gone before the next part is read.
        arrays += send(reader.read(info, part, report), devices)
    if reader.parallel is None:
        return arrays[0]
    sharding = reader.parallel.sharding(info.spec(reader.parallel.axis))
    return jax.make_array_from_single_device_arrays(info.shape, sharding, arrays)


def _bounded(part: Part, shape: tuple[int, ...]) -> Part:
    return tuple(slice(*axis.indices(size)[:2]) for axis, size in zip(part, shape, strict=True))


def _shape(part: Part) -> tuple[int, ...]:
    return tuple(axis.stop - axis.start for axis in part)


def _check_request(layer: int, config: MoEConfig, parallel: Parallel | None) -> None:
    moe_layers = f"the MoE layers are {config.first_moe_layer}-{config.num_layers - 1}"
    if 0 <= layer < config.first_moe_layer:
        raise ValueError(f"layer={layer} is dense (its tensors are mlp.*); {moe_layers}")
    if layer not in config.moe_layers:
        raise ValueError(f"layer={layer} is not in a model of {config.num_layers}; {moe_layers}")
    if parallel is None:
        return
    config.check_tp(parallel.tp)
    if not isinstance(parallel.mesh, jax.sharding.Mesh):
        raise TypeError(f"parallel.mesh is {type(parallel.mesh).__name__}; loading needs devices")
    if not parallel.mesh.local_devices:
        raise ValueError("parallel.mesh has no device of this process; there is nothing to load")


def _account(checkpoint: Checkpoint, layer: int, config: MoEConfig) -> dict[str, StoredTensor]:
    """The layer's tensors, exactly those that the config asks for."""
    prefix = LAYER_PREFIX.format(layer=layer)
    named = {name.removeprefix(prefix) for name in checkpoint.names(prefix)}
    if not named:
        found = {int(match[1]) for match in map(LAYER_NAME.match, checkpoint.names()) if match}
        held = f"holds layers {number_runs(found)}" if found else f"has no tensor {prefix}*"
        raise ValueError(f"layer={layer} is not in {checkpoint.path}, which {held}")
    got, want = checkpoint.tensors(prefix), layer_tensors(config)
    missing = group_experts(want.keys() - got.keys())
    lines = [f"missing: {name}" for name in missing]
    for name in group_experts((got.keys() | named) - want.keys()):
        meant = difflib.get_close_matches(name, missing, n=1, cutoff=0.8)
        lines.append(f"unexpected: {name}" + (f" (misnamed {meant[0]}?)" if meant else ""))
    wrong = defaultdict(list)
    for name in got.keys() & want.keys():
        if got[name].type != want[name]:
            wrong[got[name].type, want[name]].append(name)
    for (stored, wanted), names in wrong.items():
        lines += [f"{stored}, want {wanted}: {name}" for name in group_experts(names)]
    if lines:
        raise ValueError(
            f"layer {layer} of {checkpoint.path} is not what config describes, nothing was loaded; "
            f"check that config is this checkpoint's and that every shard is there\n  "
            + "\n  ".join(lines)
        )
    return got


def _check_bias(reader: _LayerReader, info: ParamInfo) -> None:
    (part,) = reader.parts(info)
    experts = np.flatnonzero(~np.isfinite(reader.read(info, part)))
    if experts.size:
        raise ValueError(
            f"layer {reader.layer} of {reader.checkpoint.path}: {info.name} is not finite for "
            f"experts {number_runs(experts.tolist())}; no token could be routed. Nothing was loaded"
        )


def _check_scales(reader: _LayerReader, infos: list[ParamInfo]) -> None:
    bad = set()
    for info in infos:
        names = tensor_names(info)
        for part in reader.parts(info):
            has_nan = (reader.read(info, part) == _NAN_SCALE).any(axis=(1, 2))
            bad |= {names[part[0]][expert] for expert in np.flatnonzero(has_nan)}
    if bad:
        raise ValueError(
            f"layer {reader.layer} of {reader.checkpoint.path}: scale byte {_NAN_SCALE} (NaN) in "
            f"{', '.join(group_experts(bad))}; nothing was loaded. Pass allow_nan_scales=True if "
            f"these experts may give NaN"
        )
