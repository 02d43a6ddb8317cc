"""The native library: where it is, and what the driver behind it says about this machine.

`libk3jax_ffi.so` is built from `ffi/` by `pip install .`. It needs no CUDA to build or to load; the
queries below open the driver and raise where there is none.
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import k3jax.runtime

LIBRARY_NAME = "libk3jax_ffi.so"

BUILD_REMEDY = (
    "build it with `pip install .`, or into a source tree with `cmake -S ffi -B build/ffi && "
    "cmake --build build/ffi && cmake --install build/ffi --prefix .`"
)


class _FactsStruct(ctypes.Structure):
    """Mirrors `k3jax_device_facts` in ffi/topology.cc."""

    _fields_ = (
        ("name", ctypes.c_char * 128),
        ("capability_major", ctypes.c_int32),
        ("capability_minor", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("l2_bytes", ctypes.c_int32),
        ("shared_bytes_opt_in", ctypes.c_int32),
        ("multicast_supported", ctypes.c_int32),
    )


@dataclass(frozen=True)
class DeviceFacts:
    """What the driver says about one device.

    Attributes:
        name: for example "NVIDIA H200".
        capability: compute capability, (major, minor).
        num_sms: streaming multiprocessors.
        l2_bytes: bytes of level-2 cache.
        shared_bytes: most dynamic shared memory a block can opt in to.
        multicast_supported: whether NVLink multicast exists; k3jax reports it and never uses it.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    l2_bytes: int
    shared_bytes: int
    multicast_supported: bool


def library_path() -> Path:
    """The built library.

    Raises:
        FileNotFoundError: it was not built.
    """
    # An editable install keeps sources and built files in two folders of the same package.
    folders = [Path(folder) for folder in k3jax.runtime.__path__]
    for folder in folders:
        if (folder / LIBRARY_NAME).is_file():
            return folder / LIBRARY_NAME
    raise FileNotFoundError(
        f"{LIBRARY_NAME} is not in {[str(folder) for folder in folders]}: {BUILD_REMEDY}"
    )


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library, loaded once a process, with the C signatures set."""
    library = ctypes.CDLL(str(library_path()))
    int32_pointer = ctypes.POINTER(ctypes.c_int32)
    signatures = {
        "k3jax_driver_version": (int32_pointer,),
        "k3jax_device_count": (int32_pointer,),
        "k3jax_device_query": (ctypes.c_int32, ctypes.POINTER(_FactsStruct)),
        "k3jax_peer_access": (ctypes.c_int32, int32_pointer),
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_char_p
    return library


def symbol(name: str) -> Any:
    """A function of the library, by its C name.

    Raises:
        FileNotFoundError: the library was not built.
        RuntimeError: it was built from sources that did not have the function.
    """
    try:
        return getattr(load_library(), name)
    except AttributeError as error:
        raise RuntimeError(
            f"{library_path()} has no {name}, so it was built from older sources: {BUILD_REMEDY}"
        ) from error


def type_pointer(name: str) -> int:
    """What a function of the library without arguments that returns a pointer returns."""
    function = symbol(name)
    function.restype = ctypes.c_void_p
    return function()


def _query(name: str, *arguments: object) -> None:
    message = symbol(name)(*arguments)
    if message is not None:
        raise RuntimeError(message.decode())


def driver_version() -> tuple[int, int]:
    """The newest CUDA version that the driver serves, (major, minor)."""
    version = ctypes.c_int32()
    _query("k3jax_driver_version", ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def device_count() -> int:
    """Devices that this process sees."""
    count = ctypes.c_int32()
    _query("k3jax_device_count", ctypes.byref(count))
    return count.value


def device_facts(ordinal: int = 0) -> DeviceFacts:
    """What the driver says about one device."""
    facts = _FactsStruct()
    _query("k3jax_device_query", ordinal, ctypes.byref(facts))
    return DeviceFacts(
        name=facts.name.decode(),
        capability=(facts.capability_major, facts.capability_minor),
        num_sms=facts.multiprocessors,
        l2_bytes=facts.l2_bytes,
        shared_bytes=facts.shared_bytes_opt_in,
        multicast_supported=bool(facts.multicast_supported),
    )


def peer_access() -> tuple[tuple[bool, ...], ...]:
    """Row i, column j: whether device i can address the memory of device j."""
    count = device_count()
    matrix = (ctypes.c_int32 * (count * count))()
    _query("k3jax_peer_access", count, matrix)
    return tuple(tuple(bool(matrix[i * count + j]) for j in range(count)) for i in range(count))
