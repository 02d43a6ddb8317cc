"""Launching cubins through the CUDA driver with ctypes: all that a GPU machine needs is NumPy."""

import ctypes as c
from collections.abc import Sequence

import numpy as np

_CLUSTER, _OVERLAP = 4, 6
_MAX_DYNAMIC_SHARED = 8


class _Attribute(c.Structure):
    _fields_ = (("id", c.c_int), ("pad", c.c_int), ("value", c.c_uint32 * 16))


class _Config(c.Structure):
    _fields_ = (
        ("extents", c.c_uint * 6),
        ("shared", c.c_uint),
        ("stream", c.c_void_p),
        ("attributes", c.POINTER(_Attribute)),
        ("count", c.c_uint),
    )


class Driver:
    """One context on device 0.

    Raises:
        OSError: no CUDA driver on this machine.
        RuntimeError: a driver call failed.
    """

    def __init__(self):
        self.lib = c.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        device, context = c.c_int(), c.c_void_p()
        self._call("cuDeviceGet", c.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", c.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *args) -> None:
        code = getattr(self.lib, name)(*args)
        if code:
            text = c.c_char_p()
            self.lib.cuGetErrorName(code, c.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'?').decode()}")

    def upload(self, data: np.ndarray) -> int:
        """Copies an array to new device memory; returns its address."""
        address = c.c_uint64()
        self._call("cuMemAlloc_v2", c.byref(address), c.c_size_t(max(data.nbytes, 1)))
        self.write(address.value, data)
        return address.value

    def write(self, address: int, data: np.ndarray) -> None:
        """Copies an array to device memory."""
        data = np.ascontiguousarray(data)
        self._call("cuMemcpyHtoD_v2", c.c_uint64(address), c.c_void_p(data.ctypes.data),
                   c.c_size_t(data.nbytes))  # fmt: skip

    def download(self, address: int, num_bytes: int) -> np.ndarray:
        """Waits for the device and copies bytes back."""
        data = np.empty(num_bytes, np.uint8)
        self._call("cuCtxSynchronize")
        self._call("cuMemcpyDtoH_v2", c.c_void_p(data.ctypes.data), c.c_uint64(address),
                   c.c_size_t(num_bytes))  # fmt: skip
        return data

    def fill(self, address: int, byte: int, num_bytes: int) -> None:
        """Sets device memory to one byte, in the order of the default stream."""
        self._call("cuMemsetD8Async", c.c_uint64(address), c.c_ubyte(byte), c.c_size_t(num_bytes),
                   None)  # fmt: skip

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", c.c_uint64(address))

    def function(self, cubin: bytes, entry: str, shared: int) -> c.c_void_p:
        """Loads a kernel."""
        module, function = c.c_void_p(), c.c_void_p()
        self._call("cuModuleLoadData", c.byref(module), cubin)
        self._call("cuModuleGetFunction", c.byref(function), module, entry.encode())
        self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
        return function

    def launch(self, function, grid: Sequence[int], threads: int, cluster: Sequence[int],
               shared: int, arguments: Sequence[bytes], overlaps: bool) -> None:  # fmt: skip
        """Launches on the default stream."""
        attributes = (_Attribute * 2)()
        attributes[0].id = _CLUSTER
        attributes[0].value[:3] = cluster
        attributes[1].id = _OVERLAP
        attributes[1].value[0] = int(overlaps)
        extents = (c.c_uint * 6)(*grid, threads, 1, 1)
        config = _Config(extents, shared, None, attributes, 2)
        buffers = [c.create_string_buffer(a, len(a)) for a in arguments]
        pointers = (c.c_void_p * len(buffers))(*[c.addressof(b) for b in buffers])
        self._call("cuLaunchKernelEx", c.byref(config), function, pointers, None)
