"""Programs of small CuTe kernels on both architectures, and the mistakes planted in them."""

import ml_dtypes
import numpy as np
import pytest

from tests.emulator import (
    BarrierError,
    DeadlockError,
    EmulationError,
    InFlightError,
    OutOfBoundsError,
    RaceError,
    UninitialisedError,
    emulate,
    run_program,
)
from tests.emulator_tests import cute_kernels as k
from tests.emulator_tests.mutants import report

BF16 = np.dtype(ml_dtypes.bfloat16)
ARCHS = ("sm_90a", "sm_100a")
SEEDS = (None, 1, 2)


def normal(*shape):
    return np.random.default_rng().standard_normal(shape).astype(np.float32)


def check(program, operands, want, arch, seed=None, rtol=0):
    run = run_program(program, operands, arch, seed=seed)
    assert run.written[0].all()
    np.testing.assert_allclose(run.results[0], want, rtol=rtol)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("n", [1, 127, 128, 300])
def test_scale(arch, n):
    x = normal(n)
    want = (x.astype(np.float64) * 3 + 1).astype(np.float32)  # one fused operation
    check(k.scale_program(n, 3.0), [x], want, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seed", SEEDS)
def test_sum(arch, seed):
    x = normal(5, 256)
    check(k.sum_program(5), [x], x.astype(np.float64).sum(1), arch, seed, rtol=2e-3)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("tiles", "stages"), [(1, 1), (5, 2), (9, 3)])
def test_ring(arch, seed, tiles, stages):
    x = normal(3, tiles, 64)
    want = np.zeros((3, 64), np.float32)
    for tile in range(tiles):
        want += x[:, tile]
    check(k.ring_program(3, tiles, stages), [x], want, arch, seed)


@pytest.mark.parametrize("arch", ARCHS)
def test_tile(arch):
    rng = np.random.default_rng()
    a, b = (rng.integers(-4, 5, (n, 64)).astype(np.float32) for n in (16, 8))
    check(k.tile_program(64, BF16), [a.astype(BF16), b.astype(BF16)], a @ b.T, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("blocks", [2, 8])
def test_rotate(arch, seed, blocks):
    x = normal(3, blocks, 32)
    check(k.rotate_program(3, blocks), [x], np.roll(x, -1, axis=1), arch, seed)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seed", SEEDS)
def test_chain_of_dependent_launches(arch, seed):
    x = normal(4, 64)
    want = x
    for _ in range(4):
        want = want * np.float32(0.5) + np.float32(1)
    check(k.chain_program(4, 4), [x], want, arch, seed)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_that_wait_for_each_other(arch, seed):
    x = normal(6, 32)
    check(k.turns_program(6), [x], np.add.accumulate(x, axis=0), arch, seed)


PLANTED = {
    "off-by-one pointer": (lambda: k.scale_program(127, 3.0, "one too many"), OutOfBoundsError),
    "missing barrier": (lambda: k.sum_program(2, "missing barrier"), RaceError),
    "dropped wait for data": (lambda: k.ring_program(2, 6, 2, "no wait for the data"),
                              EmulationError),
    "dropped wait for a slot": (lambda: k.ring_program(2, 6, 2, "no wait for the slot"),
                                (BarrierError, InFlightError, RaceError)),
    "ring never released": (lambda: k.ring_program(2, 6, 2, "no release"), DeadlockError),
    "missing cluster barrier": (lambda: k.rotate_program(2, 4, "missing cluster barrier"),
                                (RaceError, UninitialisedError)),
    "dropped griddepcontrol.wait": (lambda: k.chain_program(2, 3, "no wait"),
                                    (RaceError, UninitialisedError)),
    "waiting for the wrong flag": (lambda: k.turns_program(3, "wrong flag"), DeadlockError),
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found(name, seed):
    program, error = PLANTED[name][0](), PLANTED[name][1]
    operands = [normal(*spec.shape) for spec in program.operands]
    with pytest.raises(error, match="PTX line"):
        emulate(program, operands, seed=seed, patience=30)


def test_planted_wrong_layout_gives_wrong_numbers():
    rng = np.random.default_rng()
    a, b = (rng.standard_normal((n, 32)).astype(BF16) for n in (16, 8))
    want = a.astype(np.float64) @ b.astype(np.float64).T
    (good,) = emulate(k.tile_program(32, BF16), [a, b])
    np.testing.assert_allclose(good, want, rtol=1e-5, atol=1e-5)
    (bad,) = emulate(k.tile_program(32, BF16, "wrong layout"), [a, b])
    assert np.linalg.norm(bad - want) > 0.1 * np.linalg.norm(want)


def test_every_deleted_synchronisation_of_the_ring_is_found():
    """Unneeded are only two waits for slots that start empty, and two releases at the end."""
    x = normal(2, 7, 64)
    want = np.zeros((2, 64), np.float32)
    for tile in range(7):
        want += x[:, tile]
    program = k.ring_program(2, 7, 2)
    found = dict(report(program, [x], lambda got: np.array_equal(got, want), "sm_90a"))
    assert list(found.values()).count("survives") == 4, found
