"""Every kernel of the library, by name.

A module `k3jax/ops/<op>/kernel_*.py` that defines kernels lists representative instances of them:

    REPRESENTATIVES = {"decode, 8 tokens, TP=8": DecodeKernel(...), ...}

`k3jax kernels` compiles and inspects these, and the tests check that none is missing.
"""

import importlib
import pkgutil
from types import ModuleType

import k3jax.ops
from k3jax.runtime.program import Kernel


def kernel_modules() -> list[ModuleType]:
    """The modules that define kernels; importing them needs the CuTe DSL."""
    names = (
        info.name
        for info in pkgutil.walk_packages(k3jax.ops.__path__, "k3jax.ops.")
        if info.name.rpartition(".")[2].startswith("kernel_")
    )
    return [module for module in map(importlib.import_module, sorted(names)) if classes(module)]


def classes(module: ModuleType) -> list[type[Kernel]]:
    """The kernel classes that a module defines."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Kernel)
        and value.__module__ == module.__name__
    ]


def all_kernels() -> dict[str, Kernel]:
    """Representative kernels under "<op>: <label>"."""
    return {
        f"{module.__name__.split('.')[2]}: {label}": kernel
        for module in kernel_modules()
        for label, kernel in module.REPRESENTATIVES.items()
    }
