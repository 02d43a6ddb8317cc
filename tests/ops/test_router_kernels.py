"""The router kernels: what they support, how they are built, and their numbers."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import MoEConfig
from k3jax.ops.router import cute
from k3jax.runtime.compile import ARCHS, compile_kernel
from k3jax.runtime.program import Operand, Result
from k3jax.runtime.target import Target
from tests import oracle
from tests.emulator import run_program
from tests.support import ROUTED_LIKE_K3, TINY

K3 = MoEConfig.kimi_k3()
SMALLEST_SCORE_LOGIT = -87.33
"""Scores of smaller logits are below the smallest normal float32 and count as 0."""


def routed(num_experts, top_k, **options):
    return dataclasses.replace(
        ROUTED_LIKE_K3, num_experts=num_experts, experts_per_token=top_k, **options
    )


def route_in_float32(logits, bias, config):
    """The choice with the sigmoid rounded once to float32: exact, whatever the rows."""
    logits, bias = np.asarray(logits, np.float32), np.asarray(bias, np.float32)
    finite = np.isfinite(logits)
    exact = np.where(finite, logits, 0).astype(np.float64)
    with np.errstate(over="ignore"):
        score = (1 / (1 + np.exp(-exact))).astype(np.float32)
    score[~finite | (logits < SMALLEST_SCORE_LOGIT)] = 0
    choice = np.where(finite, score + bias, -np.inf)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, : config.experts_per_token]
    weights = np.take_along_axis(score, ids, axis=1).astype(np.float64)
    if config.renormalize:
        weights /= weights.sum(axis=1, keepdims=True) + 1e-20
    weights *= config.routed_scaling_factor
    weights[~finite.any(axis=1)] = 1 / config.experts_per_token if config.renormalize else 0
    return ids, weights


def check_choice(got, logits, bias, config):
    ids, weights = (np.asarray(x) for x in got)
    want_ids, want_weights = route_in_float32(logits, bias, config)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(
        weights, want_weights, atol=2e-5 * config.routed_scaling_factor, rtol=0
    )


def edge_rows(rng, rows=3, experts=896):
    """Named (logits [rows, experts], bias [experts]) where choices go wrong if they can."""
    normal = rng.standard_normal((rows, experts))
    bias = rng.standard_normal(experts)
    zero = np.zeros(experts)
    yield "normal", normal, 0.05 * bias
    yield "narrow", 0.2 * normal, 0.3 * bias
    yield "equal", np.full_like(normal, 1.5), zero
    yield "equal, biased", np.zeros_like(normal), bias
    yield "sum of zero", np.zeros_like(normal), np.full(experts, -0.5)
    yield "ties", rng.integers(-2, 3, normal.shape), np.round(2 * bias) / 4
    yield "signed zeros", np.where(rng.random(normal.shape) < 0.5, -0.0, 0.0), zero
    yield "negative", -5 * np.abs(normal) - 3, zero
    yield "scores below float32", -100 * np.abs(normal) - 60, 1e-3 * bias
    yield "no score at all", np.full_like(normal, -1e30), zero
    yield "saturated", 30 * np.abs(normal) + 10, 1e-7 * bias
    yield "huge bias", normal, 1e30 * bias
    yield "tiny bias", normal, 1e-30 * bias
    yield "negative bias", normal, -3 * np.abs(bias)


def non_finite_rows(rng, bad, experts=896, top_k=16):
    """Rows with all, few, just enough, one too few and no finite logits."""
    logits = rng.standard_normal((7, experts))
    logits[0, ::3] = bad
    logits[1, : experts - top_k] = bad
    logits[2, top_k - 1 :] = bad
    logits[3, 1:] = bad
    logits[4, :-1] = bad
    logits[5] = bad
    logits[6, rng.permutation(experts)[: experts - 5]] = bad
    return logits


def winner_rows(rng, winners, experts=896):
    """One row for each winner, which beats all others."""
    logits = rng.standard_normal((len(winners), experts))
    logits[np.arange(len(winners)), winners] = 9
    return logits


# What is supported.


@pytest.mark.parametrize("config", [K3, TINY, ROUTED_LIKE_K3, routed(512, 8), routed(1, 1)])
def test_published_and_test_configs_are_supported(config):
    assert cute.choose_refusal(config) is None
    assert (cute.logits_refusal(config, 1) is None) == (config.num_experts % 8 == 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (routed(1025, 16), "num_experts=1025.*at most 1024"),
        (routed(64, 33), "experts_per_token=33"),
    ],
)
def test_choose_refusals_say_why(config, message):
    assert re.search(message, cute.choose_refusal(config))


@pytest.mark.parametrize(
    ("config", "num_tokens", "message"),
    [
        (K3, cute.MAX_TOKENS + 1, "33 tokens.*1 to 32"),
        (K3, 0, "0 tokens"),
        (routed(30, 4), 1, "num_experts=30"),
        (dataclasses.replace(K3, hidden_size=65536), 1, "hidden_size=65536"),
    ],
)
def test_logits_refusals_say_why(config, num_tokens, message):
    assert re.search(message, cute.logits_refusal(config, num_tokens))


# How the programs are built.


def test_k3_fills_the_device_with_one_wave_of_equal_blocks():
    logits = cute.route_program(K3, 1).launches[0].kernel
    assert (logits.row_tiles, logits.k_splits) == (7, 8)
    assert np.prod(logits.grid) == 128
    assert logits.steps * logits.k_splits * 32 == K3.hidden_size


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 16, 17, 32])
def test_route_program(num_tokens):
    program = cute.route_program(K3, num_tokens)
    logits, select = program.launches
    assert select.overlaps_previous
    assert not logits.overlaps_previous
    assert logits.arguments == (Operand(0), Operand(1), Result(2), num_tokens)
    assert select.arguments == (Result(2), Operand(2), Result(0), Result(1), num_tokens)
    assert select.kernel.num_partials == program.results[2].shape[0] == logits.kernel.k_splits
    assert program.num_scratch == 1
    assert logits.kernel.max_tokens >= num_tokens


def test_token_counts_share_kernels():
    kernels = {launch.kernel for t in range(1, 33) for launch in cute.route_program(K3, t).launches}
    assert len(kernels) == 4  # logits of up to 8, 16 and 32 tokens, and one choice
    chosen = {cute.choose_program(K3, t).launches[0].kernel for t in (1, 32, 33, 4096)}
    assert len(chosen) == 2


@pytest.mark.parametrize("arch", ARCHS)
def test_weights_are_loaded_before_the_wait_and_tokens_after(arch):
    logits = cute.route_program(K3, 1).launches[0].kernel
    ptx = compile_kernel(logits, arch).ptx
    wait = ptx.index("griddepcontrol.wait")
    weights = [m.start() for m in re.finditer(r"ld\.global\.nc", ptx)]
    assert len(weights) == logits.steps
    assert max(weights) < ptx.index("griddepcontrol.launch_dependents") < wait
    assert wait < ptx.index("cp.async.cg") < ptx.index("mma.sync")
    assert ptx.count("mma.sync") == 2 * logits.steps


@pytest.mark.parametrize("arch", ARCHS)
def test_choice_reads_logits_after_the_wait(arch):
    select = cute.route_program(K3, 1).launches[1].kernel
    ptx = compile_kernel(select, arch).ptx
    loads = [m.start() for m in re.finditer(r"ld\.global\.f32", ptx)]
    wait = ptx.index("griddepcontrol.wait")
    assert sum(at < wait for at in loads) == 1  # the bias
    assert sum(at > wait for at in loads) == select.num_partials


def test_empty_batches_need_no_kernel():
    x = jnp.zeros((0, K3.hidden_size), jnp.bfloat16)
    weight = jnp.zeros((K3.num_experts, K3.hidden_size), jnp.bfloat16)
    ids, weights = cute.route(
        x, weight, jnp.zeros(K3.num_experts), config=K3, target=Target.named("h200")
    )
    assert (ids.shape, ids.dtype) == ((0, 16), jnp.int32)
    assert (weights.shape, weights.dtype) == ((0, 16), jnp.float32)


@pytest.mark.parametrize(("num_tokens", "products"), [(1, 0), (32, 0), (33, 1)])
def test_route_is_one_custom_call_with_a_product_before_it_past_the_limit(num_tokens, products):
    shapes = (
        jax.ShapeDtypeStruct((num_tokens, K3.hidden_size), jnp.bfloat16),
        jax.ShapeDtypeStruct((K3.num_experts, K3.hidden_size), jnp.bfloat16),
        jax.ShapeDtypeStruct((K3.num_experts,), jnp.float32),
    )
    target = Target.named("b200")
    route = jax.jit(lambda *arrays: cute.route(*arrays, config=K3, target=target))
    text = route.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @k3jax_launch") == 1
    assert text.count("dot_general") == products


# Numbers, of the PTX in the emulator and of the machine code on a GPU.


class Runner:
    """Runs the op on a GPU, or its program in the emulator.

    Attributes:
        arch: architecture to emulate; None for the GPU of this machine.
    """

    def __init__(self, arch):
        self.arch = arch

    def few_or_many(self, few, many):
        """How much of a test to run: the emulator is slow."""
        return few if self.arch else many

    def choose(self, logits, bias, config):
        arrays = [np.asarray(logits, np.float32), np.asarray(bias, np.float32)]
        if self.arch:
            return self.emulate(cute.choose_program(config, len(logits)), arrays)
        return self.run(cute.choose, arrays, config)

    def route(self, x, weight, bias, config, **options):
        arrays = [np.asarray(a, jnp.bfloat16) for a in (x, weight)] + [np.asarray(bias, np.float32)]
        if self.arch:
            return self.emulate(cute.route_program(config, len(x)), arrays, **options)
        return self.run(cute.route, arrays, config)

    def emulate(self, program, arrays, **options):
        emulation = run_program(program, arrays, self.arch, **options)
        assert all(written.all() for written in emulation.written)
        return emulation.results[:2]

    def run(self, function, arrays, config):
        function = functools.partial(function, config=config, target=Target.current())
        return [np.asarray(result) for result in jax.jit(function)(*arrays)]


@pytest.fixture(params=["sm_90a", "sm_100a", pytest.param(None, marks=pytest.mark.gpu)])
def runner(request):
    return Runner(request.param)


@pytest.mark.parametrize(("scale", "bias_scale"), [(1.0, 0.05), (4.0, 0.0), (0.2, 0.3)])
def test_random_rows(runner, scale, bias_scale):
    rng = np.random.default_rng()
    logits = scale * rng.standard_normal((runner.few_or_many(500, 10_000), 896))
    bias = bias_scale * rng.standard_normal(896)
    check_choice(runner.choose(logits, bias, K3), logits, bias, K3)


@pytest.mark.parametrize("num_tokens", [2, 40])
def test_edge_rows(runner, num_tokens):
    for name, logits, bias in edge_rows(np.random.default_rng(), num_tokens):
        print(name)
        check_choice(runner.choose(logits, bias, K3), logits, bias, K3)


def test_any_expert_can_win(runner):
    winners = runner.few_or_many([0, *range(31, 896, 32), *range(32, 896, 32)], np.arange(896))
    logits = winner_rows(np.random.default_rng(), winners)
    got = runner.choose(logits, np.zeros(896), K3)
    np.testing.assert_array_equal(got[0][:, 0], winners)
    check_choice(got, logits, np.zeros(896), K3)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_logits(runner, bad, renormalize):
    config = dataclasses.replace(K3, renormalize=renormalize, routed_scaling_factor=2.5)
    rng = np.random.default_rng()
    logits = non_finite_rows(rng, bad)
    for bias in (rng.standard_normal(896), -9 - np.abs(rng.standard_normal(896))):
        check_choice(runner.choose(logits, bias, config), logits, bias, config)


@pytest.mark.parametrize(
    ("experts", "top_k"), [(1, 1), (7, 7), (32, 4), (512, 8), (1000, 32), (1024, 16)]
)
@pytest.mark.parametrize("experts_per_thread", [1, 2])
def test_shapes(runner, experts, top_k, experts_per_thread):
    rng = np.random.default_rng()
    tokens = 3 if experts_per_thread == 1 else cute.MAX_TOKENS + 1
    logits = rng.standard_normal((tokens, experts))
    bias = 0.1 * rng.standard_normal(experts)
    config = routed(experts, top_k)
    kernel = cute.choose_program(config, tokens).launches[0].kernel
    assert kernel.experts_per_thread == experts_per_thread
    check_choice(runner.choose(logits, bias, config), logits, bias, config)


def route_inputs(rng, config, num_tokens):
    x = oracle.bf16(rng.standard_normal((num_tokens, config.hidden_size)))
    shape = (config.num_experts, config.hidden_size)
    weight = oracle.bf16(rng.standard_normal(shape) / config.hidden_size**0.5)
    return x, weight, (0.05 * rng.standard_normal(config.num_experts)).astype(np.float32)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32])
def test_route(runner, num_tokens):
    """Right for every bucket and edge, and a token's result does not depend on the others."""
    rng = np.random.default_rng()
    for config in runner.few_or_many((TINY,), (TINY, K3)):
        x, weight, bias = route_inputs(rng, config, num_tokens)
        ids, weights = runner.route(x, weight, bias, config)
        check_route(ids, weights, x, weight, bias, config)
        for t in {0, num_tokens - 1}:
            alone = runner.route(x[t : t + 1], weight, bias, config)
            np.testing.assert_array_equal(alone[0][0], ids[t])
            np.testing.assert_array_equal(alone[1][0], weights[t])


