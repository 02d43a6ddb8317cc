"""The header of a safetensors file, read with suspicion and written.

8 bytes   n, little-endian
n bytes   JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}
the rest  data; offsets count from its first byte, and tensors cover it without gap or overlap
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

_LENGTH_BYTES = 8
_METADATA = "__metadata__"

# The format's own limit; it keeps a corrupt length from asking for all the memory there is.
_MAX_HEADER_BYTES = 100_000_000

_DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class TensorType(NamedTuple):
    """The format's dtype code, such as "BF16", and the row-major shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * _DTYPE_BITS[self.dtype] // 8

    def __str__(self) -> str:
        """As in "BF16 [256, 128]"."""
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        name: its key in the header.
        type: its dtype and shape.
        file: where it is.
        offset: of its first byte, from the start of the file.
    """

    name: str
    type: TensorType
    file: Path
    offset: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file; their data is not read.

    Raises:
        ValueError: the header or the file's length is not what the format asks for; the message
            names the file and, where there is one, the tensor.
    """
    file_size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(_LENGTH_BYTES)
        if len(prefix) < _LENGTH_BYTES:
            raise _broken(file, f"it has {file_size} bytes, too few for a safetensors file")
        length = int.from_bytes(prefix, "little")
        if length > _MAX_HEADER_BYTES:
            raise _broken(file, f"its header claims {length} bytes, over {_MAX_HEADER_BYTES}")
        text = stream.read(length)
    if len(text) < length:
        raise _broken(file, f"its header claims {length} bytes but the file ends before that")
    data_start = _LENGTH_BYTES + length
    tensors = [
        _tensor(file, name, entry, data_start)
        for name, entry in _parse(file, text).items()
        if name != _METADATA
    ]
    _check_cover(file, tensors, data_start, file_size)
    return {tensor.name: tensor for tensor in tensors}


def encode_header(tensors: Iterable[tuple[str, TensorType]]) -> bytes:
    """Length and JSON for named tensors whose data follows in this order."""
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    for name, kind in tensors:
        end = offset + kind.num_bytes
        entries[name] = {**kind._asdict(), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # data starts at a multiple of 8
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs):
        entries = dict(pairs)
        if len(entries) < len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise _broken(file, f"its header names {twice} twice")
        return entries

    try:
        entries = json.loads(text, object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise _broken(file, f"its header is not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise _broken(file, "its header is not a JSON object")
    return entries


def _tensor(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    def broken(why: str) -> ValueError:
        return _broken(file, f"tensor {name!r} {why}")

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise broken(f"has the entry {entry!r}; want dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise broken(f"has dtype {dtype!r}; the format has {', '.join(_DTYPE_BITS)}")
    if not _is_sizes(shape):
        raise broken(f"has shape {shape!r}; want a list of whole numbers, 0 or more")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise broken(f"has data_offsets {offsets!r}; want [begin, end]")
    begin, end = offsets
    kind = TensorType(dtype, tuple(shape))
    if end - begin != kind.num_bytes:
        raise broken(
            f"has data_offsets [{begin}, {end}], {end - begin} bytes, but {kind} takes "
            f"{kind.num_bytes}"
        )
    return StoredTensor(name, kind, file, data_start + begin)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(file: Path, tensors: list[StoredTensor], start: int, file_size: int) -> None:
    """Every byte of data belongs to exactly one tensor, and all of them are there."""
    position, before = start, None
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.type.num_bytes)):
        if tensor.offset < position and before:
            raise _broken(file, f"tensors {before.name!r} and {tensor.name!r} overlap")
        if tensor.offset > position:
            raise _broken(
                file,
                f"{tensor.offset - position} bytes before tensor {tensor.name!r} belong to none",
            )
        position, before = tensor.offset + tensor.type.num_bytes, tensor
        if position > file_size:
            raise _broken(
                file,
                f"tensor {tensor.name!r} ends at byte {position}, but the file has only "
                f"{file_size}: it was cut short",
            )
    if position < file_size:
        raise _broken(file, f"{file_size - position} bytes after its last tensor belong to none")


def _broken(file: Path, why: str) -> ValueError:
    return ValueError(f"{file} is not a sound safetensors file: {why}; fetch or write it again")
