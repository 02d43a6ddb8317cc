"""Byte stores with shadow state: global memory, and the shared memory of all blocks of a launch.

Every byte has a shadow byte that says what may be done with it. A load or store of a whole group of
warps is one gather or scatter, and its check is one gather of the shadow. Only when a check fails
is the culprit looked for.
"""

from dataclasses import dataclass

import numpy as np

from .errors import (
    InFlightError,
    MisalignedError,
    OutOfBoundsError,
    ReadOnlyError,
)

READ, WRITE, ALLOCATED, FLIGHT = 1, 2, 4, 8
"""Shadow bits: may be read (initialised), may be written, exists, an async copy uses it."""
ORDINARY = READ | WRITE | ALLOCATED
DUMMY = 256
"""Bytes at offset 0 of every store that inactive lanes address."""


class ByteStore:
    """Bytes plus shadow, addressed by byte offset."""

    name = "memory"

    def __init__(self, num_bytes: int):
        num_bytes = -(-num_bytes // 64) * 64
        self.data = np.zeros(num_bytes, np.uint8)
        self.shadow = np.zeros(num_bytes, np.uint8)
        self.shadow[:DUMMY] = READ
        self._views: dict[tuple[int, int], tuple] = {}

    def views(self, unit: int, count: int):
        """Data and shadow as arrays of accesses of `count` units, and the shadow's READ mask."""
        key = (unit, count)
        if key not in self._views:
            total = unit * count
            dtype, word = np.dtype(f"u{unit}"), min(total, 8)
            data, shadow = self.data.view(dtype), self.shadow.view(f"u{word}")
            if count > 1:
                data = data.reshape(-1, count)
            if total > 8:
                shadow = shadow.reshape(-1, total // 8)
            ones = int.from_bytes(b"\1" * word, "little")
            self._views[key] = (data, shadow, ones, total.bit_length() - 1)
        return self._views[key]

    def load(self, offset, unit: int, count: int, mask, access):
        """Reads `count` units of `unit` bytes per lane.

        Args:
            offset: uint64 byte offsets, [warps, 32].
            unit, count: size of an element and elements per lane (powers of two).
            mask: active lanes, or None for all.
            access: who does it, for messages (`Access`).
        """
        data, shadow, ones, shift = self.views(unit, count)
        if mask is not None:
            offset = np.where(mask, offset, np.uint64(0))
        index = _index(offset, shift)
        try:
            state = int(np.bitwise_and.reduce(shadow.take(index, axis=0), axis=None))
            values = data.take(index, axis=0)
        except IndexError:
            state = 0
        if state & ones != ones or (shift == 0 and index.min() < 0):
            self.explain(offset, unit * count, mask, READ, access)
            access.undefined(self._undefined(offset, unit, count, mask))
        return values

    def _undefined(self, offset, unit: int, count: int, mask) -> np.ndarray:
        """Which elements of an allowed load nothing wrote, [warps, 32, count]."""
        at = offset.astype(np.int64)[..., None] + np.arange(unit * count)
        missing = (self.shadow[at] & READ) == 0
        return missing.reshape(*offset.shape, count, unit).any(axis=-1) & (
            True if mask is None else mask[..., None]
        )

    def forget(self, offset, unit: int, flags) -> None:
        """Makes stored elements undefined again: what was stored was undefined."""
        rows, lanes, items = np.nonzero(flags)
        at = offset[rows, lanes].astype(np.int64) + items * unit
        self.shadow[at[:, None] + np.arange(unit)] &= ~np.uint8(READ)

    def store(self, offset, values, unit: int, count: int, mask, access) -> None:
        """Writes per-lane values: [warps, 32] or, for count > 1, [warps, 32, count]."""
        data, shadow, ones, shift = self.views(unit, count)
        if mask is not None:
            offset, values = offset[mask], values[mask]
        index = _index(offset, shift)
        try:
            state = int(np.bitwise_and.reduce(shadow.take(index, axis=0), axis=None))
        except IndexError:
            state = 0
        if state & (ones * WRITE) != ones * WRITE or (shift == 0 and index.min() < 0):
            self.explain(offset, unit * count, None, WRITE, access, mask)
        data[index] = values
        shadow[index] = ones * ORDINARY
        if (data.take(index, axis=0) != values).any():
            access.conflict(offset)

    def claim(self, offset, size: int, access) -> None:
        """Gives the bytes at flat offsets to a copy in flight: no access until it is done."""
        _, shadow, ones, shift = self.views(min(size, 8), max(size // 8, 1))
        index = _index(offset, shift)
        try:
            state = int(np.bitwise_and.reduce(shadow.take(index, axis=0), axis=None))
        except IndexError:
            state = 0
        if state & (ones * WRITE) != ones * WRITE:
            self.explain(offset, size, None, WRITE, access, access.group.active(access.mask))
        shadow[index] = ones * (ALLOCATED | FLIGHT)

    def explain(self, offset, size: int, mask, wanted: int, access, compressed=None) -> None:
        """Raises the error of the first lane whose access is not allowed.

        Returns if the only fault is that nothing wrote some bytes that are read.
        """
        flat = offset.ravel()
        for i in range(flat.size):
            if mask is not None and not mask.ravel()[i]:
                continue
            at = int(flat[i].view(np.int64))
            where = access.lane(i, compressed)
            state = self.shadow[at : at + size] if at >= 0 else self.shadow[:0]
            what = f"{'read' if wanted == READ else 'write'} of {size} bytes at {self.spell(at)}"
            what = f"{what} by {where}"
            if at < DUMMY or state.size < size or not (state & ALLOCATED).all():
                raise OutOfBoundsError(f"{what}: out of bounds", access.instruction)
            if at % size:
                raise MisalignedError(f"{what}: not a multiple of {size}", access.instruction)
            if (state & FLIGHT).any():
                raise InFlightError(
                    f"{what}: an asynchronous copy that nothing waited for still uses these bytes",
                    access.instruction,
                )
            if wanted == WRITE and not (state & WRITE).all():
                raise ReadOnlyError(f"{what}: the program may only read it", access.instruction)
        if wanted == WRITE:
            raise AssertionError("a failed check must have a culprit")

    def spell(self, offset: int) -> str:
        """An offset as a person would name it."""
        return f"{self.name}+{offset}"


def _index(offset: np.ndarray, shift: int) -> np.ndarray:
    """Element numbers; rotating turns a misaligned offset into an index out of range."""
    if shift == 0:
        return offset.view(np.int64)
    return ((offset >> np.uint64(shift)) | (offset << np.uint64(64 - shift))).view(np.int64)


@dataclass
class Allocation:
    name: str
    offset: int
    num_bytes: int
    writable: bool


class GlobalMemory(ByteStore):
    """Device memory: named arrays with unreadable gaps between them."""

    BASE = 0x7F00_0000_0000
    GAP = 256

    def __init__(self):
        super().__init__(DUMMY)
        self.allocations: list[Allocation] = []

    def allocate(self, name: str, contents: np.ndarray | int, writable: bool = True) -> int:
        """Adds an array and returns its device address.

        Args:
            name: for messages.
            contents: initial contents, or a number of bytes that start undefined.
            writable: whether kernels may write it.
        """
        undefined = isinstance(contents, int)
        num_bytes = contents if undefined else contents.nbytes
        start = self.data.size + self.GAP
        end = -(-(start + num_bytes + self.GAP) // 256) * 256
        start = -(-start // 256) * 256
        self.data = np.concatenate([self.data, np.full(end - self.data.size, 0xA5, np.uint8)])
        self.shadow = np.concatenate([self.shadow, np.zeros(end - self.shadow.size, np.uint8)])
        self._views.clear()
        where = slice(start, start + num_bytes)
        if not undefined:
            self.data[where] = np.frombuffer(np.ascontiguousarray(contents).tobytes(), np.uint8)
        readable = 0 if undefined else READ
        self.shadow[where] = ALLOCATED | readable | (WRITE if writable else 0)
        self.allocations.append(Allocation(name, start, num_bytes, writable))
        return self.BASE + start

    def write(self, address: int, contents: np.ndarray) -> None:
        """Overwrites bytes of an array from the host."""
        data = np.frombuffer(np.ascontiguousarray(contents).tobytes(), np.uint8)
        start = address - self.BASE
        if not (self.shadow[start : start + data.size] & ALLOCATED).all():
            raise ValueError(f"{data.size} bytes at {self.spell(start)} are not all in one array")
        self.data[start : start + data.size] = data
        self.shadow[start : start + data.size] |= READ

    def contents(self, address: int, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Bytes at a device address and which of them were ever written."""
        start = address - self.BASE
        state = self.shadow[start : start + num_bytes]
        return self.data[start : start + num_bytes].copy(), (state & READ) != 0

    def spell(self, offset: int) -> str:
        for a in self.allocations:
            if a.offset - self.GAP <= offset < a.offset + a.num_bytes + self.GAP:
                return f"{a.name}[byte {offset - a.offset} of {a.num_bytes}]"
        return f"address {(offset + self.BASE) % (1 << 64):#x}"


class SharedMemory(ByteStore):
    """Shared memory of every block of a launch.

    A shared address is `rank_in_cluster << 24 | offset`, so that an address obtained by `mapa`
    and one of the block's own have the same form. Offsets start at `RESERVED`, as on the card.
    """

    RESERVED = 1024
    RANK_SHIFT = 24
    name = "shared"

    def __init__(self, num_blocks: int, num_bytes: int, cluster: int):
        self.num_bytes = num_bytes
        self.cluster = cluster
        self.stride = -(-(self.RESERVED + num_bytes + 64) // 256) * 256
        super().__init__(DUMMY + num_blocks * self.stride)
        rows = self.shadow[DUMMY:][: num_blocks * self.stride].reshape(num_blocks, self.stride)
        rows[:, self.RESERVED : self.RESERVED + num_bytes] = ALLOCATED | WRITE

    def offsets(self, address: np.ndarray, first_block: np.ndarray) -> np.ndarray:
        """Store offsets of shared addresses; `first_block` is block 0 of each warp's cluster."""
        address = address.astype(np.uint64)
        within = address & np.uint64((1 << self.RANK_SHIFT) - 1)
        rank = address >> np.uint64(self.RANK_SHIFT)
        outside = (within >= np.uint64(self.stride)) | (rank >= np.uint64(self.cluster))
        block = rank + first_block
        offset = within + block * np.uint64(self.stride) + np.uint64(DUMMY)
        return np.where(outside, np.uint64((1 << 63) - 1), offset) if outside.any() else offset

    def block(self, offset):
        """Blocks that offsets belong to."""
        return (offset - DUMMY) // self.stride

    def spell(self, offset: int) -> str:
        block, within = divmod(offset - DUMMY, self.stride)
        if offset == (1 << 63) - 1:
            return "a shared address outside the cluster's blocks"
        return f"shared memory of block {block}, address {within:#x}"


class LocalMemory(ByteStore):
    """Local memory (the stack) of every thread of a launch; addresses start at `START`."""

    START = 64
    name = "local"

    def __init__(self, num_warps: int, num_bytes: int):
        self.stride = -(-(self.START + num_bytes) // 64) * 64
        super().__init__(DUMMY + num_warps * 32 * self.stride)
        rows = self.shadow[DUMMY:][: num_warps * 32 * self.stride].reshape(-1, self.stride)
        rows[:, self.START : self.START + num_bytes] = ALLOCATED | WRITE

    def offsets(self, address: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Store offsets of local addresses of some warps' lanes."""
        address = address.astype(np.uint64)
        thread = numbers.astype(np.uint64)[:, None] * np.uint64(32) + np.arange(32, dtype=np.uint64)
        offset = thread * np.uint64(self.stride) + np.uint64(DUMMY) + address
        outside = address >= np.uint64(self.stride)
        return np.where(outside, np.uint64((1 << 63) - 1), offset) if outside.any() else offset

    def spell(self, offset: int) -> str:
        thread, within = divmod(offset - DUMMY, self.stride)
        if offset == (1 << 63) - 1:
            return "a local address outside the thread's stack"
        return f"local memory of thread {thread}, address {within}"
