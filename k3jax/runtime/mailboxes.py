"""The life of a group's workspaces: who allocates them, how ranks find each other's, and failures.

`docs/protocol.md` says what lies in them. A group's ranks live in one process or in several on one
machine. Everything here is collective: each process that has a rank of the group makes the same
calls in the same order.
"""

import ctypes
import functools
import os
import secrets
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from k3jax.runtime import library, processes
from k3jax.runtime.workspace import TailLayout

ELSEWHERE = -1
"""Stands for the device of a rank that lives in another process."""

HANDLE_BYTES = 64
"""Of a CUDA IPC memory handle."""

_lock = threading.RLock()
_groups: dict[Any, "TailWorkspaces"] = {}
"""What exists: by layout, and by each GPU of this process or the members of a group on the host."""


@dataclass(frozen=True)
class TailWorkspaces:
    """The workspaces of one group of ranks.

    Attributes:
        layout: of each workspace.
        members: each rank's device, by JAX's number; the same on all processes.
        homes: each rank's process.
        devices: each rank's device by the CUDA driver's ordinal, ELSEWHERE in another process;
            nothing if the ranks are CPU devices.
    """

    layout: TailLayout
    members: tuple[int, ...]
    homes: tuple[int, ...]
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Checks that there is one device a rank."""
        if len(self.members) != self.layout.ranks or len(set(self.members)) != len(self.members):
            raise ValueError(
                f"devices={self.members} must be {self.layout.ranks} different ones, one a rank"
            )

    def create(self) -> None:
        """Makes the workspaces of this process's ranks and connects them; once, then nothing.

        Raises:
            ValueError: a GPU has another place in another group of this layout, or XLA is told to
                run calls of one program at once.
            NotImplementedError: the group reaches over several machines, or its processes do not
                all see the same cards.
            RuntimeError: a process failed, for example as a device cannot address another one.
        """
        process = jax.process_index()
        own = [rank for rank, home in enumerate(self.homes) if home == process]
        keys = [self.members[rank] for rank in own] if self.devices else [self.members]
        with _lock:
            others = {_groups.get((self.layout, key), self) for key in keys} - {self}
            if others:
                raise ValueError(
                    f"devices {self.members} cannot form a group of the fused tail, as some are in "
                    f"{[other.members for other in others]}: programs of both would share "
                    "mailboxes. Use meshes that have the same groups in the same order, or "
                    "tail='allreduce_overlap' in one of them"
                )
            if (self.layout, keys[0]) in _groups:
                return
            if self.devices:
                _refuse_concurrency()
                self._connect_gpus(process)
            elif len(set(self.homes)) > 1:
                self._share_memory(process, functools.partial(self._join_host, own))
            _groups.update({(self.layout, key): self for key in keys})

    def check(self) -> None:
        """Waits for this process's GPUs; RuntimeError if a rank gave up waiting for another.

        On CPU devices the call itself says so.
        """
        if self.devices:
            _call("k3jax_tail_check", *self._place)

    def _join_host(self, own: Sequence[int], name: bytes, create: bool) -> None:
        members = (ctypes.c_int64 * len(self.members))(*self.members)
        here = (ctypes.c_int64 * len(own))(*own)
        ranks = self.layout.ranks
        _call("k3jax_tail_host_join", name, create, members, here, len(own), ranks, *self._sizes)

    def _connect_gpus(self, process: int) -> None:
        shared = ELSEWHERE in self.devices
        handles = ctypes.create_string_buffer(HANDLE_BYTES * self.layout.ranks if shared else 1)

        def allocate() -> str:
            pointer = handles if shared else None
            _call("k3jax_tail_allocate", *self._place, *self._sizes, pointer)
            return handles.raw.hex()

        def connect() -> None:
            for rank, home in enumerate(self.homes):
                place = slice(HANDLE_BYTES * rank, HANDLE_BYTES * (rank + 1))
                handles[place] = bytes.fromhex(answers[home])[place]
            _call("k3jax_tail_connect", *self._place, handles if shared else None)

        if shared:
            _refuse_hidden_cards(set(self.homes))
        answers = self._on_one_machine(allocate)
        if shared:
            self._share_memory(process, functools.partial(_call, "k3jax_tail_share", *self._place))
        self._together(connect)

    def _share_memory(self, process: int, join: Callable[[bytes, bool], None]) -> None:
        """Memory of all processes: the first calls `join(name, True)`, then the others with False.

        Its name is gone once all have it.
        """
        creator = min(self.homes)
        name = f"/k3jax-{os.getpid()}-{secrets.token_hex(8)}" if process == creator else ""

        def create() -> str:
            if name:
                join(name.encode(), True)
            return name

        try:
            names = self._on_one_machine(create)
            self._together(lambda: None if name else join(names[creator].encode(), False))
        finally:
            if name:
                library.symbol("k3jax_tail_unlink")(name.encode())

    def _on_one_machine(self, action: Callable[[], str]) -> dict[int, str]:
        """What `action` returned on each process, if all are on one machine."""
        answers = self._together(lambda: f"{processes.host_id()} {action()}")
        parts = {process: answer.split(" ") for process, answer in answers.items()}
        if len({machine for machine, _ in parts.values()}) > 1:
            raise NotImplementedError(
                f"the fused tail's group of processes {list(parts)} spans machines "
                f"{[machine for machine, _ in parts.values()]}: addresses are exchanged within one "
                "machine, and NVLink fabric handles are not built; choose "
                "tail='allreduce_overlap', or keep the tensor-parallel axis on one machine"
            )
        return {process: answer for process, (_, answer) in parts.items()}

    def _together(self, action: Callable[[], str | None]) -> dict[int, str]:
        name = f"tail-{zlib.crc32(repr((self.layout, self.members)).encode()):08x}"
        return processes.gather_results(name, set(self.homes), lambda: action() or "")

    @property
    def _place(self) -> tuple[Any, int, int]:
        ranks = len(self.devices)
        return (ctypes.c_int32 * ranks)(*self.devices), self.layout.slot, ranks

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.layout.max_tokens, self.layout.latent_size, self.layout.hidden_size


def _refuse_concurrency() -> None:
    """By default XLA runs the independent calls of one program one after the other on a GPU."""
    flags = os.environ.get("XLA_FLAGS", "").upper()
    if "XLA_GPU_COMMAND_BUFFER_SCHEDULING_MODE=CONCURRENT" in flags:
        raise ValueError(
            "XLA_FLAGS has --xla_gpu_command_buffer_scheduling_mode=CONCURRENT, with which two "
            "calls of the fused tail could run at once on the same mailboxes; leave it out, or "
            "choose tail='allreduce_overlap'"
        )


def _refuse_hidden_cards(homes: set[int]) -> None:
    """Mapping the memory of a card that a process cannot name has not been seen to work."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = processes.gather("the fused tail's cards", homes, own)
    if len(set(visible.values())) > 1:
        raise NotImplementedError(
            f"processes of one group see different cards (CUDA_VISIBLE_DEVICES={visible}); let all "
            "see all, and choose with jax.distributed.initialize(local_device_ids=...), or take "
            "tail='allreduce_overlap'"
        )


def _call(name: str, *arguments: Any) -> None:
    function = library.symbol(name)
    function.restype = ctypes.c_char_p
    message = function(*(ctypes.c_int64(a) if isinstance(a, int) else a for a in arguments))
    if message is not None:
        raise RuntimeError(message.decode())
