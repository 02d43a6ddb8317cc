"""The experts of one token, in the emulator, against the oracle and the decode kernel's bits."""

import dataclasses

import numpy as np
import pytest

from k3jax.ops.experts import decode
from k3jax.ops.experts.packing import pack_experts
from k3jax.ops.experts.single import single_program
from k3jax.runtime.compile import ARCHS, compile_kernel
from k3jax.runtime.sass import inspect_cubin
from k3jax.runtime.target import Target
from tests.emulator import run_program
from tests.ops.test_expert_kernels import K3, SMALL, Case, case, target
from tests.support import bits


class SingleCase(Case):
    """A case of one token."""

    def emulate(self, num_sms=3, weighted=True, **options):
        packed = pack_experts(self.params)
        operands = [self.z, self.ids, self.weights, packed.gate_up, packed.down]
        operands = [np.asarray(operand) for operand in operands]
        program = single_program(self.config, 1, target(num_sms), weighted)
        emulation = run_program(program, operands, num_sms=num_sms, **options)
        assert emulation.written[0].all()
        return emulation

    def run(self, **options):
        return self.emulate(**options).results[0]

    def on_decode_kernel(self, weighted=True):
        packed = pack_experts(self.params)
        operands = [self.z, self.ids, self.weights, packed.gate_up, packed.down]
        program = decode._program(self.config, 1, 1, target(3), weighted)
        return run_program(program, [np.asarray(x) for x in operands], num_sms=3).results[0]


def single(ids=None, **options):
    one = case(1, None if ids is None else np.array([ids], np.int32), **options)
    return SingleCase(*(getattr(one, field.name) for field in dataclasses.fields(one)))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "ids", [[4, 1, 7, 2], [3, 3, 1, 3], [-1, 5, -1, 2], [6, -1, -1, -1], [0, 2, 9, 8], [-1] * 4]
)
def test_bits_are_those_of_the_decode_kernel(ids, weighted):
    """Distinct experts, one several times, dropped slots, ids that no expert has, none at all."""
    one = single(ids)
    got = one.run(weighted=weighted)
    np.testing.assert_array_equal(bits(got), bits(one.on_decode_kernel(weighted)))
    if max(ids) < 8:
        one.check(weighted)


@pytest.mark.parametrize("num_sms", [1, 2, 5, 12, 40])
def test_any_number_of_multiprocessors(num_sms):
    """One round of gate/up tiles or many, blocks with no tile, blocks with no rows of down."""
    single().check(num_sms=num_sms)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_any_schedule(seed):
    single([2, -1, 0, 5]).check(seed=seed)


@pytest.mark.parametrize("inner", [128, 192, 320, 512])
def test_inner_sizes(inner):
    """Whole and broken groups of chunks, and hidden values that a warp takes in several rounds."""
    config = dataclasses.replace(SMALL, expert_intermediate_size=inner)
    single(config=config).check(num_sms=32)


@pytest.mark.parametrize("latent", [256, 768, 1280])
def test_gate_up_warps(latent):
    """One, or an odd number: the last copy of a tile brings the slice of a single warp."""
    single(config=dataclasses.replace(SMALL, latent_size=latent)).check(num_sms=5)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ring(seed):
    """Far more tiles of a block than its ring holds, in any order of the warps."""
    config = dataclasses.replace(SMALL, expert_intermediate_size=192)
    single(config=config).check(num_sms=2, seed=seed)


@pytest.mark.parametrize("top_k", [1, 6, 16, 20, 28])
def test_slots(top_k):
    single(config=dataclasses.replace(SMALL, num_experts=40, experts_per_token=top_k)).check()


@pytest.mark.parametrize("scales", [(0, 8), (124, 132), (244, 253)])
def test_scales_of_every_size(scales):
    one = single(scales=scales)
    got, want = one.run(weighted=False), one.on_decode_kernel(weighted=False)
    np.testing.assert_array_equal(bits(got), bits(want))


def test_runs_of_a_call_follow_each_other():
    """What a run keeps is not what the next one waits for, whatever slots either drops."""
    one, kept = single(), None
    size = one.ids.size * one.config.expert_intermediate_size // 2
    for number in range(4):
        one.z = np.random.default_rng().standard_normal(one.z.shape).astype(one.z.dtype)
        one.ids[0, number] = -1
        emulation = one.emulate(kept=kept)
        np.testing.assert_array_equal(bits(emulation.results[0]), bits(one.on_decode_kernel()))
        kept = emulation.kept
        halves, counts = kept[0][: 2 * size].reshape(2, size), kept[0][2 * size :]
        assert (counts == np.uint32(number)).all()
        assert (halves[number % 2] == 0xFFFFFFFF).all()


def test_without_cap_of_the_linear_branch():
    one = single(config=dataclasses.replace(SMALL, situ_linear_beta=None))
    np.testing.assert_array_equal(bits(one.run()), bits(one.on_decode_kernel()))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_of_the_token(poison):
    one = single()
    one.z[0, 5] = poison
    np.testing.assert_array_equal(bits(one.run()), bits(one.on_decode_kernel()))


def test_it_is_what_decode_takes_for_one_token():
    for kind in ("h200", "b200", "b300"):
        for tp in (8, 16):
            program = decode.decode_program(K3, 1, tp, Target.named(kind))
            assert [type(launch.kernel).__name__ for launch in program.launches] == [
                "SingleTokenKernel"
            ]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tp", [8, 16])
def test_k3_compiles_without_spills(tp, arch):
    (launch,) = single_program(K3, tp, Target.named("h200")).launches
    (report,) = inspect_cubin(compile_kernel(launch.kernel, arch).cubin)
    assert not report.spills


@pytest.mark.parametrize(
    ("change", "tp"),
    [({}, 1), ({}, 2), ({"experts_per_token": 17}, 8), ({"latent_size": 4096}, 8)],
)
def test_what_does_not_fit_is_left_to_the_decode_kernel(change, tp):
    """Weights, warps for down, warps for gate/up."""
    assert single_program(dataclasses.replace(K3, **change), tp, Target.named("h200")) is None
