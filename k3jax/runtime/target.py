"""What the device is and can do: one table of known kinds, and the query that corrects it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from k3jax.runtime import library


@dataclass(frozen=True)
class Target:
    """A kind of device, as plans and kernels see it.

    Attributes:
        kind: "cpu", "h200", "b200", ...
        arch: architecture that kernels are compiled for, or None where there are no kernels.
        num_sms: streaming multiprocessors.
        shared_bytes: most dynamic shared memory of one block.
        read_bytes_per_second: measured rate of plain reads of device memory, or None.
        source: where each fact comes from.
    """

    kind: str
    arch: str | None = None
    num_sms: int = 0
    shared_bytes: int = 0
    read_bytes_per_second: float | None = None
    source: str = dataclasses.field(default="", compare=False)

    @classmethod
    def named(cls, kind: str) -> "Target":
        """The known device of that kind.

        Raises:
            ValueError: no such kind in the table.
        """
        if kind not in TARGETS:
            raise ValueError(f"target={kind!r} is not known; choose one of {sorted(TARGETS)}")
        return TARGETS[kind]

    @classmethod
    def current(cls) -> "Target":
        """The device that JAX uses: its kind from the table, its numbers from the driver.

        Kernels are sized by what the driver says where the native library is built, because a
        device may show fewer multiprocessors than its datasheet (MIG, MPS limits).
        """
        device = jax.devices()[0]
        if device.platform != "gpu":
            return TARGETS["cpu"]
        name = device.device_kind.lower()
        known = next((target for kind, target in TARGETS.items() if kind in name), None)
        return _measured(known or Target(kind=device.device_kind, source="JAX"), device)


def _measured(known: Target, device: Any) -> Target:
    try:
        facts = library.device_facts(device.local_hardware_id or 0)
    except FileNotFoundError:
        return known
    return dataclasses.replace(
        known,
        num_sms=facts.num_sms,
        shared_bytes=facts.shared_bytes,
        source=f"{known.source}; SMs and shared memory: the CUDA driver",
    )


_GUIDE = "architecture, shared memory: CUDA C++ Programming Guide, technical specifications table"

TARGETS = {
    "cpu": Target("cpu", source="no kernels: the references run"),
    "h100": Target("h100", "sm_90a", 132, 232448, source=f"{_GUIDE}; SMs: H100 whitepaper, SXM5"),
    "h200": Target(
        "h200",
        "sm_90a",
        132,
        232448,
        4.29e12,
        source=f"{_GUIDE}; SMs and 4 GiB plain read: measured on an NVIDIA H200",
    ),
    "b200": Target("b200", "sm_100a", 148, 232448, source=f"{_GUIDE}; SMs: XLA's description"),
    "b300": Target("b300", "sm_103a", 148, 232448, source=f"{_GUIDE}; SMs: taken as the B200's"),
}
