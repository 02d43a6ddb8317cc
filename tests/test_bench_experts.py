"""The experts' benchmark on a CPU: what it prints, and that it prints no time for wrong numbers."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax.bench.experts as bench
from k3jax.bench import bandwidth, peers, timing
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


XLA = ("xla", "ragged_dot")
"""Peers that run on a CPU."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    target = dataclasses.replace(Target.named("cpu"), read_bytes_per_second=1e10)
    monkeypatch.setattr(bench, "_CONFIG", SMALL)
    monkeypatch.setattr(bench, "CHAIN_CALLS", (2, 2))
    monkeypatch.setattr(bench.Target, "current", lambda: target)
    for name in ("PAIRS", "MOST_RUNS"):
        monkeypatch.setattr(timing, name, 1)
    monkeypatch.setattr(timing, "SETTLE", 0)


def run(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["--tp", "2", "--tokens", "1,3", *arguments]))


def doubled(function):
    return lambda *args, **options: function(*args, **options) * 2


def test_tables_and_json(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert run("--peers", "none", "--json", str(file)) == 0
    facts = json.loads(file.read_text())
    assert facts["read_bytes_per_second"] == 1e10
    cases = [(row["routing"], row["num_tokens"]) for row in facts["rows"]]
    assert cases == [(r, t) for r in bench.ROUTINGS for t in (1, 3)]
    for row in facts["rows"]:
        share = 3 * 512 * 64 * (1 / 2 + 1 / 32)
        assert row["floor"] == pytest.approx(1e6 * row["distinct"] * share / 1e10)
        assert row["num_tokens"] * 4 >= row["distinct"] >= 4
        assert bench.Row(**row).ratio == row["ours"] / row["floor"]
    printed = capsys.readouterr().out
    assert printed.count("one rank of TP=2") == 2

    picture = tmp_path / "rows.png"
    assert run("--load", str(file), "--plot", str(picture)) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[1:] == printed.splitlines()[2:]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_rows_that_readme_shows(capsys):
    file = Path(__file__).parents[1] / "docs/bench/experts_h200.json"
    assert run("--load", str(file)) == 0
    assert capsys.readouterr().out.count("one rank of TP=") >= 4
    rows = [bench.Row(**row) for row in json.loads(file.read_text())["rows"]]
    assert all(row.error <= bench.LIMIT and row.ratio > 1 for row in rows)


def test_peers_are_checked_too(monkeypatch, capsys):
    """A wrong one is dropped, and one that compiles for GPUs only; the table goes on without."""
    monkeypatch.setattr(peers, "_ragged_dot", doubled(peers._ragged_dot))
    names = "xla,ragged_dot,mosaic"
    assert run("--routing", "uniform", "--tokens", "3", "--peers", names) == 0
    printed = capsys.readouterr()
    assert "peer ragged_dot is dropped: ragged_dot with 3 tokens" in printed.err
    assert "peer mosaic is dropped" in printed.err
    heading, line = printed.out.splitlines()[-2:]
    assert heading.split()[-4:-1] == ["xla", "ragged_dot", "mosaic"]
    assert len(line.split()) == 7  # a time for the XLA tier alone


@pytest.mark.parametrize(
    ("given", "used", "said"),
    [
        ((), timing.REST, f"{1e3 * timing.REST:g} ms of rest before a sample"),
        (("--rest", "0.25"), 0.25, "250 ms of rest before a sample"),
        (("--rest", "0"), 0, "under sustained load"),
    ],
)
def test_ours_and_peers_are_timed_alike(given, used, said, monkeypatch, tmp_path, capsys):
    rests = []
    monkeypatch.setattr(peers, "device_seconds", lambda start, rest: rests.append(rest) or 1.0)
    file = tmp_path / "rows.json"
    names = "xla,ragged_dot"
    assert run("--tokens", "3", "--peers", names, "--json", str(file), *given) == 0
    assert rests == [used] * 3 * len(bench.ROUTINGS)
    assert json.loads(file.read_text())["rest_seconds"] == used
    printed = capsys.readouterr().out
    assert printed.count(f"microseconds, {said}") == len(bench.ROUTINGS)
    assert run("--load", str(file)) == 0
    assert capsys.readouterr().out.count(f"microseconds, {said}") == len(bench.ROUTINGS)


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "soon"])
def test_a_rest_is_a_time(value, capsys):
    with pytest.raises(SystemExit):
        run("--rest", value)
    assert f"'{value}' is not a number of seconds" in capsys.readouterr().err


def test_peers_compute_the_experts():
    experts = jax.jit(bench.pack_experts)(bench.random_experts(SMALL, 2, jax.random.key(0)))
    case = bench.Bench(2, Target.current(), 1e10, 0, 1e-3, experts)
    case.peers += peers.peers(XLA, experts, SMALL, print)
    row = case.measure(5, "uniform")
    assert tuple(row.peers) == XLA
    assert np.isfinite(list(row.peers.values())).all()  # on a busy machine a difference may be < 0


