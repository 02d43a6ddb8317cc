"""The grouped kernels of the routed experts, in the emulator, against the float64 oracle."""

import dataclasses
import math
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k3jax.cli import main
from k3jax.config import MoEConfig
from k3jax.ops import kernels
from k3jax.ops.experts import grouped
from k3jax.ops.experts.kernel_grouped import NARROW, WIDE
from k3jax.ops.experts.packing import pack_experts
from k3jax.runtime.compile import compile_kernel
from k3jax.runtime.sass import inspect_cubin
from k3jax.runtime.target import Target
from tests.emulator import run_program
from tests.ops.test_expert_kernels import SMALL, Case, ExpertSuite, choose, target
from tests.ops.test_expert_kernels import case as decode_case
from tests.support import bits

K3 = MoEConfig.kimi_k3()
H200 = Target.named("h200")
WIDTHS = (8, 24, 48)
"""Few, so that the kernels compile in seconds; the last is computed with a chunk at a time."""


class GroupedCase(Case):
    """Operands of one run of the grouped kernels."""

    def run(self, num_sms=3, weighted=True, **options):
        program = grouped.grouped_program(
            self.config, len(self.z), 1, target(num_sms), weighted=weighted, widths=WIDTHS
        )
        packed = pack_experts(self.params)
        arrays = [np.asarray(x) for x in (packed.gate_up, packed.down)]
        operands = [self.z, self.ids, self.weights, *arrays]
        # The cluster that sorts is resident as a whole.
        emulation = run_program(program, operands, num_sms=max(num_sms, 8), **options)
        assert emulation.written[0].all()
        return emulation.results[0]


def case(num_tokens, ids=None, config=SMALL, scales=(118, 125)):
    one = decode_case(num_tokens, ids, config, scales)
    return GroupedCase(**{f.name: getattr(one, f.name) for f in dataclasses.fields(one)})


# Numbers.


@pytest.mark.parametrize("num_tokens", [1, 7, 20])
def test_token_counts(num_tokens):
    case(num_tokens).check()


@pytest.mark.parametrize("num_sms", [1, 40])
def test_any_number_of_multiprocessors(num_sms):
    case(3).check(num_sms=num_sms)


@pytest.mark.parametrize("inner", [192, 256])
def test_inner_sizes(inner):
    """A stage of two chunks and one of one; a whole group, and a part with a warpgroup idle."""
    case(9, config=dataclasses.replace(SMALL, expert_intermediate_size=inner)).check()


@pytest.mark.slow
@pytest.mark.parametrize("inner", [320, 448, 512])
def test_larger_inner_sizes(inner):
    case(9, config=dataclasses.replace(SMALL, expert_intermediate_size=inner)).check()


@pytest.mark.slow
def test_warps_without_tiles_keep_up():
    """More K than the rings hold, and rows that do not fill the last item."""
    case(1, config=dataclasses.replace(SMALL, expert_intermediate_size=1792)).check()


@pytest.mark.parametrize("weighted", [True, False])
def test_routes_of_every_pattern(weighted):
    """Two tokens with the same experts, dropped slots, a token with none."""
    ids = choose(11)
    ids[:2] = [0, 1, 2, 3]
    ids[-1] = -1
    ids[0, 2] = ids[1, 0] = -1
    got = case(11, ids).check(weighted)
    assert not got[-1].astype(np.float32).any()


@pytest.mark.parametrize("num_tokens", [40, 49, 97])
def test_experts_with_one_unit_two_and_three(num_tokens):
    """The narrow shape's widest, then the wide shape."""
    case(num_tokens, np.tile(np.arange(4, dtype=np.int32), (num_tokens, 1))).check(weighted=False)


def test_every_route_dropped():
    assert not case(3, np.full((3, 4), -1, np.int32)).run().astype(np.float32).any()


@pytest.mark.parametrize(("scales", "power"), [((0, 8), 112), ((124, 132), 0), ((244, 253), -118)])
def test_scales_of_every_size(scales, power):
    """Scales down to subnormal weights and up to the largest, with z that brings sums back to 1."""
    one = case(3, scales=scales)
    factor = np.float32(2.0**power)
    one.z = (one.z.astype(np.float32) * factor / 16).astype(ml_dtypes.bfloat16)
    down = np.random.default_rng().integers(118, 125, one.params.w2.scale.shape, np.uint8)
    one.params = dataclasses.replace(
        one.params, w2=dataclasses.replace(one.params.w2, scale=jnp.asarray(down))
    )
    one.check(weighted=False)


def test_a_token_does_not_depend_on_the_others():
    """Units of 20 routes and of one, computed with other widths."""
    one = case(20, np.tile(np.int32([0, 1, 2, 3]), (20, 1)))
    together = one.run()
    for t in (0, 19):
        alone = dataclasses.replace(
            one, z=one.z[t : t + 1], ids=one.ids[t : t + 1], weights=one.weights[t : t + 1]
        )
        np.testing.assert_array_equal(bits(alone.run()[0]), bits(together[t]))


# The first two launches.


