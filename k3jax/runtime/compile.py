"""From a `Kernel` to machine code: the CuTe DSL compiler behind a cache that outlives the process.

The only module outside the kernels that imports `cutlass`, and only when something must be
compiled. No GPU is needed, and one process compiles for any number of architectures.

An entry's key covers everything that decides the code: the class and its fields, the text of the
module that defines it and of every module of the same package that it imports, the versions of
k3jax and of the DSL, and the architecture. Token counts are not among them: they reach a kernel as
run-time scalars or through `token_bucket`.
"""

import ast
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3jax.runtime.cache import DiskCache, default_directory
from k3jax.runtime.program import Kernel

logger = logging.getLogger("k3jax")

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
"""Architectures that kernels are compiled for: Hopper, Blackwell B200 and B300."""

PTX_TYPES = {"address": "u64", "int32": "u32", "float32": "f32"}
COMPILER_PACKAGE = "nvidia-cutlass-dsl"


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code of one kernel for one architecture.

    Attributes:
        arch: for example "sm_90a".
        entry: name of the entry point in the cubin.
        cubin: ELF image for the driver.
        ptx: the assembly it was made from.
    """

    arch: str
    entry: str
    cubin: bytes
    ptx: str


@dataclass
class CompileCounts:
    """What this process compiled, and how often the disk spared it.

    Attributes:
        kernels: each kernel compiled, with its architecture, in order.
        from_disk: kernels read from the disk instead.
    """

    kernels: list[tuple[Kernel, str]] = dataclasses.field(default_factory=list)
    from_disk: int = 0

    @property
    def compiled(self) -> int:
        """How many kernels were compiled."""
        return len(self.kernels)

    def reasons(self) -> dict[str, list[Any]]:
        """Each fact of a kernel class that took several values, and so cost several compiles."""
        values: dict[str, list[Any]] = {}
        for kernel, arch in self.kernels:
            name = type(kernel).__name__
            facts = {f.name: getattr(kernel, f.name) for f in dataclasses.fields(kernel)}  # pyright: ignore[reportArgumentType]
            for fact, value in (facts | {"arch": arch}).items():
                seen = values.setdefault(f"{name}.{fact}", [])
                if value not in seen:
                    seen.append(value)
        return {fact: seen for fact, seen in values.items() if len(seen) > 1}


counts = CompileCounts()

_compiler_lock = threading.Lock()  # the DSL keeps its state in globals


def compile_kernel(kernel: Kernel, arch: str) -> CompiledKernel:
    """Machine code for `kernel`: from this process, from the disk, or compiled now.

    Args:
        kernel: a frozen dataclass instance deriving from `Kernel`.
        arch: one of `ARCHS`.

    Raises:
        ValueError: unknown architecture.
        NotImplementedError: the architecture lacks what the kernel needs, or it must be compiled
            and the CuTe DSL is not installed.
        TypeError: a field cannot be part of a cache key, or the code's parameters are not
            `kernel.parameters`.
    """
    if arch not in ARCHS:
        raise ValueError(f"arch={arch!r} is not one of {ARCHS}")
    if not kernel.compiles_for(arch):
        raise NotImplementedError(
            f"{type(kernel).__name__} needs instructions of {kernel.architectures}, which {arch} "
            "lacks; choose a tier that runs there"
        )
    return _compile_once(kernel, arch, default_directory())


@functools.cache
def _compile_once(kernel: Kernel, arch: str, directory: Path) -> CompiledKernel:
    cache, key = DiskCache(directory), cache_key(kernel, arch)
    with cache.lock(key):
        if (entry := cache.read(key)) is not None:
            counts.from_disk += 1
            return _from_entry(*entry)
        compiled = _compile(kernel, arch)
        counts.kernels.append((kernel, arch))
        try:
            cache.write(key, *_to_entry(compiled))
        except OSError as error:
            logger.warning(
                "k3jax: cannot keep compiled kernels in %s (%s); every process compiles again. "
                "Set K3JAX_CACHE_DIR to a folder that can be written.",
                directory,
                error,
            )
    return compiled


def _to_entry(compiled: CompiledKernel) -> tuple[dict[str, Any], bytes]:
    header = {"arch": compiled.arch, "entry": compiled.entry, "cubin_bytes": len(compiled.cubin)}
    return header, compiled.cubin + compiled.ptx.encode()


def _from_entry(header: dict[str, Any], payload: bytes) -> CompiledKernel:
    size = header["cubin_bytes"]
    return CompiledKernel(header["arch"], header["entry"], payload[:size], payload[size:].decode())


def cache_key(kernel: Kernel, arch: str) -> str:
    """Hexadecimal digest of everything that decides the machine code."""
    parts = [_canonical(kernel), arch]
    parts += [f"{name} {_version(name)}" for name in ("k3jax", COMPILER_PACKAGE)]
    for name, text in sorted(_sources(type(kernel).__module__)):
        parts += [name, text]
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _canonical(value: Any) -> str:
    """Text that is equal for equal values in every process; refuses what has no such text."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, tuple):
        return "(" + ",".join(_canonical(item) for item in value) + ")"
    if isinstance(value, enum.Enum):
        return f"{_qualified(type(value))}.{value.name}"
    if isinstance(value, type):
        return _qualified(value)
    if dataclasses.is_dataclass(value):
        facts = (
            f"{f.name}={_canonical(getattr(value, f.name))}" for f in dataclasses.fields(value)
        )
        return f"{_qualified(type(value))}({','.join(facts)})"
    raise TypeError(
        f"a kernel's field holds {value!r}, which cannot name a cache entry: use numbers, strings, "
        "tuples, enums, types or frozen dataclasses of them"
    )


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _sources(module: str) -> Iterator[tuple[str, str]]:
    """Name and text of a module and of all it imports, within its own package and k3jax."""
    roots = {"k3jax", module.partition(".")[0]}
    pending, seen = [module], set()
    while pending:
        name = pending.pop()
        file = getattr(sys.modules.get(name), "__file__", None)
        if name in seen or file is None:
            continue
        seen.add(name)
        text = Path(file).read_text()
        yield name, text
        pending += [n for n in _imports(name, text) if n.partition(".")[0] in roots]


def _imports(module: str, text: str) -> Iterator[str]:
    package = sys.modules[module].__package__
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(relative, package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _compile(kernel: Kernel, arch: str) -> CompiledKernel:
    try:
        from k3jax.runtime.dsl import compile_device_code
    except ImportError as error:
        raise NotImplementedError(
            f"{type(kernel).__name__} for {arch} is not in {default_directory()} and the CuTe DSL "
            f"that compiles it is not installed ({error}): pip install 'k3jax[cuda13]'"
        ) from error
    # The DSL also writes what it keeps into files.
    with _compiler_lock, tempfile.TemporaryDirectory() as scratch:
        ptx, cubin = compile_device_code(kernel, arch, scratch)
    return CompiledKernel(arch, _checked_entry(kernel, ptx), cubin, ptx)


def _checked_entry(kernel: Kernel, ptx: str) -> str:
    """The entry's name, once its parameters are those that launches will pass."""
    found = re.search(r"\.visible \.entry (\w+)\(([^)]*)\)", ptx)
    if found is None:
        raise TypeError(f"{type(kernel).__name__} compiled to no entry point")
    types = re.findall(r"\.param \.(\w+) ", found[2])
    wanted = [PTX_TYPES[kind] for _, kind in kernel.parameters]
    if types != wanted:
        raise TypeError(
            f"{type(kernel).__name__}.device compiled to parameters {types}, but its `parameters` "
            f"say {wanted}"
        )
    return found[1]
