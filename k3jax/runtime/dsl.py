"""The one call into the CuTe DSL compiler.

Imports `cutlass`, so `runtime.compile` imports it when it must compile and nobody else does.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.base_dsl.compiler import DumpDir
from cutlass.base_dsl.typing import Constexpr

from k3jax.runtime.program import Kernel

_PLACEHOLDERS = {
    "address": lambda: Int64(0),
    "int32": lambda: Int32(0),
    "float32": lambda: Float32(0),
}


@cute.jit
def _launch(kernel: Constexpr, arguments, stream: cuda.CUstream):
    # The grid is free to differ from launch to launch; block, cluster and shared memory are not.
    # Without a carve-out, the DSL would ask a driver for the device's, where min_blocks is above 1.
    kernel.device(*arguments).launch(
        grid=list(kernel.cluster),
        block=[kernel.threads, 1, 1],
        cluster=list(kernel.cluster),
        smem=kernel.shared_bytes,
        min_blocks_per_mp=kernel.min_blocks,
        preferred_smem_carveout=100,
        stream=stream,
    )


def compile_device_code(kernel: Kernel, arch: str, scratch: str) -> tuple[str, bytes]:
    """PTX and cubin of a kernel; `scratch` is a folder for the compiler's files."""
    options = (cute.KeepPTX, cute.KeepCUBIN, cute.GPUArch(arch), DumpDir(scratch))
    arguments = tuple(_PLACEHOLDERS[kind]() for _, kind in kernel.parameters)
    compiled = cute.compile[options](_launch, kernel, arguments, cuda.CUstream(0))
    return compiled.artifacts.PTX, compiled.artifacts.CUBIN
