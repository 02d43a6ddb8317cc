import subprocess

import pytest

from k3jax.runtime import sass
from k3jax.runtime.compile import ARCHS, compile_kernel
from tests.runtime.toy import Scale, Spilling


@pytest.mark.parametrize("arch", ARCHS)
def test_report_of_a_kernel_without_spills(arch):
    compiled = compile_kernel(Scale(), arch)
    (report,) = sass.inspect_cubin(compiled.cubin)
    assert report.entry == compiled.entry
    assert 4 <= report.registers <= 32
    assert not report.spills
    assert report.of_class("matrix") == {}
    assert report.of_class("copy") == {"LDG": 1, "STG": 1}
    assert report.of_class("sync") == {"ACQBULK": 1, "PREEXIT": 1}
    assert report.census["FFMA"] == 1


def test_spills_are_reported():
    (report,) = sass.inspect_cubin(compile_kernel(Spilling(), "sm_90a").cubin)
    assert report.registers == 65536 // 1024
    assert report.spills
    assert report.spill_instructions > 0
    assert report.stack_bytes + report.local_bytes > 0
    assert report.of_class("copy")["LDG"] == 128


@pytest.mark.parametrize(
    ("kind", "mnemonics"),
    {
        "matrix": "HMMA IMMA QMMA HGMMA QGMMA UTCHMMA UTCQMMA UTCOMMA",
        "copy": "LDG LDGSTS LDS LDSM LDL STG STL STSM ATOMG REDG UTMALDG UTMASTG UBLKCP LDTM UTCCP",
        "sync": "BAR LDGDEPBAR DEPBAR SYNCS MEMBAR WARPSYNC UTMACMDFLUSH ACQBULK PREEXIT UTCBAR",
        "other": "LDC LDCU ULDC REDUX IMAD FFMA BRA BSYNC BSSY S2R R2UR SHFL HMUL2 EXIT",
    }.items(),
)
def test_instruction_classes(kind, mnemonics):
    assert {sass.instruction_class(name) for name in mnemonics.split()} == {kind}


def test_predicated_instructions_are_counted():
    code = "  /*0080*/               @!P0 BRA `(.L_1) ;\n  /*0090*/   @UP0 UIADD3 UR4, UR4 ;\n"
    assert sass._mnemonics(code) == ["BRA", "UIADD3"]


def test_foreign_bytes_are_refused():
    with pytest.raises(ValueError, match="cuobjdump does not understand this cubin"):
        sass.inspect_cubin(b"no cubin")


def test_missing_tool_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    sass.tool_path.cache_clear()
    with pytest.raises(NotImplementedError, match="pip install nvidia-cuda-nvdisasm"):
        sass.tool_path("nvdisasm")


def test_found_tools_run():
    for tool in ("cuobjdump", "nvdisasm"):
        output = subprocess.run([sass.tool_path(tool), "--version"], capture_output=True, text=True)
        assert "NVIDIA" in output.stdout
