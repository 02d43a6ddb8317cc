"""The verbs that look at kernels and devices: kernels, doctor, export, demo."""

import json

import jax
import pytest

from k3jax import export
from k3jax.cli import doctor, main
from k3jax.ops import check, kernels
from k3jax.ops.check import CheckResult
from k3jax.runtime.target import Target
from tests.runtime.toy import Scale, Spilling


def test_every_kernel_compiles_for_every_architecture_without_spills(capsys):
    assert main(["kernels", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["arch"] for row in rows} == {"sm_90a", "sm_100a", "sm_103a"}
    assert {row["kernel"].partition(":")[0] for row in rows} >= {"router"}
    assert all(row["registers"] <= 255 for row in rows)


def test_kernels_prints_a_census(capsys, monkeypatch):
    monkeypatch.setattr(kernels, "all_kernels", lambda: {"toy: scale": Scale()})
    assert main(["kernels", "--arch", "sm_90a"]) == 0
    out = capsys.readouterr().out
    assert "toy: scale" in out
    assert "LDG" in out


def test_a_spill_fails_the_command(capsys, monkeypatch):
    monkeypatch.setattr(kernels, "all_kernels", lambda: {"toy: spilling": Spilling()})
    assert main(["kernels", "--arch", "sm_90a"]) == 1
    assert "toy: spilling on sm_90a: spills: stack" in capsys.readouterr().err


def test_an_unknown_architecture_fails_the_command(capsys, monkeypatch):
    monkeypatch.setattr(kernels, "all_kernels", lambda: {"toy: scale": Scale()})
    assert main(["kernels", "--arch", "sm_80"]) == 1
    assert "does not compile" in capsys.readouterr().err


def test_doctor_is_content_without_a_gpu(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "target cpu, kernels for none" in out
    assert out.strip().endswith("OK: everything that this machine can run works")


def test_doctor_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["jax"] == jax.__version__
    assert report["problems"] == []


@pytest.fixture
def gpu(monkeypatch):
    """A machine with two H200s, as far as the doctor can tell."""
    from k3jax.runtime import library

    class Device:
        id, platform, device_kind, local_hardware_id = 0, "gpu", "NVIDIA H200", 0

    monkeypatch.setattr(jax, "devices", lambda: [Device(), Device()])
    monkeypatch.setattr(Target, "current", classmethod(lambda cls: Target.named("h200")))
    monkeypatch.setattr(library, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(library, "peer_access", lambda: ((True, True), (True, True)))
    monkeypatch.setattr(check, "CHECKED_OPS", ("router",))

    def set_result(result):
        monkeypatch.setattr(check, "run_check", lambda op, target: result)

    return set_result


def test_doctor_passes_right_kernels(gpu, capsys):
    gpu(CheckResult(1e-6, 2e-5, 9.5))
    assert main(["doctor"]) == 0
    assert "kernels of router: pass error 1.0e-06, 9.5 us" in capsys.readouterr().out


@pytest.mark.parametrize("error", [1e-3, float("nan"), float("inf")])
def test_doctor_fails_wrong_kernels_with_a_remedy(gpu, capsys, error):
    gpu(CheckResult(error, 2e-5, 9.5))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "kernels of router: FAIL" in out
    assert "plan with router='xla'" in out
    assert out.strip().endswith("FAILED")


def test_doctor_names_missing_peer_access(gpu, capsys, monkeypatch):
    from k3jax.runtime import library

    gpu(CheckResult(1e-6, 2e-5, 9.5))
    monkeypatch.setattr(library, "peer_access", lambda: ((True, False), (False, True)))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "device 0 reaches 0" in out
    assert "PROBLEM some devices cannot address each other's memory" in out


def test_doctor_names_a_missing_library(capsys, monkeypatch):
    from k3jax.runtime import library

    def missing():
        raise FileNotFoundError("libk3jax_ffi.so is not here: build it with `pip install .`")

    monkeypatch.setattr(library, "load_library", missing)
    assert doctor.examine()["problems"] == [
        (
            "the native library does not load",
            "libk3jax_ffi.so is not here: build it with `pip install .`",
        )
    ]


class TestFirstUse:
    """A kernel that never ran on an architecture is checked once before a plan takes it."""

    @pytest.fixture
    def b200(self, monkeypatch):
        target = Target.named("b200")
        monkeypatch.setattr(Target, "current", classmethod(lambda cls: target))
        check.distrust.cache_clear()
        yield target
        check.distrust.cache_clear()

    def test_right_numbers_are_taken(self, b200, monkeypatch):
        calls = []
        monkeypatch.setattr(
            check, "run_check", lambda *args: calls.append(args) or CheckResult(0.0, 1e-5, 1.0)
        )
        assert check.distrust("router", b200) is None
        assert check.distrust("router", b200) is None
        assert len(calls) == 1

    def test_wrong_numbers_fall_back_with_a_warning(self, b200, monkeypatch, caplog):
        from k3jax import MoEConfig, plan_layer

        monkeypatch.setattr(check, "run_check", lambda *args: CheckResult(0.5, 1e-5, 1.0))
        plan = plan_layer(MoEConfig.kimi_k3(), 8, tp=8, target=b200)
        assert plan.router.tier == "xla"
        assert "wrong on sm_100a: error 5.0e-01" in dict(plan.router.declined)["kernel"]
        assert "router kernels are not used: wrong on sm_100a" in caplog.text
        with pytest.raises(ValueError, match="router='kernel' cannot run here: wrong on sm_100a"):
            plan_layer(MoEConfig.kimi_k3(), 8, tp=8, target=b200, router="kernel")

    def test_a_crash_falls_back_with_its_words(self, b200, monkeypatch):
        def crash(*args):
            raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")

        monkeypatch.setattr(check, "run_check", crash)
        assert "failed: CUDA_ERROR_NO_BINARY_FOR_GPU" in check.distrust("router", b200)

    def test_proven_and_absent_devices_are_not_checked(self, b200, monkeypatch):
        monkeypatch.setattr(check, "run_check", lambda *args: pytest.fail("checked"))
        assert check.distrust("router", Target.named("h200")) is None
        assert check.distrust("router", Target.named("b300")) is None
        assert check.distrust("router", Target.named("cpu")) is None


def test_exported_layer_loads_again(tmp_path, capsys):
    file = tmp_path / "layer.bin"
    arguments = ["export", str(file), "--tokens", "8", "--tp", "8", "--target", "h200"]
    assert main(arguments) == 0
    assert callable(export.load_function(file.read_bytes()))
    assert main(arguments) == 2
    assert "exists; pass --force" in capsys.readouterr().err


def test_demo_ends_with_a_verdict(capsys):
    assert main(["demo", "--tp", "4"]) == 0
    out = capsys.readouterr().out
    assert "prefill   512 tokens" in out
    assert "OK: every batch is within 6e-03 of float32" in out.splitlines()[-1]


def test_demo_refuses_a_tp_that_does_not_divide(capsys):
    assert main(["demo", "--tp", "3"]) == 2
    assert "tp=3 does not divide this config" in capsys.readouterr().err
