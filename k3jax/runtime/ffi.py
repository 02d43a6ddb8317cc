"""Programs as JAX operations: the one module that touches `jax.ffi`.

`call_program` binds a primitive whose CUDA lowering compiles the program's kernels and writes one
`k3jax_launch` custom call. Nothing is compiled while tracing, so that a function built with
`platform_choice` traces and runs on a CPU with no CUDA, no CuTe DSL and no native library.

Sharding. XLA cannot split a custom call: outside `shard_map` it would silently gather sharded
operands onto every device first. Refused are therefore
- while tracing: operands whose type says that they are sharded (meshes with Explicit axes);
- while lowering for CUDA: any program over more than one device in which some mesh axis of size
  above one is not manual. This catches Auto axes, of which traced types say nothing, and refuses
  replicated operands too, whose later sharding is XLA's choice.

Layouts are row-major, operands and results alike.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from k3jax.runtime import library
from k3jax.runtime.compile import compile_kernel
from k3jax.runtime.program import ArraySpec, Program
from k3jax.runtime.serialize import program_kernels, serialize_program
from k3jax.runtime.target import Target

LAUNCH_TARGET = "k3jax_launch"
LAUNCH_STAGES = ("instantiate", "initialize", "execute")
TAIL_TARGET = "k3jax_tail"
TARGET_NAMES = (LAUNCH_TARGET, TAIL_TARGET)
"""Custom calls that an exported program may hold."""

_INTEGERS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32")
_FLOATS = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
DTYPES = frozenset(jax.numpy.dtype(name) for name in (*_INTEGERS, *_FLOATS))
"""What kernels may see. Packed FP4 crosses as uint8; 64-bit types depend on a global JAX flag."""

SHARDING_REMEDY = "call it inside jax.shard_map, manual over every mesh axis, on the local shards"


def call_program(
    program: Program, *arrays: jax.Array, target: Target, has_side_effect: bool = False
) -> tuple[jax.Array, ...]:
    """Runs a program on arrays as one custom call.

    Args:
        program: what to run.
        arrays: one for each of `program.operands`.
        target: the device that the kernels are compiled for.
        has_side_effect: the call must run even if its results are unused, and never twice; for
            programs that exchange data with other devices.

    Returns:
        The results without the trailing scratch, varying over every manual axis that an operand
        varies over.

    Raises:
        TypeError: shapes or dtypes are not those of the program.
        NotImplementedError: the target has no architecture to compile for, or operands are sharded
            outside `shard_map`.
    """
    if target.arch is None:
        raise NotImplementedError(
            f"program {program.name!r} needs an NVIDIA GPU, got target {target.kind!r}; "
            "use the op's reference implementation there"
        )
    _check_arrays(program, arrays)
    results = program.results[: len(program.results) - program.num_scratch]
    if all(spec.num_bytes == 0 for spec in results):
        return tuple(jax.numpy.zeros(spec.shape, spec.dtype) for spec in results)
    outputs = _launch.bind(*arrays, program=program, target=target, has_side_effect=has_side_effect)
    return _varying_like(tuple(outputs[: len(results)]), arrays)


def call_host(
    target_name: str, result: ArraySpec, *arrays: jax.Array, **attributes: Any
) -> jax.Array:
    """Runs one of the native library's handlers for CPU devices, which exchanges data with others.

    Args:
        target_name: of the custom call.
        result: shape and dtype of what it returns.
        arrays: its operands.
        attributes: its attributes, NumPy scalars.

    Returns:
        The result, varying over every manual axis that an operand varies over.
    """
    register()
    shape = jax.ShapeDtypeStruct(result.shape, result.dtype)
    output = jax.ffi.ffi_call(target_name, shape, has_side_effect=True)(*arrays, **attributes)
    return _varying_like(output, arrays)


def platform_choice(
    kernel: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    """A function that is `kernel` when compiled for CUDA and `reference` anywhere else.

    Both take and return the same pytrees of arrays. Only the branch that is lowered compiles
    anything; on a CPU that is the reference alone.
    """

    def chosen(*args: Any) -> Any:
        def on_other_platforms(*args: Any) -> Any:
            return _varying_like(reference(*args), args)

        return jax.lax.platform_dependent(*args, cuda=kernel, default=on_other_platforms)

    return chosen


@functools.cache
def register() -> None:
    """Tells XLA about the native handlers; once a process, also before loading an exported program.

    Raises:
        FileNotFoundError: the native library was not built.
        RuntimeError: it was built from older sources.
    """
    # All symbols are found before the first is registered, so that a failure can be tried again.
    state_id, state_info = (
        jax.ffi.pycapsule(library.type_pointer(f"k3jax_program_state_{part}"))
        for part in ("id", "info")
    )
    launch = {stage: _handler(LAUNCH_TARGET, stage) for stage in LAUNCH_STAGES}
    tail = _handler(TAIL_TARGET, "execute")
    jax.ffi.register_ffi_type(
        "k3jax_program_state", {"type_id": state_id, "type_info": state_info}, platform="CUDA"
    )
    jax.ffi.register_ffi_target(LAUNCH_TARGET, launch, platform="CUDA")
    jax.ffi.register_ffi_target(TAIL_TARGET, tail, platform="cpu")


def _handler(target: str, stage: str) -> Any:
    return jax.ffi.pycapsule(library.symbol(f"{target}_{stage}"))


def _check_arrays(program: Program, arrays: tuple[jax.Array, ...]) -> None:
    got = [ArraySpec(tuple(x.shape), np.dtype(x.dtype)) for x in arrays]
    if got != list(program.operands):
        raise TypeError(f"{program.name}: got operands {got}, wanted {list(program.operands)}")
    for spec in (*program.operands, *program.results):
        if spec.dtype not in DTYPES:
            raise TypeError(
                f"{program.name}: {spec.dtype} cannot cross into a kernel; "
                "bitcast to uint8 or uint32 first (packed FP4 is uint8)"
            )
    for x in arrays:
        spec = jax.typeof(x).sharding.spec
        if any(axis is not None for axis in spec):
            raise NotImplementedError(
                f"{program.name}: an operand of shape {x.shape} is sharded as {spec}, which XLA "
                f"would gather onto every device; {SHARDING_REMEDY}"
            )


def _varying_axes(tree: Any) -> frozenset[str]:
    leaves = jax.tree.leaves(tree)
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))


def _varying_like(outputs: Any, inputs: Any) -> Any:
    """Marks outputs as varying over every manual axis over which some input varies."""
    wanted = _varying_axes(inputs)

    def mark(x: jax.Array) -> jax.Array:
        missing = tuple(wanted - _varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, outputs)


@functools.cache
def _ffi_effects() -> frozenset[Any]:
    """JAX's effect of a foreign call that may not be dropped; it has no public name."""
    probe = jax.ffi.ffi_call(
        LAUNCH_TARGET, jax.ShapeDtypeStruct((), jax.numpy.float32), has_side_effect=True
    )
    return frozenset(jax.make_jaxpr(lambda: probe())().effects)


