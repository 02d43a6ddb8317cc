"""One warp hands words to another through a barrier: what racecheck can follow, and what not."""

from dataclasses import dataclass

import cutlass
import numpy as np
from cutlass import Int32, Int64, Uint32, cute

from k3jax.ops import kernel_ptx as ptx
from k3jax.runtime.program import ArraySpec, Kernel, Launch, Operand, Program, Result


@dataclass(frozen=True)
class HandoverKernel(Kernel):
    """z = x, stored by warp 0 and loaded by warp 1.

    Attributes:
        lanes: of warp 0 that arrive at the barrier. One speaks for its warp, which has come
            together before; that is how the expert kernels do it.
        early: whether they arrive before they store, which is a race.
    """

    lanes: int
    early: bool = False
    threads: int = 64
    shared_bytes: int = 256
    parameters = (("x", "address"), ("z", "address"))

    @cute.kernel
    def device(self, x: Int64, z: Int64):
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        shared = Uint32(cute.arch.get_dyn_smem(Uint32, alignment=128).toint())
        word = shared + Uint32(128 + lane * 4)
        if thread == 0:
            ptx.barrier_init(shared, self.lanes)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if thread < 32:
            if cutlass.const_expr(self.early):
                self.arrive(shared, lane)
            ptx.store_shared(word, ptx.load_global(x + Int64(lane) * 4))
            cute.arch.sync_warp()
            if cutlass.const_expr(not self.early):
                self.arrive(shared, lane)
        else:
            ptx.barrier_wait(shared, Uint32(0))
            # The lane next door stored it.
            other = shared + Uint32(128) + Uint32((lane ^ 1) * 4)
            ptx.store_global(z + Int64(lane ^ 1) * 4, Uint32(ptx.load_shared(other)))

    @cute.jit
    def arrive(self, barrier: Uint32, lane: Int32):
        if lane < self.lanes:
            ptx.barrier_arrive(barrier)


def handover_program(lanes: int, early: bool = False) -> Program:
    """x and z are 32 words."""
    words = ArraySpec((32,), np.dtype(np.float32))
    launch = Launch(HandoverKernel(lanes, early), (1, 1, 1), (Operand(0), Result(0)))
    return Program("handover", (launch,), (words,), (words,))
