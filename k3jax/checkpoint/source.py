"""The files of a checkpoint: which tensors they hold, and reading parts of them."""

import json
import mmap
import os
import threading
from pathlib import Path
from typing import Self

import numpy as np

from k3jax.checkpoint.header import StoredTensor, read_header

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
SHARD_SUFFIX = ".safetensors"


class Checkpoint:
    """An open checkpoint; a context manager, because it holds its shards open.

    Only headers are read until `read_into`; a checkpoint with an index reads only the headers of
    the shards asked for. Open one and pass it to every `load_layer` to read a large index once.

    Attributes:
        path: folder, or single file.
        bytes_read: data bytes handed out so far, headers not counted.
    """

    def __init__(self, path: str | Path) -> None:
        """Finds the shards.

        Args:
            path: a folder with shards and perhaps `model.safetensors.index.json`, or one shard.

        Raises:
            FileNotFoundError: nothing is there.
            ValueError: the index, or without one the header of a shard, is broken.
        """
        self.path = Path(path)
        self.bytes_read = 0
        self._descriptors: dict[Path, int] = {}
        self._headers: dict[Path, dict[str, StoredTensor]] = {}
        self._lock = threading.Lock()
        index = self.path / INDEX_NAME
        if index.is_file():
            self._files = _read_index(index)
        else:
            self._files = self._read_shards(_find_shards(self.path))

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *exception) -> None:
        """Closes the shards."""
        self.close()

    def close(self) -> None:
        """Closes the shards; a later read opens them again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def names(self, prefix: str = "") -> set[str]:
        """The names with `prefix` that the index gives, or without one the shards."""
        return {name for name in self._files if name.startswith(prefix)}

    def tensors(self, prefix: str) -> dict[str, StoredTensor]:
        """The tensors whose names start with `prefix`, keyed by the rest of the name.

        Where the index and the shards that it names disagree, what is in the place that the index
        gives counts, and beside it what a shard holds that the index does not name at all.

        Raises:
            FileNotFoundError: the index names a shard that is not there.
            ValueError: the header of a shard is broken.
        """
        files = {file for name, file in self._files.items() if name.startswith(prefix)}
        return {
            name.removeprefix(prefix): tensor
            for file in sorted(files)
            for name, tensor in self._header(file).items()
            if name.startswith(prefix) and self._files.get(name, file) == file
        }

    def read_into(self, out: np.ndarray, tensor: StoredTensor, index: tuple[slice, ...]) -> None:
        """Copies `tensor[index]` into `out`, touching no other bytes of its data.

        Whole rows are one read. Parts of rows come from a memory map of the rows that have them,
        since a call for each row would cost more than the data; the map is gone when this returns.
        Safe to call from several threads.

        Args:
            out: contiguous array with the dtype of the tensor and the shape of the part.
            tensor: of this checkpoint.
            index: one slice with bounds and without step for each axis.
        """
        row = int(np.prod(tensor.type.shape[1:], dtype=np.int64)) * out.itemsize
        rows, *rest = index
        start = tensor.offset + rows.start * row
        descriptor = self._open(tensor.file)
        if all(
            part == slice(0, size) for part, size in zip(rest, tensor.type.shape[1:], strict=True)
        ):
            _read_exactly(descriptor, out, start, tensor)
        elif out.size:
            length = (rows.stop - rows.start) * row
            _copy_columns(descriptor, out, start, length, tensor, tuple(rest))
        with self._lock:
            self.bytes_read += out.nbytes

    def _open(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
            return self._descriptors[file]

    def _header(self, file: Path) -> dict[str, StoredTensor]:
        if file not in self._headers:
            self._headers[file] = read_header(file)
        return self._headers[file]

    def _read_shards(self, shards: list[Path]) -> dict[str, Path]:
        files: dict[str, Path] = {}
        for shard in shards:
            for name in self._header(shard):
                if name in files:
                    raise ValueError(
                        f"tensor {name!r} is in both {files[name]} and {shard}; remove the shard "
                        f"that is not part of this checkpoint"
                    )
                files[name] = shard
        return files


def _find_shards(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    shards = sorted(path.glob(f"*{SHARD_SUFFIX}"))
    if not shards:
        what = f"has neither {INDEX_NAME} nor *{SHARD_SUFFIX}" if path.is_dir() else "is not there"
        raise FileNotFoundError(f"checkpoint {path} {what}; pass its folder or one shard")
    return shards


def _read_index(index: Path) -> dict[str, Path]:
    try:
        content = json.loads(index.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{index} is not JSON ({error}); fetch it again") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        raise ValueError(f"{index} has no 'weight_map' object; fetch it again")
    shards: dict[str, Path] = {}
    for name, shard in files.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise ValueError(f"{index} places {name!r} in {shard!r}; want a file name beside it")
        shards.setdefault(shard, index.parent / shard)
    return {name: shards[shard] for name, shard in files.items()}


def _read_exactly(descriptor: int, out: np.ndarray, start: int, tensor: StoredTensor) -> None:
    buffer = memoryview(out.reshape(-1).view(np.uint8))
    while buffer:
        count = os.preadv(descriptor, [buffer], start)
        if not count:
            raise ValueError(f"{tensor.file} ended inside tensor {tensor.name!r} while being read")
        buffer, start = buffer[count:], start + count


def _copy_columns(
    descriptor: int,
    out: np.ndarray,
    start: int,
    length: int,
    tensor: StoredTensor,
    columns: tuple[slice, ...],
) -> None:
    skip = start % mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(descriptor, skip + length, offset=start - skip, access=mmap.ACCESS_READ) as view:
        view.madvise(mmap.MADV_WILLNEED)  # one request for all pages, not one a fault
        rows = np.frombuffer(view, np.uint8, length, skip).view(out.dtype)
        np.copyto(out, rows.reshape(-1, *tensor.type.shape[1:])[:, *columns])
        del rows  # a map with views of it cannot be closed
