import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3jax.runtime import compile as kernel_compile
from k3jax.runtime.compile import ARCHS, cache_key, compile_kernel
from tests.runtime.toy import Scale

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("K3JAX_CACHE_DIR", str(folder))
    monkeypatch.setattr(kernel_compile, "counts", kernel_compile.CompileCounts())
    return folder


def entries(folder):
    return sorted(folder.glob("*.k3kernel"))


def start(code: str, **environment) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k != "CUTE_DSL_ARCH"} | environment
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, text=True
    )


def output(process: subprocess.Popen) -> dict:
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(text)


COMPILE = """
import json
from k3jax.runtime import compile as c
from tests.runtime.toy import Scale
kernel = c.compile_kernel(Scale(shift=2.5), "sm_90a")
facts = {"entry": kernel.entry, "bytes": len(kernel.cubin)}
facts |= {"compiled": c.counts.compiled, "from_disk": c.counts.from_disk}
print(json.dumps(facts))
"""


def test_one_process_compiles_for_every_architecture():
    compiled = {arch: compile_kernel(Scale(), arch) for arch in ARCHS}
    for arch, code in compiled.items():
        assert code.arch == arch
        assert f".target {arch}" in code.ptx
        assert code.cubin.startswith(b"\x7fELF")
        assert code.entry in code.ptx
    assert len({code.cubin for code in compiled.values()}) == len(ARCHS)


def test_compiling_leaves_no_files_behind(tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    compile_kernel(Scale(), "sm_90a")
    assert list(work.iterdir()) == []


def test_second_process_compiles_nothing(cache_folder):
    first = output(start(COMPILE))
    second = output(start(COMPILE))
    assert (first["compiled"], first["from_disk"]) == (1, 0)
    assert (second["compiled"], second["from_disk"]) == (0, 1)
    assert (second["entry"], second["bytes"]) == (first["entry"], first["bytes"])
    assert len(entries(cache_folder)) == 1


def test_two_processes_at_once_compile_once():
    results = [output(process) for process in [start(COMPILE), start(COMPILE)]]
    assert sorted(result["compiled"] for result in results) == [0, 1]
    assert results[0]["entry"] == results[1]["entry"]


def test_equal_kernels_share_code_and_other_facts_do_not():
    first = compile_kernel(Scale(threads=64), "sm_90a")
    assert compile_kernel(Scale(threads=64), "sm_90a") is first
    keys = {
        cache_key(Scale(), "sm_90a"),
        cache_key(Scale(threads=256), "sm_90a"),
        cache_key(Scale(shift=1.0), "sm_90a"),
        cache_key(Scale(), "sm_100a"),
    }
    assert len(keys) == 4


def test_compiles_are_explained_by_the_fact_that_differs():
    for kernel in (Scale(threads=32), Scale(threads=64), Scale(threads=64)):
        compile_kernel(kernel, "sm_90a")
    assert kernel_compile.counts.compiled == 2
    assert kernel_compile.counts.reasons() == {"Scale.threads": [32, 64]}


def test_changed_version_recompiles(monkeypatch):
    before = cache_key(Scale(), "sm_90a")
    for package in ("k3jax", kernel_compile.COMPILER_PACKAGE):
        with monkeypatch.context() as patch:
            patch.setattr(
                kernel_compile, "_version", lambda name, new=package: "9" if name == new else "1"
            )
            assert cache_key(Scale(), "sm_90a") != before


KERNEL_MODULE = """
from dataclasses import dataclass
import cutlass.cute as cute
from k3jax.runtime.program import Kernel
from pack.shared import OFFSET

@dataclass(frozen=True)
class Store(Kernel):
    threads: int = 32
    parameters = (("y", "address"),)

    @cute.kernel
    def device(self, y):
        cute.arch.inline_ptx("st.global.u32 [{$r0}], 7;", read_only_args=[y + OFFSET])
"""


def test_changed_source_recompiles(tmp_path, cache_folder):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernel.py").write_text(KERNEL_MODULE)
    (package / "shared.py").write_text("OFFSET = 4\n")
    code = COMPILE.replace("tests.runtime.toy", "pack.kernel").replace("Scale", "Store")
    code = code.replace("shift=2.5", "")
    path = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(tmp_path)])}
    assert output(start(code, **path))["compiled"] == 1
    assert output(start(code, **path))["compiled"] == 0
    (package / "shared.py").write_text("OFFSET = 8\n")  # imported by the kernel's module
    assert output(start(code, **path))["compiled"] == 1
    (package / "kernel.py").write_text(KERNEL_MODULE.replace(", 7;", ", 9;"))
    assert output(start(code, **path))["compiled"] == 1
    assert len(entries(cache_folder)) == 3


def test_damaged_entry_recompiles(cache_folder, caplog):
    code = compile_kernel(Scale(), "sm_90a")
    (entry,) = entries(cache_folder)
    entry.write_bytes(entry.read_bytes()[:-40])
    kernel_compile._compile_once.cache_clear()
    with caplog.at_level(logging.WARNING, "k3jax"):
        again = compile_kernel(Scale(), "sm_90a")
    assert again.entry == code.entry
    assert kernel_compile.counts.compiled == 2
    assert "damaged" in caplog.text


def test_deleted_cache_is_made_anew(cache_folder):
    compile_kernel(Scale(), "sm_90a")
    for path in cache_folder.iterdir():
        path.unlink()
    cache_folder.rmdir()
    kernel_compile._compile_once.cache_clear()
    compile_kernel(Scale(), "sm_90a")
    assert len(entries(cache_folder)) == 1


def test_unwritable_folder_compiles_and_warns(tmp_path, monkeypatch, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    monkeypatch.setenv("K3JAX_CACHE_DIR", str(blocker / "cache"))
    with caplog.at_level(logging.WARNING, "k3jax"):
        assert compile_kernel(Scale(), "sm_90a").cubin
    assert "Set K3JAX_CACHE_DIR to a folder that can be written" in caplog.text


def test_without_the_compiler_the_cache_serves_and_the_rest_is_refused(monkeypatch):
    compile_kernel(Scale(), "sm_90a")
    kernel_compile._compile_once.cache_clear()
    monkeypatch.setitem(sys.modules, "k3jax.runtime.dsl", None)
    assert compile_kernel(Scale(), "sm_90a").cubin
    with pytest.raises(NotImplementedError, match=r"pip install 'k3jax\[cuda13\]'"):
        compile_kernel(Scale(threads=32), "sm_90a")


def test_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match=r"arch='sm_80' is not one of \('sm_90a'"):
        compile_kernel(Scale(), "sm_80")


def test_wrong_parameters_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Mislabelled(Scale):
        parameters = (*Scale.parameters[:3], ("factor", "int32"))

    with pytest.raises(TypeError, match=r"compiled to parameters \['u64', 'u64', 'u32', 'f32'\]"):
        kernel_compile._checked_entry(Mislabelled(), compile_kernel(Scale(), "sm_90a").ptx)


def test_fields_without_a_stable_text_are_refused():
    with pytest.raises(TypeError, match="cannot name a cache entry"):
        cache_key(Scale(shift=object()), "sm_90a")  # its repr would hold an address
