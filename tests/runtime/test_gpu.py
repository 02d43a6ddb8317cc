"""The custom-call road on a GPU: numbers, CUDA graphs, overlapping launches, named errors."""

import gc
import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from k3jax.export import load_function
from k3jax.runtime import library
from k3jax.runtime.target import TARGETS, Target
from tests.gpu.driver import Driver

pytestmark = pytest.mark.gpu

# Of tests.runtime.gpu_programs, which cannot be imported without the DSL.
LINKS, FILL, ROUNDS, LARGE_KEPT = 20, 7, 6, 256 << 20


@pytest.fixture
def program():
    """Loads a program by name: exported now, or earlier on another machine."""
    arch = Target.current().arch
    if arch != "sm_90a":
        pytest.skip(f"the programs are compiled for sm_90a, this device is {arch}")
    if importlib.util.find_spec("cutlass") is not None:
        from tests.runtime.gpu_programs import export_program as data_of
    elif folder := os.environ.get("K3JAX_TEST_EXPORTS"):
        data_of = lambda name: (Path(folder) / name).read_bytes()  # noqa: E731
    else:
        pytest.skip("neither the CuTe DSL nor K3JAX_TEST_EXPORTS is here")
    return lambda name: load_function(data_of(name))


def draw(count: int) -> np.ndarray:
    return np.random.default_rng().standard_normal(count).astype(np.float32)


def captured(function):
    return jax.jit(function, compiler_options={"xla_gpu_graph_min_graph_size": 1})


def not_captured(function):
    return jax.jit(function, compiler_options={"xla_gpu_graph_min_graph_size": 1_000_000})


@pytest.mark.parametrize("run", [captured, not_captured])
def test_numbers(program, run):
    step = run(program("scale"))
    for _ in range(3):
        x = draw(1000)
        np.testing.assert_array_equal(step(x), 2.0 * x)


def test_replayed_graph_sees_changed_inputs(program):
    layers = program("layers")
    replayed, issued = captured(layers), not_captured(layers)
    inputs = [draw(1000) for _ in range(8)]
    outputs = [np.asarray(replayed(x)) for x in inputs]
    for x, y in zip(inputs, outputs, strict=True):
        np.testing.assert_array_equal(y, issued(x))
        wanted = x.astype(np.float64)
        for _ in range(4):
            wanted = 6.0 * np.sin(wanted) + 1.0
        # sin has slope up to 1 and is scaled by 6 four times: 6^4 float32 ulps and some.
        np.testing.assert_allclose(y, wanted, atol=6.0**4 * 4e-7)
    assert len({y.tobytes() for y in outputs}) == len(inputs)


@pytest.mark.parametrize("run", [captured, not_captured])
@pytest.mark.parametrize("name", ["links", "links_in_order"])
def test_each_launch_sees_what_the_one_before_wrote(program, name, run):
    step = run(program(name))
    for _ in range(5):
        x = draw(1 << 22)
        wanted = x
        for _ in range(LINKS):
            wanted = wanted + np.float32(1.0)
        np.testing.assert_array_equal(step(x), wanted)


def draw_whole(count: int) -> np.ndarray:
    return np.random.default_rng().integers(-1000, 1000, count).astype(np.float32)


@pytest.mark.parametrize("run", [captured, not_captured])
def test_kept_memory_is_found_as_the_last_run_left_it(program, run):
    first, second = (run(program("tally")) for _ in range(2))
    for runs in range(8):
        x = draw_whole(1000)
        np.testing.assert_array_equal(first(x), x + FILL + runs)
    x = draw_whole(1000)
    np.testing.assert_array_equal(second(x), x + FILL)  # an executable of its own
    np.testing.assert_array_equal(first(x), x + FILL + 8)


@pytest.mark.parametrize("run", [captured, not_captured])
def test_calls_and_rounds_of_a_loop_keep_apart(program, run):
    step = run(program("tallies"))
    for runs in range(5):
        x = draw_whole(1000)
        before = [runs, runs, *(ROUNDS * runs + i for i in range(ROUNDS))]
        np.testing.assert_array_equal(step(x), [x + FILL + n for n in before])


@pytest.mark.parametrize("run", [captured, not_captured])
def test_runs_from_several_threads_are_ordered(program, run):
    step, x = run(program("tally")), jax.device_put(draw_whole(1000))
    step(x).block_until_ready()

    def many(_):
        return [step(x) for _ in range(100)]

    with ThreadPoolExecutor(4) as threads:
        results = [np.asarray(y) - np.asarray(x) for ys in threads.map(many, range(4)) for y in ys]
    assert all((y == y[0]).all() for y in results)
    assert sorted(int(y[0]) - FILL for y in results) == list(range(1, 401))


def test_kept_memory_is_freed_with_its_executable(program):
    driver, x = Driver(), draw_whole(1000)

    def left_during_and_after() -> tuple[int, int]:
        step = jax.jit(program("large_tally"))
        np.testing.assert_array_equal(step(x), x + FILL)
        during = driver.memory_left()
        del step
        jax.clear_caches()
        gc.collect()
        return during, driver.memory_left()

    _, left = left_during_and_after()  # and all else that a first run allocates
    for _ in range(3):
        during, after = left_during_and_after()
        assert left - during >= LARGE_KEPT
        assert after == left


@pytest.mark.parametrize(("name", "count"), [("large_shared", 1000), ("wide_cluster", 1 << 22)])
def test_kernels_beyond_the_default_limits(program, name, count):
    x = draw(count)
    np.testing.assert_array_equal(captured(program(name))(x), 2.0 * x)


def test_errors_name_the_kernel_and_the_cause(program):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"compiled for sm_100a.*CUDA_ERROR_"):
        jax.block_until_ready(jax.jit(program("other_arch"))(draw(1000)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"240000 bytes of dynamic shared memory"):
        jax.block_until_ready(jax.jit(program("too_much_shared"))(draw(1000)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"no workspace 61 on device 0"):
        jax.block_until_ready(jax.jit(program("no_workspace"))(draw(1000)))
    x = draw(1000)  # none of them spoils the device
    np.testing.assert_array_equal(jax.jit(program("scale"))(x), 2.0 * x)


def test_target_and_driver_agree():
    target, facts = Target.current(), library.device_facts(0)
    assert target.kind in TARGETS
    assert target.num_sms == facts.num_sms
    assert f"sm_{facts.capability[0]}{facts.capability[1]}a" == target.arch
    assert facts.name == jax.devices()[0].device_kind
    assert library.device_count() == jax.local_device_count()
    assert all(library.peer_access()[i][i] for i in range(library.device_count()))
