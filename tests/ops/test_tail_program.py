"""The fused tail as a program: what it supports, what it launches, what XLA makes of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.ops.tail import fused
from k3jax.ops.tail.api import TailTier, latent_tail
from k3jax.ops.tail.geometry import TailGeometry, kernel_facts
from k3jax.parallel import Parallel, run_sharded
from k3jax.runtime.program import Workspace
from k3jax.runtime.target import Target
from tests.device_free import compile_apart, gpu_mesh
from tests.ops.tail_oracle import EPS, draw, oracle
from tests.support import bits, parallel_of

K3 = {"latent_size": 3584, "hidden_size": 7168}


@pytest.mark.parametrize("kind", ["h200", "b200", "b300"])
@pytest.mark.parametrize("ranks", fused.RANKS)
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 32, 33, 128])
def test_k3_is_supported(kind, ranks, num_tokens):
    target = Target.named(kind)
    assert fused.unsupported(ranks=ranks, num_tokens=num_tokens, target=target, **K3) is None
    geometry = TailGeometry(**kernel_facts(ranks, 3584, 7168, num_tokens))
    assert geometry.rows * geometry.groups * ranks == 7168
    assert geometry.multipliers <= geometry.warps
    assert geometry.k_parts == 1 or geometry.kept_steps == geometry.steps * geometry.k_parts
    assert geometry.round_tokens * geometry.rows // 2 <= geometry.threads
    if not geometry.two_shot:
        assert num_tokens <= geometry.staged_tokens


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ranks": 3}, "ranks=3 is not one of"),
        ({"ranks": 1}, "ranks=1 is not one of"),
        ({"num_tokens": 0}, "num_tokens=0 is not in 1..128"),
        ({"num_tokens": 129}, "num_tokens=129 is not in 1..128"),
        ({"hidden_size": 7160}, "hidden_size=7160 must be a multiple of 128"),
        ({"latent_size": 3520}, "latent_size=3520 one of 256"),
        ({"hidden_size": 128 * 31}, "more than its 16 warps"),
        ({"target": dataclasses.replace(Target.named("h200"), num_sms=78)}, "78 multiprocessors"),
        ({"target": dataclasses.replace(Target.named("h200"), shared_bytes=65536)}, "has 65536"),
    ],
)
def test_what_is_not_supported_has_a_reason(changes, reason):
    facts = {"ranks": 8, "num_tokens": 8, "target": Target.named("h200"), **K3}
    assert fused.unsupported(**facts) is None
    assert reason in fused.unsupported(**facts | changes)


def test_one_workspace_for_all_layers_and_sizes_and_another_for_another_group():
    slots = set()
    for ranks in (2, 8):
        for num_tokens in (1, 64):
            program = fused.tail_program(
                ranks=ranks, num_tokens=num_tokens, eps=EPS, up_proj_rows=7168, **K3
            )
            (launch,) = program.launches
            slots.add(next(a.slot for a in launch.arguments if isinstance(a, Workspace)))
    assert len(slots) == 2


def test_weights_start_at_the_rank_s_rows():
    def stride(up_proj_rows):
        program = fused.tail_program(
            ranks=8, num_tokens=1, eps=EPS, up_proj_rows=up_proj_rows, **K3
        )
        (launch,) = program.launches
        names = [name for name, _ in launch.kernel.parameters]
        return launch.arguments[names.index("up_proj_stride")]

    assert stride(7168) == 896
    assert stride(896) == 0


def run_tail(parallel: Parallel, target: Target):
    def local(group, latent, shared, gain, up_proj):
        y = fused.fused_tail(
            latent[0], shared[0], gain, up_proj, eps=EPS, group=group, target=target
        )
        return y[None]

    split = P("tp")

    def call(*arrays):
        return run_sharded(local, parallel, (split, split, P(), P()), split, *arrays)

    return jax.jit(call)


@pytest.mark.parametrize("kind", ["cpu", "h200"])
def test_on_a_cpu_it_runs_the_host_implementation(kind):
    arrays = draw(np.random.default_rng(), 4, 3, 256, 256)
    got = np.asarray(run_tail(parallel_of(4), Target.named(kind))(*arrays))
    np.testing.assert_array_equal(bits(got), np.broadcast_to(bits(got[0]), got.shape))
    wanted = oracle(*arrays)
    assert np.linalg.norm(got[0] - wanted) <= 1e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 100])
def test_agrees_with_the_tier_that_overlaps_the_all_reduces(num_tokens):
    arrays = draw(np.random.default_rng(), 4, num_tokens, 64, 128)
    fused_y = np.asarray(run_tail(parallel_of(4), Target.named("cpu"))(*arrays))[0]

    def local(group, latent, shared, gain, up_proj):
        tier = TailTier.ALLREDUCE_OVERLAP
        y = latent_tail(
            latent[0], shared[0], gain, up_proj, eps=EPS, group=group, tier=tier, scattered=False
        )
        return y[None]

    split = P("tp")
    call = jax.jit(
        lambda *args: run_sharded(local, parallel_of(4), (split, split, P(), P()), split, *args)
    )
    plain_y = np.asarray(call(*arrays))[0].astype(np.float64)
    # The same rounding points: only the order of float32 sums differs.
    assert np.linalg.norm(fused_y - plain_y) <= 1e-3 * np.linalg.norm(plain_y)


def lower_layers(kind: str, tp: int):
    """Six tails, each fed by the one before."""
    parallel = Parallel(gpu_mesh(kind, tp), "tp")
    run = run_tail(parallel, Target.named(kind))

    def layers(latent, shared, gain, up_proj):
        y = shared
        for _ in range(6):
            y = run(latent + y[..., :3584], y, gain, up_proj)
        return y

    shapes = ((tp, 8, 3584), (tp, 8, 7168), (3584,), (7168, 3584))
    specs = (P("tp"), P("tp"), P(), P())
    return jax.jit(layers).lower(
        *(
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=parallel.sharding(spec))
            for shape, spec in zip(shapes, specs, strict=True)
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h200", "b200"])
def test_compiled_for_gpus_all_layers_sit_in_one_graph_without_a_collective(kind, tmp_path):
    report = compile_apart(lower_layers, tmp_path, kind, 8)
    assert report.hlo.count('custom_call_target="k3jax_launch"') == 6
    for collective in ("all-reduce", "all-gather", "reduce-scatter", "collective-permute"):
        assert f" {collective}" not in report.hlo
    buffers = report.command_buffers_of("kCustomCall")
    assert len(buffers) == 6
    assert None not in buffers
    assert len(set(buffers)) == 1