_launch = Primitive("k3jax_launch")
_launch.multiple_results = True


@_launch.def_impl
def _run_eagerly(*arrays: jax.Array, **params: Any) -> list[jax.Array]:
    return _jitted_launch(*arrays, **params)


@functools.partial(jax.jit, static_argnames=("program", "target", "has_side_effect"))
def _jitted_launch(*arrays: jax.Array, **params: Any) -> list[jax.Array]:
    return _launch.bind(*arrays, **params)


@_launch.def_effectful_abstract_eval
def _abstract_results(
    *arrays: Any, program: Program, target: Target, has_side_effect: bool
) -> tuple[tuple[Any, ...], Any]:
    del arrays, target
    effects = _ffi_effects() if has_side_effect else frozenset()
    return tuple(jax.core.ShapedArray(s.shape, s.dtype) for s in program.results), effects


def _lower_for_cuda(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    program: Program,
    target: Target,
    has_side_effect: bool,
) -> Any:
    _refuse_automatic_partitioning(ctx.module_context.axis_context, program)
    register()
    assert target.arch is not None
    compiled = {k: compile_kernel(k, target.arch) for k in program_kernels(program)}
    lower = jax.ffi.ffi_lowering(LAUNCH_TARGET, has_side_effect=has_side_effect)
    return lower(ctx, *operands, **serialize_program(program, compiled))


def _refuse_automatic_partitioning(axis_context: Any, program: Program) -> None:
    mesh = getattr(axis_context, "mesh", None)
    if mesh is None:
        free = {"devices": getattr(axis_context, "num_devices", None) or 1}
    else:
        free = {
            name: mesh.shape[name] for name in mesh.shape if name not in axis_context.manual_axes
        }
    if any(size > 1 for size in free.values()):
        raise NotImplementedError(
            f"{program.name}: compiled for several devices with automatic partitioning ({free}), "
            f"where XLA would gather its operands onto every device; {SHARDING_REMEDY}"
        )


def _refuse_other_platforms(ctx: Any, *operands: Any, program: Program, **params: Any) -> Any:
    del operands, params
    raise NotImplementedError(
        f"{program.name} runs on CUDA only, got {ctx.module_context.platforms}; wrap it in "
        "k3jax.runtime.ffi.platform_choice, or use the op's reference implementation"
    )


def _refuse_vmap(args: Any, dims: Any, *, program: Program, **params: Any) -> Any:
    del args, dims, params
    raise NotImplementedError(
        f"{program.name}: jax.vmap cannot add an axis to a compiled kernel; fold the mapped axis "
        "into the tokens (reshape [B, T, ...] to [B * T, ...]) or use the reference implementation"
    )


def _refuse_grad(primals: Any, tangents: Any, *, program: Program, **params: Any) -> Any:
    del primals, tangents, params
    raise NotImplementedError(
        f"{program.name}: the kernel has no derivative; use the op's reference implementation, or "
        "jax.lax.stop_gradient on its inputs"
    )


mlir.register_lowering(_launch, _refuse_other_platforms)
mlir.register_lowering(_launch, _lower_for_cuda, platform="cuda")
batching.primitive_batchers[_launch] = _refuse_vmap
ad.primitive_jvps[_launch] = _refuse_grad
