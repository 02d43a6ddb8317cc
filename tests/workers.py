"""Tests that are several processes: each runs the test's own module with an address to meet at."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        pid: its number.
        code: its status, or minus the signal that killed it.
        log: what it printed.
    """

    pid: int
    code: int
    log: str


class Workers:
    """`python -m MODULE ADDRESS NUMBER FOLDER`, started at once for each number below `count`."""

    def __init__(self, module: str, count: int, folder: Path, **environment: str):
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            address = f"localhost:{probe.getsockname()[1]}"
        inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, address, str(number), str(folder)],
                env=inherited | environment,
                cwd=Path(__file__).parent.parent,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number in range(count)
        ]

    def wait(self, timeout: float) -> list[Ended]:
        """Their ends; kills all if one takes longer than `timeout` seconds."""
        try:
            logs = [process.communicate(timeout=timeout)[0] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        return [
            Ended(process.pid, process.returncode, log)
            for process, log in zip(self.processes, logs, strict=True)
        ]
