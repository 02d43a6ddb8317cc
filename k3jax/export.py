"""Compiled programs as bytes: made where the CuTe DSL is, run where only jax and k3jax are.

    data = export_function(step, *shapes)             # no GPU needed
    step = load_function(data)                        # in another process, on the GPU machine
    y = jax.jit(step)(*arrays)

The bytes hold the StableHLO of the function and the machine code of every kernel that it launches.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.export

from k3jax.params import ExpertParams, GateParams, MoEParams, SharedExpertParams
from k3jax.quant.mxfp4 import Mxfp4Array
from k3jax.runtime import ffi

for _node in (ExpertParams, GateParams, MoEParams, Mxfp4Array, SharedExpertParams):
    # An exported function names the types of its arguments; these have no static fields to store.
    jax.export.register_pytree_node_serialization(
        _node,
        serialized_name=f"k3jax.{_node.__name__}",
        serialize_auxdata=lambda fields: b"",
        deserialize_auxdata=lambda data: (),
    )


def export_function(
    function: Callable[..., Any], *args: Any, platform: Literal["cuda", "cpu"] = "cuda"
) -> bytes:
    """Lowers a function and serialises it.

    Args:
        function: what to export.
        args: arrays, or `jax.ShapeDtypeStruct`s with the shardings of the machine it will run on.
        platform: where it will run; JAX lowers every branch for every platform of an export, and
            kernels have no CPU form, so one at a time.
    """
    ours = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ffi.TARGET_NAMES]
    export = jax.export.export(jax.jit(function), platforms=(platform,), disabled_checks=ours)
    return bytes(export(*args).serialize())


def load_function(data: bytes) -> Callable[..., Any]:
    """The function that `export_function` serialised; jit it to run it.

    Raises:
        ValueError: the bytes are not an exported function.
        FileNotFoundError: it launches kernels and the native library was not built.
    """
    try:
        exported = jax.export.deserialize(bytearray(data))
    except Exception as error:
        raise ValueError(
            f"these {len(data)} bytes are not a function exported by k3jax ({error}); write them "
            "anew with k3jax.export.export_function"
        ) from error
    if "cuda" in exported.platforms:
        ffi.register()
    return exported.call
