"""Say whether k3jax works on this machine, and what to do where it does not.

Lists versions, devices and peer access, and runs every kernel that this card has against its
reference. Exit status 1 if something failed.
"""

import argparse
import importlib.metadata
import json
import platform
from typing import Any

_PACKAGES = ("k3jax", "jax", "jaxlib", "jax-cuda13-plugin", "flax", "nvidia-cutlass-dsl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what the verb takes."""
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Prints the report."""
    report = examine()
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 1 if report["problems"] else 0


def examine() -> dict[str, Any]:
    """Everything that the report says, as plain data; `problems` are (what, remedy) pairs."""
    import jax

    from k3jax.runtime.target import Target

    problems: list[tuple[str, str]] = []
    devices = jax.devices()
    target = Target.current()
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": [f"{device.id}: {device.device_kind}" for device in devices],
        "target": target.kind,
        "arch": target.arch,
        "native_library": _native_library(problems),
        "driver": None,
        "peer_access": None,
        "kernels": {},
        "problems": problems,
    }
    if devices[0].platform == "gpu":
        _examine_gpu(report, target, problems)
    return report


def _examine_gpu(report: dict[str, Any], target, problems: list[tuple[str, str]]) -> None:
    from k3jax.ops.check import CHECKED_OPS, PROVEN, run_check
    from k3jax.runtime import library

    if report["native_library"] is None:
        return
    try:
        report["driver"] = ".".join(map(str, library.driver_version()))
        report["peer_access"] = library.peer_access()
    except RuntimeError as error:
        problems.append((str(error), "check the NVIDIA driver with nvidia-smi"))
        return
    if not all(all(row) for row in report["peer_access"]):
        remedy = "the fused tail needs it; other tiers work: check NVLink with nvidia-smi topo -m"
        problems.append(("some devices cannot address each other's memory", remedy))
    if target.arch is None:
        remedy = "the layer runs in XLA; kernels exist for compute capability 9.0, 10.0 and 10.3"
        problems.append((f"no kernels for {target.kind}", remedy))
        return
    for op in CHECKED_OPS:
        row = {"proven": (op, target.arch) in PROVEN}
        try:
            result = run_check(op, target)
        except Exception as error:
            row |= {"passed": False, "why": str(error)}
        else:
            row |= {"passed": result.passed, "error": result.error, "limit": result.limit}
            row |= {"microseconds": round(result.microseconds, 1)}
        report["kernels"][op] = row
        if not row["passed"]:
            why = row.get("why", f"error {row.get('error')}, limit {row.get('limit')}")
            remedy = f"plan with {op}='xla' and report this output"
            problems.append((f"{op} kernels failed: {why}", remedy))


def _native_library(problems: list[tuple[str, str]]) -> str | None:
    from k3jax.runtime import library

    try:
        library.load_library()
    except (FileNotFoundError, OSError) as error:
        problems.append(("the native library does not load", str(error)))
        return None
    return str(library.library_path())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def render(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"python {report['python']}"]
    lines += [
        f"{name} {version or 'not installed'}" for name, version in report["packages"].items()
    ]
    lines += [f"device {device}" for device in report["devices"]]
    lines.append(f"target {report['target']}, kernels for {report['arch'] or 'none'}")
    lines.append(f"native library {report['native_library'] or 'missing'}")
    if report["driver"]:
        lines.append(f"driver serves CUDA {report['driver']}")
    if report["peer_access"] and len(report["peer_access"]) > 1:
        for index, row in enumerate(report["peer_access"]):
            reached = [str(other) for other, reaches in enumerate(row) if reaches]
            lines.append(f"device {index} reaches {', '.join(reached)}")
    for op, row in report["kernels"].items():
        verdict = "pass" if row["passed"] else "FAIL"
        numbers = f"error {row['error']:.1e}, {row['microseconds']} us" if "error" in row else ""
        proven = "" if row["proven"] else " (never run on this architecture before)"
        lines.append(f"kernels of {op}: {verdict} {numbers}{proven}".rstrip())
    for what, remedy in report["problems"]:
        lines.append(f"PROBLEM {what}\n        {remedy}")
    lines.append(
        "FAILED" if report["problems"] else "OK: everything that this machine can run works"
    )
    return "\n".join(lines)
