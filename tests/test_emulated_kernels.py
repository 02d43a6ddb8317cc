"""The library's kernels in the PTX emulator, for Hopper and for Blackwell, against NumPy oracles.

Shapes are the smallest that take every path: a few multiprocessors instead of 132, two slices of
the latent instead of fourteen, up to 16 ranks as block groups of one launch.
"""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from k3jax.config import MoEConfig
from k3jax.ops import kernel_ptx
from k3jax.ops.experts import api as experts_api
from k3jax.ops.experts import decode, grouped
from k3jax.ops.experts.api import run_kernels
from k3jax.ops.experts.packing import pack_experts
from k3jax.ops.kernels import kernel_modules
from k3jax.ops.router import cute as router
from k3jax.ops.tail import fused
from k3jax.runtime.compile import compile_kernel
from k3jax.runtime.target import Target
from tests import oracle
from tests.emulator import emulate, load, run_program
from tests.emulator.jax_calls import emulated  # noqa: F401
from tests.ops import tail_oracle, test_tail_kernels
from tests.support import ONE_OP, bits, numpy_params, params_of

ARCHS = ("sm_90a", "sm_100a")

EXPERTS = MoEConfig(
    hidden_size=64,
    latent_size=512,
    num_experts=6,
    experts_per_token=3,
    expert_intermediate_size=128,
    num_shared_experts=1,
)
NUM_SMS = 4


def small_target(arch: str) -> Target:
    kind = {"sm_90a": "h200", "sm_100a": "b200"}[arch]
    return dataclasses.replace(Target.named(kind), num_sms=NUM_SMS)


@pytest.fixture(scope="module")
def experts():
    """Packed weights, and the oracle's view of them."""
    params = params_of(EXPERTS)
    arrays = numpy_params(params, EXPERTS)
    packed = pack_experts(params.experts)

    def bank(e):
        return [
            oracle.mxfp4_values(
                arrays[f"experts.{w}.weight_packed"][e], arrays[f"experts.{w}.weight_scale"][e]
            )
            for w in ("w1", "w3", "w2")
        ]

    return packed, bank


def operands_of(packed, z, ids, weights):
    return [z, ids, weights, np.asarray(packed.gate_up), np.asarray(packed.down)]


def draw_routes(num_tokens):
    rng = np.random.default_rng()
    z = rng.standard_normal((num_tokens, EXPERTS.latent_size)).astype(tail_oracle.BF16)
    ids = np.stack([rng.permutation(EXPERTS.num_experts)[:3] for _ in range(num_tokens)])
    ids[rng.random(ids.shape) < 0.15] = -1
    return z, ids.astype(np.int32), rng.random(ids.shape).astype(np.float32)


@pytest.mark.parametrize("num_tokens", [1, 5, 17, 70])
@pytest.mark.parametrize("arch", ARCHS)
def test_decode_experts(arch, num_tokens, experts):
    packed, bank = experts
    z, ids, weights = draw_routes(num_tokens)
    program = decode.decode_program(EXPERTS, num_tokens, 1, small_target(arch))
    run = run_program(program, operands_of(packed, z, ids, weights), arch, num_sms=NUM_SMS)
    assert run.written[0].all()
    want = oracle.experts(z.astype(np.float64), ids, weights, bank)
    assert oracle.relative_error(run.results[0], want) < ONE_OP


@pytest.mark.parametrize("arch", ARCHS)
def test_decode_experts_as_rows(arch, experts):
    packed, bank = experts
    z, ids, weights = draw_routes(9)
    program = decode.decode_program(EXPERTS, 9, 1, small_target(arch), weighted=False)
    run = run_program(program, operands_of(packed, z, ids, weights), arch, num_sms=NUM_SMS)
    assert run.written[0].all()
    want = np.zeros(run.results[0].shape)
    for t, slot in np.argwhere(ids >= 0):
        row = oracle.expert_row(z[t].astype(np.float64), *bank(ids[t, slot]), 4.0, 25.0, True)
        want[t, slot] = row
    assert oracle.relative_error(run.results[0], want) < ONE_OP
    assert not run.results[0][ids < 0].astype(np.float32).any()


@pytest.mark.parametrize("num_tokens", [3, 40, 150])
def test_grouped_experts(num_tokens, experts):
    """Only for Hopper: Blackwell has no warpgroup matrix instructions."""
    packed, bank = experts
    z, ids, weights = draw_routes(num_tokens)
    program = grouped.grouped_program(EXPERTS, num_tokens, 1, small_target("sm_90a"))
    run = run_program(program, operands_of(packed, z, ids, weights), num_sms=NUM_SMS)
    assert run.written[0].all()
    want = oracle.experts(z.astype(np.float64), ids, weights, bank)
    assert oracle.relative_error(run.results[0], want) < ONE_OP


