"""What the device is and can do."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Target:
    """A kind of device, as plans and kernels see it.

    Attributes:
        kind: "cpu", "h200", "b200", ...
        arch: compute architecture that kernels are compiled for, or None without an NVIDIA GPU.
        num_sms: streaming multiprocessors.
        shared_bytes: most dynamic shared memory of one block.
    """

    kind: str
    arch: str | None = None
    num_sms: int = 0
    shared_bytes: int = 0

    @classmethod
    def named(cls, kind: str) -> "Target":
        """The target of that kind, from the table of known devices."""
        if kind not in TARGETS:
            raise ValueError(f"target={kind!r} is not known; choose one of {sorted(TARGETS)}")
        return TARGETS[kind]

    @classmethod
    def current(cls) -> "Target":
        """The kind of `jax.devices()[0]`."""
        name = jax.devices()[0].device_kind.lower()
        return next((t for kind, t in TARGETS.items() if kind in name), TARGETS["cpu"])


# Vendor datasheets: SMs of the SXM parts; shared memory per block (opt-in) of compute capability
# 9.0 and 10.x, CUDA C++ Programming Guide, table of technical specifications.
TARGETS = {
    "cpu": Target("cpu"),
    "h100": Target("h100", "sm_90a", 132, 232448),
    "h200": Target("h200", "sm_90a", 132, 232448),
    "b200": Target("b200", "sm_100a", 148, 232448),
    "b300": Target("b300", "sm_103a", 148, 232448),
}