def units_of(experts, num_experts, widths):
    """(expert, first, count) of each unit, by descending width; how many of each width on."""
    listed = {width: [] for width in reversed(widths)}
    first = 0
    for expert in range(num_experts):
        total = int((experts == expert).sum())
        pieces = math.ceil(total / widths[-1])
        size = 8 * math.ceil(math.ceil(total / max(pieces, 1)) / 8)
        for unit in range(pieces):
            count = min(size, total - unit * size)
            width = min(w for w in widths if w >= count)
            listed[width].append((expert, first + unit * size, count))
        first += total
    ends = np.cumsum([len(units) for units in listed.values()])
    return [unit for units in listed.values() for unit in units], ends


@pytest.mark.parametrize(
    ("num_tokens", "skew"),
    [(1, 1), (256, 1), (256, 4), (300, 1), (515, 1), (515, 4), (2050, 1), (5000, 4)],
)
def test_routes_are_sorted_and_cut(num_tokens, skew):
    """A part of a block, one, several, all, twice and three times all; even and skewed routes."""
    rng = np.random.default_rng()
    widths = (8, 16, 24, 32, 40, 48)
    config = dataclasses.replace(SMALL, num_experts=40)
    ids = (40 * rng.random((num_tokens, 4)) ** skew).astype(np.int32)
    ids[rng.random(ids.shape) < 0.1] = -1
    z = rng.standard_normal((num_tokens, 512)).astype(ml_dtypes.bfloat16)
    program = grouped.grouped_program(config, num_tokens, 1, H200, widths=widths)
    program = dataclasses.replace(program, launches=program.launches[:2])
    operands = [z, ids, np.zeros(ids.shape, np.float32)]
    operands += [np.zeros(spec.shape, spec.dtype) for spec in program.operands[3:]]
    _, permuted, order, units, *_ = run_program(program, operands).results

    routes = ids.reshape(-1)
    valid = np.flatnonzero(routes >= 0)
    want = valid[np.argsort(routes[valid], kind="stable")]
    np.testing.assert_array_equal(order[: len(want)], want)
    want, ends = units_of(routes, 40, widths)
    np.testing.assert_array_equal(units[: len(widths)], ends)
    np.testing.assert_array_equal(units[8:].reshape(-1, 4)[: len(want), :3], want)
    # Chunk, lane of four, step, half, pair of elements -> step, half, lane, pair.
    want = z.reshape(num_tokens, 8, 4, 4, 2, 2).transpose(0, 1, 3, 4, 2, 5)
    np.testing.assert_array_equal(bits(permuted), bits(want.reshape(num_tokens, -1)))


# What is supported, and how it is compiled.


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_tokens", [1, 129, 8192])
def test_k3_is_served(num_tokens, tp):
    program = grouped.grouped_program(K3, num_tokens, tp, H200)
    assert program.results[0].shape == (num_tokens, 3584)
    gate_up, down = (launch.kernel for launch in program.launches[2:4])
    assert max(gate_up.shared_bytes, down.shared_bytes) <= H200.shared_bytes
    assert gate_up.stages >= 3
    if tp >= 8:
        assert down.rounds >= 2
    else:
        assert down.stages >= 3


@pytest.mark.parametrize("shape", [NARROW, WIDE])
def test_registers_given_away_are_enough(shape):
    """A block starts with what its threads can have at most, in eights."""
    warpgroups = shape.warpgroups + 1
    at_first = 65536 // (128 * warpgroups) // 8 * 8 * warpgroups
    given = shape.warpgroups * shape.compute_registers + shape.service_registers
    assert given <= at_first


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [2048, 4096])
@pytest.mark.parametrize("tp", [1, 8, 16])
def test_k3_keeps_matrix_instructions_in_flight(num_tokens, tp):
    """No spills, and one wait for several instructions: the compiler serialises them otherwise."""
    for launch in grouped.grouped_program(K3, num_tokens, tp, H200).launches[2:4]:
        (report,) = inspect_cubin(compile_kernel(launch.kernel, "sm_90a").cubin)
        assert not report.spills
        assert report.census["HGMMA"] > report.census["WARPGROUP"]


@pytest.mark.parametrize(
    ("change", "tokens", "kind", "reason"),
    [
        ({}, 512, "cpu", "no kernels for cpu"),
        ({}, 512, "b200", "b200 is sm_100a and has no warpgroup matrix instructions"),
        ({}, 174763, "h200", "174763 tokens are more than the 174762"),
        ({"latent_size": 3712}, 512, "h200", "latent_size=3712"),
        ({"latent_size": 8448}, 512, "h200", "latent_size=8448"),
        ({"expert_intermediate_size": 96 * 8}, 512, "h200", "/ tp = 96"),
        ({"num_experts": 1025}, 512, "h200", "num_experts=1025"),
    ],
)
def test_refusals_say_why(change, tokens, kind, reason):
    config = dataclasses.replace(K3, **change)
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        grouped.grouped_program(config, tokens, 8, Target.named(kind))


def test_other_architectures_are_refused_and_not_listed(monkeypatch, capsys):
    kernel = grouped.grouped_program(SMALL, 1, 1, H200, widths=(8,)).launches[2].kernel
    with pytest.raises(NotImplementedError, match=r"GroupedKernel needs instructions of.*sm_90a"):
        compile_kernel(kernel, "sm_100a")
    monkeypatch.setattr(kernels, "all_kernels", lambda: {"experts: grouped": kernel})
    assert main(["kernels"]) == 0
    out = capsys.readouterr().out
    assert "sm_90a" in out
    assert "sm_100a" not in out


class TestGrouped(ExpertSuite):
    case = staticmethod(case)