def test_route_at_k3_size(runner):
    x, weight, bias = route_inputs(np.random.default_rng(), K3, 2)
    check_route(*runner.route(x, weight, bias, K3), x, weight, bias, K3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [33, 64, 65, 300])
def test_route_of_many_tokens(num_tokens):
    x, weight, bias = route_inputs(np.random.default_rng(), K3, num_tokens)
    check_route(*Runner(None).route(x, weight, bias, K3), x, weight, bias, K3)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_schedule_does_not_show(arch):
    inputs = route_inputs(np.random.default_rng(), TINY, 9)
    ids, weights = Runner(arch).route(*inputs, TINY)
    for seed in range(3):
        again = Runner(arch).route(*inputs, TINY, seed=seed)
        np.testing.assert_array_equal(again[0], ids)
        np.testing.assert_array_equal(again[1], weights)


def test_a_non_finite_token_spoils_no_other():
    rng = np.random.default_rng()
    x, weight, bias = route_inputs(rng, TINY, 3)
    spoilt = x.copy()
    spoilt[1, 5] = np.nan
    ids, weights = Runner("sm_90a").route(x, weight, bias, TINY)
    got_ids, got_weights = Runner("sm_90a").route(spoilt, weight, bias, TINY)
    np.testing.assert_array_equal(got_ids[[0, 2]], ids[[0, 2]])
    np.testing.assert_array_equal(got_weights[[0, 2]], weights[[0, 2]])
    np.testing.assert_array_equal(got_ids[1], np.arange(TINY.experts_per_token))
    np.testing.assert_array_equal(got_weights[1], 1 / TINY.experts_per_token)


def check_route(ids, weights, x, weight, bias, config):
    """Ids may differ from float64 only where the order of a float32 sum can turn the choice."""
    ids, logits = np.asarray(ids), x @ weight.T
    want, _ = oracle.route(logits, bias, config.experts_per_token)
    score = 1 / (1 + np.exp(-logits))
    gap = np.take_along_axis(score + bias, want, 1) - np.take_along_axis(score + bias, ids, 1)
    assert np.abs(gap).max() < 1e-5
    assert (ids != want).mean() < 0.01
    for row in ids:
        assert len(set(row)) == config.experts_per_token
    chosen = np.take_along_axis(score, ids, 1)
    want_weights = chosen / chosen.sum(1, keepdims=True)
    np.testing.assert_allclose(np.asarray(weights), want_weights, atol=2e-5, rtol=0)
