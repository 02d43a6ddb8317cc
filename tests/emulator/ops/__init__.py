"""Instruction families; importing one registers its handlers."""

import importlib

FAMILIES = (
    "integer",
    "logic",
    "bitfield",
    "floating",
    "packed",
    "compare",
    "convert",
    "control",
    "data",
    "memory",
    "atomic",
    "warp",
    "matrix",
    "wgmma",
    "barrier",
    "mbarrier",
    "async_copy",
    "cluster",
    "hints",
)


def load_all() -> None:
    """Registers every family."""
    for family in FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
