"""A PTX emulator on NumPy: runs the kernels of the test suite where there is no GPU.

See docs/testing.md for what it shows and what it cannot.
"""

from .device import Device
from .errors import (
    BarrierError,
    DeadlockError,
    EmulationError,
    InFlightError,
    LaunchError,
    MisalignedError,
    OutOfBoundsError,
    PtxSyntaxError,
    RaceError,
    ReadOnlyError,
    TrapError,
    UninitialisedError,
    UnknownInstructionError,
)
from .memory import GlobalMemory
from .program import Emulation, emulate, load, run_kernel, run_program, run_programs

__all__ = [
    "BarrierError",
    "DeadlockError",
    "Device",
    "Emulation",
    "EmulationError",
    "GlobalMemory",
    "InFlightError",
    "LaunchError",
    "MisalignedError",
    "OutOfBoundsError",
    "PtxSyntaxError",
    "RaceError",
    "ReadOnlyError",
    "TrapError",
    "UninitialisedError",
    "UnknownInstructionError",
    "emulate",
    "load",
    "run_kernel",
    "run_program",
    "run_programs",
]
