"""The experts of a few tokens, in the emulator, against the oracle and the decode kernel's bits."""

import dataclasses

import numpy as np
import pytest

from k3jax.ops.experts import decode
from k3jax.ops.experts.few import few_program
from k3jax.ops.experts.packing import pack_experts
from k3jax.runtime.compile import ARCHS, compile_kernel
from k3jax.runtime.sass import inspect_cubin
from k3jax.runtime.target import Target
from tests.emulator import run_program
from tests.ops.test_expert_kernels import K3, SMALL, Case, ExpertSuite, case, choose, target
from tests.support import bits


class FewCase(Case):
    """A case on the two launches: beside each other on a multiprocessor, or one after the other."""

    def run(self, num_sms=3, weighted=True, beside=True, build=few_program, **options):
        program = build(self.config, len(self.z), 1, target(num_sms), weighted)
        packed = pack_experts(self.params)
        operands = [self.z, self.ids, self.weights, packed.gate_up, packed.down]
        operands = [np.asarray(operand) for operand in operands]
        emulation = run_program(program, operands, num_sms=num_sms * (1 + beside), **options)
        assert emulation.written[0].all()
        return emulation.results[0]


def few_case(*arguments, **options):
    one = case(*arguments, **options)
    return FewCase(*(getattr(one, field.name) for field in dataclasses.fields(one)))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_bits_are_those_of_the_decode_kernel(num_tokens, weighted):
    one = few_case(num_tokens)
    got, want = one.check(weighted), one.run(weighted=weighted, build=decode._program)
    np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("num_sms", [5, 12, 40])
def test_any_number_of_multiprocessors(num_sms):
    """Many row tiles of down a block, a number that does not divide them, fewer than blocks."""
    few_case(2).check(num_sms=num_sms)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_schedule(seed, beside):
    few_case(3).check(seed=seed, beside=beside)


@pytest.mark.parametrize("inner", [128, 192, 320, 512])
def test_inner_sizes(inner):
    """Whole and broken groups of chunks, and hidden values that a warp takes in several rounds."""
    few_case(2, config=dataclasses.replace(SMALL, expert_intermediate_size=inner)).check(num_sms=32)


@pytest.mark.parametrize("weighted", [True, False])
def test_routes_of_every_pattern(weighted):
    """All to the same experts, an expert twice in a token, dropped slots, a token with none."""
    ids = choose(4)
    ids[:2] = [0, 1, 2, 3]
    ids[2] = [5, 5, 1, 5]
    ids[3] = -1
    ids[0, 2] = ids[1, 0] = -1
    got = few_case(4, ids).check(weighted)
    assert not got[3].astype(np.float32).any()


def test_no_route_at_all():
    got = few_case(2, np.full((2, 4), -1, np.int32)).check()
    assert not got.astype(np.float32).any()


@pytest.mark.parametrize("top_k", [6, 16])
def test_more_units_than_warps(top_k):
    """Jobs in several rounds, and tokens whose slots cross words of 32 routes."""
    few_case(4, config=dataclasses.replace(SMALL, num_experts=60, experts_per_token=top_k)).check()


@pytest.mark.parametrize("scales", [(0, 8), (124, 132), (244, 253)])
def test_scales_of_every_size(scales):
    one = few_case(2, scales=scales)
    got, want = one.run(weighted=False), one.run(weighted=False, build=decode._program)
    np.testing.assert_array_equal(bits(got), bits(want))


def test_a_token_does_not_depend_on_the_others():
    one = few_case(4)
    together = one.run()
    for t in range(4):
        alone = dataclasses.replace(
            one, z=one.z[t : t + 1], ids=one.ids[t : t + 1], weights=one.weights[t : t + 1]
        )
        np.testing.assert_array_equal(bits(alone.run(num_sms=4)[0]), bits(together[t]))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tp", [8, 16])
def test_k3_compiles_without_spills(tp, arch):
    """Two blocks with their registers and shared memory fit a multiprocessor."""
    program = few_program(K3, 1, tp, Target.named("h200"))
    kernels = [launch.kernel for launch in program.launches]
    registers = 0
    for kernel in kernels:
        (report,) = inspect_cubin(compile_kernel(kernel, arch).cubin)
        assert not report.spills
        registers += report.registers * kernel.threads
    assert registers <= 65536
    assert sum(kernel.shared_bytes + 1024 for kernel in kernels) <= 228 * 1024


@pytest.mark.parametrize(("num_tokens", "tp"), [(5, 8), (1, 1), (1, 2)])
def test_too_large_for_two_blocks_a_multiprocessor(num_tokens, tp):
    assert few_program(K3, num_tokens, tp, Target.named("h200")) is None


class TestFew(ExpertSuite):
    case = staticmethod(few_case)
