"""The decode kernels of the routed experts, in the emulator, against the float64 oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k3jax.config import MoEConfig
from k3jax.ops.experts import decode
from k3jax.ops.experts.packing import pack_experts
from k3jax.runtime.compile import ARCHS, compile_kernel
from k3jax.runtime.sass import inspect_cubin
from k3jax.runtime.target import Target
from tests import oracle
from tests.emulator import run_program
from tests.emulator.copies import BulkCopies
from tests.emulator.device import Device
from tests.ops.test_expert_packing import random_experts
from tests.support import ONE_OP, bits

K3 = MoEConfig.kimi_k3()
SMALL = MoEConfig(
    hidden_size=64,
    latent_size=512,
    num_experts=8,
    experts_per_token=4,
    expert_intermediate_size=64,
    num_shared_experts=1,
)
"""Two slices of the latent, one chunk of neurons: every path, in seconds."""


def target(num_sms):
    return Target("emulated", "sm_90a", num_sms, 232448)


@dataclasses.dataclass
class Case:
    """Operands of one run; `params` in checkpoint order, for the oracle."""

    params: object
    z: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    config: MoEConfig = SMALL

    def emulate(self, num_sms=3, weighted=True, **options):
        program = decode.decode_program(
            self.config, len(self.z), 1, target(num_sms), weighted=weighted
        )
        packed = pack_experts(self.params)
        arrays = [np.asarray(x) for x in (packed.gate_up, packed.down)]
        operands = [self.z, self.ids, self.weights, *arrays]
        emulation = run_program(program, operands, num_sms=num_sms, **options)
        assert emulation.written[0].all()
        return emulation

    def run(self, **options):
        return self.emulate(**options).results[0]

    @functools.cache  # noqa: B019
    def bank(self, expert):
        return [
            oracle.mxfp4_values(m.packed[expert], m.scale[expert])
            for m in (self.params.w1, self.params.w3, self.params.w2)
        ]

    __hash__ = object.__hash__

    def rows(self):
        """Unweighted rows [T, K, L] of the oracle."""
        rows = np.zeros((*self.ids.shape, self.z.shape[1]))
        for t, slot in np.argwhere(self.ids >= 0):
            z, expert = self.z[t].astype(np.float64), int(self.ids[t, slot])
            rows[t, slot] = oracle.expert_row(z, *self.bank(expert), 4.0, 25.0, True)
        return rows

    def wanted(self, weighted=True):
        rows = self.rows()
        used = np.where(self.ids >= 0, self.weights, 0).astype(np.float64)
        return np.einsum("tk,tkl->tl", used, rows) if weighted else rows

    def check(self, weighted=True, **options):
        got = self.run(weighted=weighted, **options)
        assert oracle.relative_error(got, self.wanted(weighted)) < ONE_OP
        return got


def choose(num_tokens, config=SMALL):
    rng = np.random.default_rng()
    everyone = np.tile(np.arange(config.num_experts, dtype=np.int32), (num_tokens, 1))
    return rng.permuted(everyone, axis=1)[:, : config.experts_per_token]


def case(num_tokens, ids=None, config=SMALL, scales=(118, 125)):
    rng = np.random.default_rng()
    ids = choose(num_tokens, config) if ids is None else ids
    z = rng.standard_normal((num_tokens, config.latent_size)).astype(ml_dtypes.bfloat16)
    params = random_experts(
        config.num_experts, config.expert_intermediate_size, config.latent_size, scales
    )
    return Case(params, z, ids, rng.uniform(0.1, 1, ids.shape).astype(np.float32), config)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 33])
def test_token_counts(num_tokens):
    case(num_tokens).check()


@pytest.mark.parametrize(("latent", "num_sms"), [(1536, 3), (3584, 16)])
def test_widths_of_the_latent(latent, num_sms):
    """More warps than jobs, and none that refills slots, so that all of them may take one."""
    case(2, config=dataclasses.replace(SMALL, latent_size=latent)).check(num_sms=num_sms)


def test_copies_on_their_way(monkeypatch):
    """As many slots of a block as the window has are being filled, though more are free.

    Copies land late: when nothing else can go on.
    """
    most, load, after_a_while = set(), BulkCopies.load, Device.after_a_while

    def late(device, action):
        now, device.time = device.time, device.time + 1000
        after_a_while(device, action)
        device.time = now

    def count(copies, access, number, *rest):
        load(copies, access, number, *rest)
        block_of = copies.grid.block_of
        mine = [copy for copy in copies.pending if block_of[copy.number] == block_of[number]]
        most.add(len({copy.barrier for copy in mine}))

    monkeypatch.setattr(BulkCopies, "load", count)
    monkeypatch.setattr(Device, "after_a_while", late)
    one = case(2, config=dataclasses.replace(SMALL, latent_size=3584))
    one.check()
    program = decode.decode_program(one.config, 2, 1, target(3))
    kernel = program.launches[-1].kernel
    assert kernel.window < kernel.stages - 2
    assert max(most) == kernel.window


@pytest.mark.slow
def test_more_tokens_than_the_sum_holds():
    case(decode.MAX_SUMMED_TOKENS + 1).check()


@pytest.mark.slow
def test_more_routes_than_threads_group_them():
    """Several routes a thread; sums of rows in memory have the bits of those in shared memory."""
    config = dataclasses.replace(SMALL, num_experts=14, experts_per_token=13)
    many = case(80, config=config)
    many.ids[3], many.ids[79, 5] = -1, -1
    few = dataclasses.replace(many, z=many.z[:9], ids=many.ids[:9], weights=many.weights[:9])
    np.testing.assert_array_equal(bits(many.check()[:9]), bits(few.run()))


@pytest.mark.parametrize("num_sms", [1, 2, 5, 40])
def test_any_number_of_multiprocessors(num_sms):
    """Fewer than down row tiles, some without any, more than there are."""
    case(3).check(num_sms=num_sms)


@pytest.mark.parametrize("inner", [128, 192, 320, 512])
def test_inner_sizes(inner):
    """Whole and broken groups of chunks, and more hidden values than a lane holds at a time."""
    case(2, config=dataclasses.replace(SMALL, expert_intermediate_size=inner)).check()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("num_tokens", [3, 11])
def test_routes_of_every_pattern(num_tokens, weighted):
    """All to the same experts, half of the experts, dropped slots, a token with none."""
    ids = choose(num_tokens)
    ids[:2] = [0, 1, 2, 3]
    ids[-1] = -1
    ids[0, 2] = ids[1, 0] = -1
    got = case(num_tokens, ids).check(weighted)
    assert not got[-1].astype(np.float32).any()


@pytest.mark.parametrize("num_tokens", [9, 17])
def test_units_of_more_than_eight_routes(num_tokens):
    case(num_tokens, np.tile(np.arange(4, dtype=np.int32), (num_tokens, 1))).check(weighted=False)


def test_an_expert_twice_in_a_token():
    case(3, np.tile(np.int32([5, 5, 5, 2]), (3, 1))).check()


def test_many_experts_of_a_narrow_latent():
    """Grouping needs more shared memory than the ring has."""
    config = dataclasses.replace(SMALL, num_experts=896, experts_per_token=16)
    case(2, config=config).check()


@pytest.mark.parametrize(
    ("scales", "power"), [((0, 8), 112), ((124, 132), 0), ((225, 233), -112), ((244, 253), -118)]
)
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


def with_scale(params, expert, byte):
    def fill(path, x):
        is_scale = getattr(path[-1], "name", None) == "scale"
        return x.at[expert].set(np.uint8(byte)) if is_scale else x

    return jax.tree_util.tree_map_with_path(fill, params)


def test_a_token_does_not_depend_on_the_others():
    one = case(5)
    together = one.run()
    for t in range(5):
        alone = dataclasses.replace(
            one, z=one.z[t : t + 1], ids=one.ids[t : t + 1], weights=one.weights[t : t + 1]
        )
        np.testing.assert_array_equal(bits(alone.run(num_sms=4)[0]), bits(together[t]))


@pytest.mark.parametrize("weighted", [True, False])
def test_runs_of_a_call_follow_each_other(weighted):
    """What a run keeps is not what the next one waits for, whatever routes either drops."""
    one, kept = case(3), None
    size = one.ids.size * one.config.expert_intermediate_size // 2
    for number in range(4):
        rng = np.random.default_rng()
        one.z = rng.standard_normal(one.z.shape).astype(one.z.dtype)
        one.ids = np.where(rng.random(one.ids.shape) < 0.3, -1, choose(3)).astype(np.int32)
        emulation = one.emulate(weighted=weighted, kept=kept)
        assert oracle.relative_error(emulation.results[0], one.wanted(weighted)) < ONE_OP
        kept = emulation.kept
        slots, counts = kept[0][: 2 * size].reshape(2, size), kept[0][2 * size :]
        assert (counts == np.uint32(number)).all()
        assert (slots[number % 2] == 0xFFFFFFFF).all()
        assert (slots[1 - number % 2] != 0xFFFFFFFF).any()


def test_grouping_before_or_inside_gives_the_same_bits():
    """A kernel for at most 8 tokens groups by itself, one for more is given the table."""
    config = dataclasses.replace(SMALL, experts_per_token=8, num_experts=12)
    many = case(17, config=config)
    few = dataclasses.replace(many, z=many.z[:9], ids=many.ids[:9], weights=many.weights[:9])
    launches = [
        len(decode.decode_program(config, num_tokens, 1, target(3)).launches)
        for num_tokens in (9, 17)
    ]
    assert launches == [1, 2]
    np.testing.assert_array_equal(bits(few.run()), bits(many.run()[:9]))


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_tokens", [2, 8, 9, 64, 65, 128, 129, 256])
def test_k3_is_served(num_tokens, tp):
    for kind in ("h200", "b200", "b300"):
        program = decode.decode_program(K3, num_tokens, tp, Target.named(kind))
        main = program.launches[-1].kernel
        assert main.shared_bytes <= Target.named(kind).shared_bytes
        assert main.stages >= decode.MIN_STAGES
        assert program.results[0].shape == (num_tokens, 3584)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("num_tokens", "tp"), [(2, 8), (8, 8), (8, 16), (64, 2), (256, 8)])
def test_k3_compiles_without_spills(num_tokens, tp, arch):
    program = decode.decode_program(K3, num_tokens, tp, Target.named("h200"))
    for launch in program.launches:
        (report,) = inspect_cubin(compile_kernel(launch.kernel, arch).cubin)
        assert not report.spills


@pytest.mark.parametrize(
    ("change", "tokens", "kind", "reason"),
    [
        ({}, 8, "cpu", "there are no kernels for cpu"),
        ({}, 257, "h200", "257 tokens are more than the 256"),
        ({"num_experts": 256, "experts_per_token": 256}, 65, "h200", "32768 routes are more than"),
        ({"latent_size": 384}, 8, "h200", "latent_size=384 is not a multiple of 256"),
        ({"latent_size": 256}, 8, "h200", "latent_size=256 is not from 512 to"),
        ({"expert_intermediate_size": 96}, 8, "h200", "tp = 96 is not a multiple of 64"),
        ({"expert_intermediate_size": 640, "latent_size": 1024}, 8, "h200", "past 512 and not a"),
        ({"num_experts": 1025}, 8, "h200", "num_experts=1025 is more than the 1024"),
        ({"expert_intermediate_size": 1024}, 8, "h200", "1024 neurons a rank are more than"),
    ],
)
def test_refusals_say_why(change, tokens, kind, reason):
    config = dataclasses.replace(SMALL, **change)
    assert reason in decode.refusal(config, tokens, 1, Target.named(kind))
    with pytest.raises(NotImplementedError, match=r"experts='decode': .*use experts='xla'"):
        decode.decode_program(config, tokens, 1, Target.named(kind))


class ExpertSuite:
    """What every kernel of the experts must hold; `case` makes its operands."""

    def test_without_cap_of_the_linear_branch(self):
        config = dataclasses.replace(SMALL, situ_linear_beta=None)
        one = self.case(2, config=config)
        want = oracle.experts(
            one.z.astype(np.float64), one.ids, one.weights, one.bank, linear_beta=None
        )
        assert oracle.relative_error(one.run(), want) < ONE_OP

    def test_nan_of_an_expert_reaches_only_its_routes(self):
        one = self.case(3)
        one.ids[:] = [[0, 1, 2, 3], [4, 1, 2, 3], [0, 1, 2, 6]]
        clean = one.run(weighted=False).astype(np.float32)
        one.params = with_scale(with_scale(one.params, 4, 255), 7, 255)
        got = one.run(weighted=False).astype(np.float32)
        assert np.isnan(got[1, 0]).all()
        clean[1, 0] = got[1, 0] = 0
        np.testing.assert_array_equal(got, clean)

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    def test_nan_of_a_token_stays_in_its_output(self, poison):
        one = self.case(4, np.tile(np.int32([0, 1, 2, 3]), (4, 1)))
        clean = one.run()
        one.z[2, 5] = poison
        got = one.run()
        assert np.isnan(got[2].astype(np.float32)).any()
        np.testing.assert_array_equal(bits(np.delete(got, 2, 0)), bits(np.delete(clean, 2, 0)))


class TestDecode(ExpertSuite):
    case = staticmethod(case)
