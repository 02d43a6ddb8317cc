"""What the fused tail does on two GPUs of one process when a rank stays away or programs mix."""

import contextlib
import importlib.util
import threading

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.config import MoEConfig
from k3jax.ops.tail import fused
from k3jax.ops.tail.api import create_workspaces
from k3jax.parallel import RankGroup, run_sharded
from k3jax.runtime.target import Target
from tests.ops.tail_oracle import EPS, draw, oracle
from tests.support import parallel_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]

RANKS = 2
K3 = MoEConfig.kimi_k3()
SPECS = (P("tp"), P("tp"), P(), P())


class RankZero(RankGroup):
    """A group as its rank 0 sees it, outside `shard_map`."""

    def index(self):
        return 0


@pytest.fixture
def step(monkeypatch):
    """A step of all ranks."""
    if len(jax.devices()) < RANKS:
        pytest.skip(f"needs {RANKS} GPUs, there are {len(jax.devices())}")
    monkeypatch.setattr(fused, "POLL_BUDGET", 1 << 19)
    create_workspaces(K3, parallel_of(RANKS))

    def local(group, latent, shared, gain, up_proj):
        return tail(group, latent[0], shared[0], gain, up_proj)[None]

    return jax.jit(lambda *arrays: run_sharded(local, parallel_of(RANKS), SPECS, P("tp"), *arrays))


def tail(group, *arrays):
    return fused.fused_tail(*arrays, eps=EPS, group=group, target=Target.current())


def draw_step(tokens=8):
    return draw(np.random.default_rng(), RANKS, tokens, K3.latent_size, K3.hidden_size)


def is_right(y, arrays):
    wanted = oracle(*arrays)
    return np.linalg.norm(np.asarray(y)[0] - wanted) <= 1e-3 * np.linalg.norm(wanted)


def recovers(step, draws):
    """Once somebody has heard of a failure, the next step starts afresh."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        step(*draws[0]).block_until_ready()
    for _ in range(4):  # every slot
        for arrays in draws:
            assert is_right(step(*arrays), arrays)


def test_a_rank_that_stays_away_is_named_by_the_next_step_and_the_one_after_is_right(step):
    arrays = draw_step()
    recovers(step, [arrays])
    first = jax.devices()[0]
    latent, shared, *rest = (jax.device_put(array, first) for array in arrays)
    alone = jax.jit(lambda *arrays: tail(RankZero(RANKS), *arrays))
    for _ in range(3):
        y = alone(latent[0], shared[0], *rest)
        assert np.isnan(np.asarray(y, np.float32)).all()
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"rank 0 .* waiting for rank 1.*NaN"):
            step(*arrays).block_until_ready()
        for _ in range(4):
            assert is_right(step(*arrays), arrays)


def test_programs_at_the_same_time_are_right_or_refused(step):
    draws = [draw_step(tokens) for tokens in (8, 9)]
    recovers(step, draws)
    wrong, right, start = [], [], threading.Barrier(len(draws))

    def run(arrays):
        start.wait()
        for _ in range(12):
            try:
                y = np.asarray(step(*arrays))
            except jax.errors.JaxRuntimeError as error:
                if "fused tail" not in str(error):
                    wrong.append(str(error))
                continue
            if is_right(y, arrays):
                right.append(1)
            elif not np.isnan(y.astype(np.float32)).any():
                wrong.append("wrong numbers")

    threads = [threading.Thread(target=run, args=(arrays,)) for arrays in draws]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(len(right), "of 24 steps were right")
    assert not wrong
    recovers(step, draws)
