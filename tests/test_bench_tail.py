"""The tail's benchmark on CPU devices, between which the fused tail runs on the host."""

import argparse
import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import k3jax.bench.tail as bench
from k3jax.bench import timing
from k3jax.config import MoEConfig
from k3jax.runtime.target import Target

SMALL = MoEConfig(
    hidden_size=64,
    latent_size=32,
    num_experts=8,
    experts_per_token=2,
    expert_intermediate_size=64,
    num_shared_experts=1,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    target = dataclasses.replace(Target.named("cpu"), read_bytes_per_second=1e10)
    monkeypatch.setattr(bench, "_CONFIG", SMALL)
    monkeypatch.setattr(bench, "LAYERS", 3)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "FUSED_ROUNDS", 2)
    monkeypatch.setattr(bench, "PLAIN_ROUNDS", 2)
    monkeypatch.setattr(bench.Target, "current", lambda: target)
    for name in ("PAIRS", "MOST_RUNS"):
        monkeypatch.setattr(timing, name, 1)
    monkeypatch.setattr(timing, "SETTLE", 0)


def run(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["--tokens", "1,5", *arguments]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_tier_over_ranks(ranks, tmp_path, capsys):
    file = tmp_path / "rows.json"
    rest = timing.REST if ranks == 2 else 0
    arguments = () if rest else ("--rest", "0")
    assert run("--mode", "real", "--real", str(ranks), "--json", str(file), *arguments) == 0
    facts = json.loads(file.read_text())
    assert facts["rest_seconds"] == rest
    rows = facts["rows"]
    assert [(row["mode"], row["tp"], row["num_tokens"]) for row in rows] == [
        ("real", ranks, 1),
        ("real", ranks, 5),
    ]
    for row in rows:
        assert row["floor"] == pytest.approx(1e6 * 2 * 64 * 32 / ranks / 1e10)
        assert list(row["times"]) == list(bench.REAL_TIERS)
    assert f"real, TP={ranks}, microseconds, {timing.regime(rest)}" in capsys.readouterr().out


def test_no_time_for_a_wrong_output(monkeypatch, capsys):
    right = bench.latent_tail
    monkeypatch.setattr(bench, "latent_tail", lambda *args, **more: right(*args, **more) * 2)
    assert run("--mode", "real", "--real", "2") == 1
    printed = capsys.readouterr()
    assert printed.err.count("no time is printed") == 2
    assert printed.out.splitlines()[-1].startswith("real, TP=2, microseconds, ")


def test_no_time_for_ranks_that_differ(monkeypatch, capsys):
    right = bench.latent_tail

    def skewed(*args, group, **more):
        return right(*args, group=group, **more) * (1 + group.index() * 2**-7)

    monkeypatch.setattr(bench, "latent_tail", skewed)
    assert run("--mode", "real", "--real", "2") == 1
    assert capsys.readouterr().err.count("ranks hold different bits") == 2


def test_by_default_all_devices_are_ranks(capsys):
    assert run("--tokens", "1") == 0
    printed = capsys.readouterr().out
    assert "real, TP=16" in printed
    assert "solo" not in printed  # which needs a kernel


def test_one_device_has_no_real_mode():
    with pytest.raises(ValueError, match="the real mode needs 2 or more GPUs"):
        run("--mode", "real", "--real", "1")


def test_without_kernels_there_is_nothing_to_time(monkeypatch):
    monkeypatch.setattr(bench.Target, "current", lambda: Target.named("cpu"))
    with pytest.raises(NotImplementedError, match="'cpu' has no kernels to time"):
        run()


def test_the_plain_order_alone_is_checked():
    solo = bench.Solo(2, Target.current())
    rng = np.random.default_rng()
    solo.wholes = [bench._random_bfloat16(rng, (64, 32), 0.2) for _ in range(3)]
    assert np.isfinite(solo._plain(5, rng))


def test_layers_come_one_after_another():
    """Every all-reduce of the program stays apart: none is merged with another layer's."""
    real = bench.Real.over(2, Target.current())
    rng = np.random.default_rng()
    shapes = ((2, 5, 32), (2, 5, 64), (32,))
    rows = [bench._random_bfloat16(rng, shape) for shape in shapes]
    ups = [bench._random_bfloat16(rng, (64, 32)) for _ in range(3)]
    chain = real._chain(bench.TailTier.ALLREDUCE_OVERLAP, 2, last=True)
    text = chain.lower(*rows, ups, jnp.bfloat16(0)).compile().as_text()
    assert text.count(" all-reduce(") == 2 * 3 * 2
