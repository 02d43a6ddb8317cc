"""Launching cubins through the CUDA driver with ctypes: all that a GPU machine needs is NumPy."""

import ctypes as c
from collections.abc import Sequence

import numpy as np

_CLUSTER, _OVERLAP = 4, 6
_MAX_DYNAMIC_SHARED = 8
_ALREADY_ENABLED = 704


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
    """The primary context of one device.

    Raises:
        OSError: no CUDA driver on this machine.
        RuntimeError: a driver call failed.
    """

    def __init__(self, ordinal: int = 0):
        self.lib = c.CDLL("libcuda.so.1")
        self.context = c.c_void_p()
        device = c.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", c.byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", c.byref(self.context), device)

    def _call(self, name: str, *args, allowed: int = 0) -> None:
        if self.context:
            self.lib.cuCtxSetCurrent(self.context)
        code = getattr(self.lib, name)(*args)
        if code not in (0, allowed):
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

    def memory_left(self) -> int:
        """Bytes of device memory that nobody has allocated."""
        left, total = c.c_size_t(), c.c_size_t()
        self._call("cuMemGetInfo_v2", c.byref(left), c.byref(total))
        return left.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", c.c_uint64(address))

    def stream(self) -> c.c_void_p:
        """A stream that the default stream does not wait for."""
        stream = c.c_void_p()
        self._call("cuStreamCreate", c.byref(stream), c.c_uint(1))
        return stream

    def wait(self, stream) -> None:
        self._call("cuStreamSynchronize", stream)

    def reach(self, other: "Driver") -> None:
        """Lets this device's kernels address the other's memory."""
        self._call("cuCtxEnablePeerAccess", other.context, c.c_uint(0), allowed=_ALREADY_ENABLED)

    def capture(self, stream) -> None:
        """From now on, what is launched on a stream goes into a graph."""
        self._call("cuStreamBeginCapture_v2", stream, c.c_int(2))

    def replay(self, stream) -> None:
        """Ends a capture and launches its graph once."""
        graph, executable = c.c_void_p(), c.c_void_p()
        self._call("cuStreamEndCapture", stream, c.byref(graph))
        self._call("cuGraphInstantiateWithFlags", c.byref(executable), graph, c.c_ulonglong(0))
        self._call("cuGraphLaunch", executable, stream)
        self._call("cuGraphExecDestroy", executable)  # once it has run
        self._call("cuGraphDestroy", graph)

    def function(self, cubin: bytes, entry: str, shared: int) -> c.c_void_p:
        """Loads a kernel."""
        module, function = c.c_void_p(), c.c_void_p()
        self._call("cuModuleLoadData", c.byref(module), cubin)
        self._call("cuModuleGetFunction", c.byref(function), module, entry.encode())
        self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
        return function

    def launch(self, function, grid: Sequence[int], threads: int, cluster: Sequence[int],
               shared: int, arguments: Sequence[bytes], overlaps: bool,
               stream: c.c_void_p | None = None) -> None:  # fmt: skip
        """Launches, on the default stream unless another is given."""
        attributes = (_Attribute * 2)()
        attributes[0].id = _CLUSTER
        attributes[0].value[:3] = cluster
        attributes[1].id = _OVERLAP
        attributes[1].value[0] = int(overlaps)
        extents = (c.c_uint * 6)(*grid, threads, 1, 1)
        config = _Config(extents, shared, stream, attributes, 2)
        buffers = [c.create_string_buffer(a, len(a)) for a in arguments]
        pointers = (c.c_void_p * len(buffers))(*[c.addressof(b) for b in buffers])
        self._call("cuLaunchKernelEx", c.byref(config), function, pointers, None)