@pytest.mark.parametrize(
    ("build", "num_tokens"),
    [(decode.decode_program, 1), (decode.decode_program, 5), (grouped.grouped_program, 40)],
)
def test_experts_with_every_lane_arriving(build, num_tokens, experts, monkeypatch, tmp_path):
    """The builds that tests/gpu/test_sanitizer.py checks for races."""
    packed, _ = experts
    z, ids, weights = draw_routes(num_tokens)
    program = build(EXPERTS, num_tokens, 1, small_target("sm_90a"))
    operands = operands_of(packed, z, ids, weights)
    (one_lane,) = emulate(program, operands, num_sms=NUM_SMS)
    monkeypatch.setattr(kernel_ptx, "ARRIVING_LANES", 32)
    monkeypatch.setenv("K3JAX_CACHE_DIR", str(tmp_path))
    (every_lane,) = emulate(program, operands, num_sms=NUM_SMS)
    np.testing.assert_array_equal(bits(every_lane), bits(one_lane))
    assert any(tmp_path.iterdir())  # compiled anew


@pytest.mark.parametrize("seed", [1, 2])
def test_decode_experts_under_other_schedules(seed, experts):
    """Sums have one order, so every schedule gives the same bits."""
    packed, _ = experts
    z, ids, weights = draw_routes(6)
    program = decode.decode_program(EXPERTS, 6, 1, small_target("sm_90a"))
    operands = operands_of(packed, z, ids, weights)
    (plain,) = emulate(program, operands, num_sms=NUM_SMS)
    (other,) = emulate(program, operands, num_sms=NUM_SMS, seed=seed)
    np.testing.assert_array_equal(bits(plain), bits(other))


@pytest.mark.parametrize("num_tokens", [1, 19])
@pytest.mark.parametrize("arch", ARCHS)
def test_router(arch, num_tokens):
    config = MoEConfig.tiny()
    rng = np.random.default_rng()
    x = rng.standard_normal((num_tokens, config.hidden_size)).astype(tail_oracle.BF16)
    gate = (rng.standard_normal((config.num_experts, config.hidden_size)) / 16).astype(x.dtype)
    bias = (rng.standard_normal(config.num_experts) / 16).astype(np.float32)
    ids, weights = emulate(router.route_program(config, num_tokens), [x, gate, bias], arch)
    logits = x.astype(np.float64) @ gate.astype(np.float64).T
    want_ids, want = oracle.route(logits, bias, config.experts_per_token)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want, atol=2e-5, rtol=0)


@pytest.mark.usefixtures("emulated")
def test_ops_inside_jax(experts):
    """The operands reach the kernels in the order that the ops bind them."""
    packed, bank = experts
    z, ids, weights = draw_routes(4)
    target = small_target("sm_90a")
    want = oracle.experts(z.astype(np.float64), ids, weights, bank)
    for tier in ("decode", "grouped"):
        run = jax.jit(partial(run_kernels, tier=tier, config=EXPERTS, tp=1, target=target))
        assert oracle.relative_error(run(z, ids, weights, packed), want) < ONE_OP
    empty = run(z[:0], ids[:0], weights[:0], packed)
    assert empty.shape == (0, EXPERTS.latent_size)


@pytest.mark.usefixtures("emulated")
def test_more_tokens_than_one_call_takes(experts, monkeypatch):
    packed, bank = experts
    z, ids, weights = draw_routes(5)
    build = experts_api._KERNELS["grouped"][0]
    monkeypatch.setitem(experts_api._KERNELS, "grouped", (build, 2))
    target = small_target("sm_90a")
    run = jax.jit(partial(run_kernels, tier="grouped", config=EXPERTS, tp=1, target=target))
    want = oracle.experts(z.astype(np.float64), ids, weights, bank)
    assert oracle.relative_error(run(z, ids, weights, packed), want) < ONE_OP


@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("ranks", fused.RANKS)
def test_tail_for_blackwell(ranks, two_shot, monkeypatch):
    """All ranks in one launch, as tests/ops runs it for Hopper; the third call re-arms a slot."""
    blackwell = lambda kernel, arch: compile_kernel(kernel, "sm_100a")  # noqa: E731
    monkeypatch.setattr(test_tail_kernels, "compile_kernel", blackwell)
    loopback = test_tail_kernels.Loopback(*test_tail_kernels.SHAPES[ranks])
    for tokens in (3, 8, 1):
        arrays = loopback.draw(np.random.default_rng(), tokens)
        test_tail_kernels.check(loopback.call(arrays, two_shot), arrays)


MODULES = [m for m in kernel_modules() if not m.__name__.endswith("kernel_multicast")]
"""All but the one whose `multimem` the emulator refuses."""


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_kernel_is_made_of_known_instructions(module):
    """At K3's sizes, for Blackwell: parsed and bound, not run."""
    for kernel in module.REPRESENTATIVES.values():
        if kernel.compiles_for("sm_100a"):
            compiled = compile_kernel(kernel, "sm_100a")
            assert load(compiled.ptx, compiled.entry).blocks
