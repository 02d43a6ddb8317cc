"""The programs that the GPU tests run, exported for a GPU machine that may have no CuTe DSL.

    python -m tests.runtime.gpu_programs FOLDER

writes them; `K3JAX_TEST_EXPORTS=FOLDER` then tells the tests where they are. Where the DSL is
installed the tests export them on the spot.
"""

import dataclasses
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.export import export_function
from k3jax.runtime.ffi import call_program
from k3jax.runtime.program import (
    ArraySpec,
    KeptSpec,
    Launch,
    Operand,
    Program,
    Result,
    Workspace,
)
from k3jax.runtime.target import Target
from tests.runtime.toy import Scale, chain_program, scale_program, tally_program

COUNT = 1000
LONG = 1 << 22
LINKS = 20
FILL = 7
ROUNDS = 6
LARGE_KEPT = 256 << 20


def on(target: str, program: Program):
    """The program as a function of one array."""
    return lambda x: call_program(program, x, target=Target.named(target))[0]


def layers(x):
    """Enough of our calls and XLA's own kernels to be captured into one CUDA graph."""
    for _ in range(4):
        x = on("h200", chain_program(COUNT, 2.0, 3.0))(jnp.sin(x))
    return x


def links_program(overlaps: bool) -> Program:
    """LINKS launches, each reading what the one before it wrote: y = x + LINKS."""
    spec = ArraySpec((LONG,), np.dtype(np.float32))
    kernel = Scale(shift=1.0)
    buffers = [Operand(0)] + [Result(i % 2) for i in range(LINKS - 1, -1, -1)]
    launches = tuple(
        Launch(kernel, (LONG // 128, 1, 1), (source, sink, LONG, 1.0), overlaps and i > 0)
        for i, (source, sink) in enumerate(itertools.pairwise(buffers))
    )
    return Program("links", launches, (spec,), (spec, spec), num_scratch=1)


def workspace_program() -> Program:
    """Reads a workspace that nobody registered."""
    spec = ArraySpec((COUNT,), np.dtype(np.float32))
    launch = Launch(Scale(), (8, 1, 1), (Workspace(61), Result(0), COUNT, 1.0))
    return Program("mailbox", (launch,), (spec,), (spec,))


def tally(x):
    """x + FILL + how often this call ran before."""
    program = tally_program(COUNT, FILL)
    return call_program(program, x, target=Target.named("h200"), has_side_effect=True)[0]


def large_tally_program() -> Program:
    """The same beside much memory."""
    program = tally_program(COUNT, FILL)
    return dataclasses.replace(program, kept=(KeptSpec(LARGE_KEPT), *program.kept[1:]))


def tallies(x):
    """Two calls alike, and one in a loop: [ROUNDS + 2, COUNT]."""

    def step(carry, _):
        return carry, tally(carry)

    apart = jnp.stack([tally(x), tally(x)])
    return jnp.concatenate([apart, jax.lax.scan(step, x, length=ROUNDS)[1]])


PROGRAMS = {
    "scale": (on("h200", scale_program(COUNT, 2.0)), COUNT),
    "layers": (layers, COUNT),
    "links": (on("h200", links_program(overlaps=True)), LONG),
    "links_in_order": (on("h200", links_program(overlaps=False)), LONG),
    "large_shared": (
        on("h200", scale_program(COUNT, 2.0, Scale(shared_bytes=200_000))),
        COUNT,
    ),
    "wide_cluster": (on("h200", scale_program(LONG, 2.0, Scale(cluster=(16, 1, 1)))), LONG),
    "too_much_shared": (
        on("h200", scale_program(COUNT, 2.0, Scale(shared_bytes=240_000))),
        COUNT,
    ),
    "tally": (tally, COUNT),
    "tallies": (tallies, COUNT),
    "large_tally": (on("h200", large_tally_program()), COUNT),
    "no_workspace": (on("h200", workspace_program()), COUNT),
    "other_arch": (on("b200", scale_program(COUNT, 2.0)), COUNT),
}


def export_program(name: str) -> bytes:
    """One of `PROGRAMS`, exported for CUDA."""
    function, count = PROGRAMS[name]
    return export_function(function, jax.ShapeDtypeStruct((count,), jnp.float32))


if __name__ == "__main__":
    for name in PROGRAMS:
        (Path(sys.argv[1]) / name).write_bytes(export_program(name))
