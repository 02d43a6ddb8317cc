"""A `Program` on the card through the CUDA driver alone, its results poisoned before every run."""

import struct

import numpy as np

from k3jax.runtime import library
from k3jax.runtime.compile import compile_kernel
from k3jax.runtime.program import Kept, Operand, Program, Result
from k3jax.runtime.target import Target
from tests.gpu.driver import Driver

POISON = 0xA5


def card_target() -> Target:
    """What kernels are sized by, without asking JAX, which may be on the CPU here."""
    facts = library.device_facts(0)
    arch = f"sm_{facts.capability[0]}{facts.capability[1]}a"
    return Target(facts.name, arch, facts.num_sms, facts.shared_bytes)


class CardProgram:
    """A program with memory for its results and what it keeps."""

    def __init__(self, driver: Driver, program: Program, arch: str):
        self.driver, self.program = driver, program
        self.results = [
            driver.upload(np.empty(spec.num_bytes, np.uint8)) for spec in program.results
        ]
        self.kept = [
            driver.upload(np.full(spec.num_bytes // 4, spec.fill, np.uint32))
            for spec in program.kept
        ]
        self.functions = []
        for launch in program.launches:
            compiled = compile_kernel(launch.kernel, arch)
            shared = launch.kernel.shared_bytes
            self.functions.append(driver.function(compiled.cubin, compiled.entry, shared))

    def run(self, operands: list[int]) -> None:
        """Launches it on operands at these addresses."""
        for address, spec in zip(self.results, self.program.results, strict=True):
            self.driver.fill(address, POISON, spec.num_bytes)
        for function, launch in zip(self.functions, self.program.launches, strict=True):
            kernel = launch.kernel
            arguments = [self._encode(value, operands) for value in launch.arguments]
            self.driver.launch(
                function, launch.grid, kernel.threads, kernel.cluster, kernel.shared_bytes,
                arguments, launch.overlaps_previous,
            )  # fmt: skip

    def _encode(self, value, operands: list[int]) -> bytes:
        if isinstance(value, int | float):
            return struct.pack("<i" if isinstance(value, int) else "<f", value)
        addresses = {Operand: operands, Result: self.results, Kept: self.kept}[type(value)]
        return struct.pack("<Q", addresses[value.index] + value.offset)

    def outputs(self) -> list[np.ndarray]:
        """Waits, and copies what is not scratch back."""
        wanted = len(self.program.results) - self.program.num_scratch
        return [
            self.driver.download(address, spec.num_bytes).view(spec.dtype).reshape(spec.shape)
            for address, spec in zip(
                self.results[:wanted], self.program.results[:wanted], strict=True
            )
        ]

    def free(self) -> None:
        for address in (*self.results, *self.kept):
            self.driver.free(address)
