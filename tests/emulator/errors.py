"""What the emulator raises; messages name the PTX line and, where known, block, warp and lane."""

from .instruction import Instruction


class EmulationError(Exception):
    """Base of all findings about a PTX program.

    Attributes:
        instruction: the PTX instruction at fault, if there is one.
    """

    def __init__(self, message: str, instruction: Instruction | None = None):
        self.instruction = instruction
        if instruction is not None:
            message = f"{message}\n  at {instruction.where}"
        super().__init__(message)


class PtxSyntaxError(EmulationError):
    """The text is not PTX that the parser knows."""


class UnknownInstructionError(EmulationError, NotImplementedError):
    """An opcode, modifier, directive or register that the emulator does not implement."""


class LaunchError(EmulationError, ValueError):
    """Arguments, architecture, grid or shared memory do not fit the kernel."""


class OutOfBoundsError(EmulationError):
    """An access outside every array, or outside the block's shared memory."""


class MisalignedError(EmulationError):
    """An address that is not a multiple of the access size."""


class UninitialisedError(EmulationError):
    """A read of bytes that nothing wrote."""


class ReadOnlyError(EmulationError):
    """A write to an operand that the program may only read."""


class InFlightError(EmulationError):
    """An access to bytes that an unfinished asynchronous copy still writes or reads."""


class RaceError(EmulationError):
    """Two conflicting accesses to shared memory that nothing orders."""


class BarrierError(EmulationError):
    """A barrier, mbarrier or warp-synchronous instruction used against its rules."""


class DeadlockError(EmulationError):
    """No warp can go on."""


class TrapError(EmulationError):
    """The kernel executed `trap`."""
