"""The experts' benchmark on a CPU: what it prints, and that it prints no time for wrong numbers."""

import argparse
import dataclasses
import json

import numpy as np
import pytest

import k3jax.bench.experts as bench
from k3jax.bench import bandwidth
from k3jax.config import MoEConfig
from k3jax.runtime.target import Target

SMALL = MoEConfig(
    hidden_size=64,
    latent_size=512,
    num_experts=32,
    experts_per_token=4,
    expert_intermediate_size=128,
    num_shared_experts=1,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    target = dataclasses.replace(Target.named("cpu"), read_bytes_per_second=1e10)
    monkeypatch.setattr(bench, "_CONFIG", SMALL)
    monkeypatch.setattr(bench, "PAIRS", 1)
    monkeypatch.setattr(bench, "CHAINS", (1, 3))
    monkeypatch.setattr(bench.Target, "current", lambda: target)


def run(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["--tp", "2", "--tokens", "1,3", *arguments]))


def test_tables_and_json(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert run("--json", str(file)) == 0
    rows = json.loads(file.read_text())["rows"]
    cases = [(row["routing"], row["num_tokens"]) for row in rows]
    assert cases == [(r, t) for r in bench.ROUTINGS for t in (1, 3)]
    for row in rows:
        share = 3 * 512 * 64 * (1 / 2 + 1 / 32)
        assert row["floor"] == pytest.approx(1e6 * row["distinct"] * share / 1e10)
        assert row["ratio"] == pytest.approx(row["ours"] / row["floor"])
        assert row["num_tokens"] * 4 >= row["distinct"] >= 4
    assert capsys.readouterr().out.count("one rank of TP=2") == 2


def test_no_time_for_a_wrong_output(monkeypatch, capsys):
    right = bench.routed_experts
    monkeypatch.setattr(
        bench, "routed_experts", lambda *args, **options: right(*args, **options) * 2
    )
    monkeypatch.setattr(
        bench, "_reference", lambda *args: right(*args, config=SMALL, tier=bench.ExpertsTier.XLA)
    )
    assert run("--routing", "uniform") == 1
    printed = capsys.readouterr()
    assert printed.err.count("no time is printed") == 2
    assert printed.out.splitlines()[-1] == bench._HEADING


def test_zipf_is_skewed_and_draws_no_expert_twice():
    rng = np.random.default_rng()
    distinct = {}
    for routing in bench.ROUTINGS:
        ids, _ = bench.draw_routes(rng, 64, routing)
        assert all(len(set(token)) == 4 for token in ids.tolist())
        distinct[routing] = np.bincount(ids.ravel(), minlength=32).max()
    assert distinct["zipf"] > distinct["uniform"]


def test_a_card_without_a_known_bandwidth_is_measured(monkeypatch, capsys):
    target = dataclasses.replace(Target.named("b200"), read_bytes_per_second=None)
    monkeypatch.setattr(bench.Target, "current", lambda: target)
    monkeypatch.setattr(bench, "measure_read_bandwidth", lambda: 7.5e12)
    arguments = argparse.Namespace(tp=(), tokens=(), routing=None, seed=0, json=None, plot=None)
    assert bench.run(arguments) == 0
    assert "floors by 7.50 TB/s" in capsys.readouterr().out


def test_bandwidth_leaves_out_what_a_dispatch_costs(monkeypatch):
    """On a clock where each run costs 3 s and each read in it 1 s."""
    ticks = iter([0, 13] + [0, 13, 0, 5] * 5)
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: next(ticks))
    assert bandwidth.measure_read_bandwidth(1 << 20) == 1 << 20


def test_without_kernels_there_is_nothing_to_time(monkeypatch):
    monkeypatch.setattr(bench.Target, "current", lambda: Target.named("cpu"))
    with pytest.raises(NotImplementedError, match="'cpu' has no kernels to time"):
        run()
