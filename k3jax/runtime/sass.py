"""What a cubin holds: registers, spills, shared memory, and which machine instructions.

Read with `cuobjdump` and `nvdisasm`, from the PyPI packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm or from a CUDA toolkit on the PATH. No GPU is needed.
"""

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

InstructionClass = Literal["matrix", "copy", "sync", "other"]

_SYNC = "BAR DEPBAR LDGDEPBAR MEMBAR FENCE SYNCS WARPSYNC WARPGROUP ACQBULK PREEXIT UCGABAR UTCBAR"
_SYNC += " UTMACMDFLUSH ERRBAR CCTL ARRIVES NANOSLEEP"
# The first that matches the start of the mnemonic: LDGDEPBAR is no load, LDC reads constants.
_CLASSES: tuple[tuple[InstructionClass, str], ...] = (
    ("matrix", r"[A-Z]*MMA"),
    ("sync", "|".join(_SYNC.split())),
    ("copy", r"LD(?!C)|ST|ATOM|RED(?!UX)|UTMA|UBLK|UTCCP"),
)


@dataclass(frozen=True)
class CodeReport:
    """Facts of one entry point.

    Attributes:
        entry: its name.
        registers: of a thread.
        stack_bytes: of a thread; not 0 where something is spilled or indexed at run time.
        local_bytes: of a thread, beside the stack.
        spill_instructions: loads and stores of local memory in the code.
        static_shared_bytes: of a block; dynamic shared memory is the launch's.
        census: how often each instruction occurs, by its mnemonic before the first dot.
    """

    entry: str
    registers: int
    stack_bytes: int
    local_bytes: int
    spill_instructions: int
    static_shared_bytes: int
    census: Mapping[str, int]

    @property
    def spills(self) -> bool:
        """Whether anything lives in local memory."""
        return bool(self.stack_bytes or self.local_bytes or self.spill_instructions)

    def of_class(self, wanted: InstructionClass) -> dict[str, int]:
        """The part of the census in one class, most frequent first."""
        found = {name: n for name, n in self.census.items() if instruction_class(name) == wanted}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def instruction_class(mnemonic: str) -> InstructionClass:
    """What an instruction is for, by its mnemonic before the first dot."""
    for kind, pattern in _CLASSES:
        if re.match(pattern, mnemonic):
            return kind
    return "other"


def inspect_cubin(cubin: bytes) -> tuple[CodeReport, ...]:
    """A report for each entry point of a cubin.

    Raises:
        NotImplementedError: the disassembler is not installed.
        ValueError: the disassembler does not understand the bytes.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        resources = _run("cuobjdump", "--dump-resource-usage", file.name)
        sass = _run("nvdisasm", "--print-code", file.name)
    code = dict(_sections(sass))
    return tuple(
        _report(entry, facts, code[entry]) for entry, facts in _resource_usage(resources).items()
    )


def _report(entry: str, facts: dict[str, int], code: str) -> CodeReport:
    census = Counter(_mnemonics(code))
    return CodeReport(
        entry=entry,
        registers=facts["REG"],
        stack_bytes=facts["STACK"],
        local_bytes=facts["LOCAL"],
        spill_instructions=census["LDL"] + census["STL"],
        static_shared_bytes=facts["SHARED"],
        census=dict(census),
    )


def _resource_usage(text: str) -> dict[str, dict[str, int]]:
    found = re.findall(r"Function (\S+):\n\s*(.*)", text)
    return {
        entry: {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", facts)}
        for entry, facts in found
    }


def _sections(sass: str) -> list[tuple[str, str]]:
    return re.findall(r"\n\.text\.(\S+):\n(.*?)(?=\n//-----|\Z)", sass, re.DOTALL)


def _mnemonics(code: str) -> list[str]:
    """One a line: `/*0080*/  @!P0 BRA ...`; the predicate is optional."""
    return re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?\w+ )?([A-Z][A-Z0-9]*)", code)


def _run(tool: str, *arguments: str) -> str:
    result = subprocess.run([tool_path(tool), *arguments], capture_output=True, text=True)
    if result.returncode != 0:
        raise ValueError(f"{tool} does not understand this cubin: {result.stderr.strip()}")
    return result.stdout


@functools.cache
def tool_path(tool: str) -> str:
    """Where `cuobjdump` or `nvdisasm` is.

    Raises:
        NotImplementedError: neither the PyPI package nor a toolkit is installed.
    """
    namespace = importlib.util.find_spec("nvidia")
    for folder in (namespace and namespace.submodule_search_locations) or ():
        for candidate in sorted(Path(folder).glob(f"*/bin/{tool}"), reverse=True):
            return str(candidate)
    if found := shutil.which(tool):
        return found
    raise NotImplementedError(f"{tool} is not installed: pip install nvidia-cuda-{tool}")