def test_a_peer_that_is_not_installed_is_absent(monkeypatch):
    said = []
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(peers, "MOSAIC_MODULE", "jax.not_there")
    experts = jax.jit(bench.pack_experts)(bench.random_experts(SMALL, 2, jax.random.key(0)))
    names = [peer.name for peer in peers.peers(peers.PEERS, experts, SMALL, said.append)]
    assert names == list(XLA)
    assert said[0] == "peer mosaic is absent: No module named 'jax.not_there'"
    assert said[1].startswith("peer triton_kernels is absent: ")


def test_no_time_for_a_wrong_output(monkeypatch, capsys):
    right = bench.routed_experts
    monkeypatch.setattr(bench, "routed_experts", doubled(right))
    monkeypatch.setattr(
        bench, "_reference", lambda *args: right(*args, config=SMALL, tier=bench.ExpertsTier.XLA)
    )
    assert run("--routing", "uniform", "--peers", "none") == 1
    printed = capsys.readouterr()
    assert printed.err.count("no time is printed") == 2
    assert printed.out.splitlines()[-1] == bench.heading([])


@pytest.mark.parametrize("wrong", [np.nan, 1.1])
def test_no_time_for_a_chain_that_gives_other_numbers(wrong, monkeypatch):
    def call(z, ids, weights, experts):
        return z * weights[:, :1].astype(z.dtype)

    chain = peers.JaxImplementation("ours", 8, call, None, chained=True)
    rng = np.random.default_rng()
    z = jnp.asarray(rng.standard_normal((3, 512)), jnp.bfloat16)
    routes = [bench.draw_routes(rng, 3, "uniform") for _ in range(2)]
    chain.seconds(z, routes, 1e-3)
    outputs = [out * wrong for out in chain.outputs(z, routes)]
    monkeypatch.setattr(peers.JaxImplementation, "outputs", lambda *args: outputs)
    with pytest.raises(bench.WrongOutputError, match="a chain of calls is"):
        chain.seconds(z, routes, 1e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_wrong_wherever_it_is(value):
    experts = jax.jit(bench.pack_experts)(bench.random_experts(SMALL, 2, jax.random.key(0)))
    case = bench.Bench(2, Target.current(), 1e10, 0, 1e-3, experts)
    rng = np.random.default_rng()
    ids, weights = bench.draw_routes(rng, 64, "uniform")
    z = jnp.asarray(rng.standard_normal((64, 512)), jnp.bfloat16)
    out = bench._reference(z, ids, weights, experts)
    assert case._error(z, ids, weights, out, rng) == 0
    assert np.isnan(case._error(z, ids, weights, out.at[63, 511].set(value), rng))
    assert case._error(z, ids, weights, out.at[:, 7].set(40), rng) > bench.LIMIT


def test_a_wrong_call_is_found_wherever_it_is_in_the_chain(monkeypatch):
    experts = jax.jit(bench.pack_experts)(bench.random_experts(SMALL, 2, jax.random.key(0)))
    case = bench.Bench(2, Target.current(), 1e10, 0, 1e-3, experts)
    rng = np.random.default_rng()
    z = jnp.asarray(rng.standard_normal((5, 512)), jnp.bfloat16)
    routes = [bench.draw_routes(rng, 5, "uniform") for _ in range(3)]
    (ours,) = peers.peers(("xla",), experts, SMALL, print)
    right = ours.outputs(z, routes)
    case._time(ours, z, routes, rng)
    for call, wrong in ((2, np.nan), (1, np.nan), (2, 2.0)):
        outputs = [out * wrong if n == call else out for n, out in enumerate(right)]
        monkeypatch.setattr(type(ours), "outputs", lambda *_, outputs=outputs: outputs)
        with pytest.raises(bench.WrongOutputError):
            case._time(ours, z, routes, rng)


def test_an_unknown_peer_is_named():
    with pytest.raises(ValueError, match="--peers 'marlin' is not one of xla,"):
        run("--peers", "xla,marlin")


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
    monkeypatch.setattr(bandwidth, "measure_read_bandwidth", lambda: 7.5e12)
    arguments = argparse.Namespace(
        tp=(),
        tokens=(),
        routing=None,
        seed=0,
        json=None,
        plot=None,
        load=None,
        peers="none",
        rest=0,
    )
    assert bench.run(arguments) == 0
    assert "floors by 7.50 TB/s" in capsys.readouterr().out


def test_bandwidth_is_bytes_over_seconds(monkeypatch):
    monkeypatch.setattr(bandwidth, "device_seconds", lambda start: 0.5)
    assert bandwidth.measure_read_bandwidth(1 << 20) == 1 << 21


def test_without_kernels_there_is_nothing_to_time(monkeypatch):
    monkeypatch.setattr(bench.Target, "current", lambda: Target.named("cpu"))
    with pytest.raises(NotImplementedError, match="'cpu' has no kernels to time"):
        run()
