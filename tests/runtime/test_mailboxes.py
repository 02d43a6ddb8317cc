"""Who makes the fused tail's workspaces, for which devices, and what is refused."""

import dataclasses
import os
import re

import jax
import pytest

from k3jax.ops.tail import fused
from k3jax.runtime import mailboxes, processes
from k3jax.runtime.mailboxes import ELSEWHERE, HANDLE_BYTES, TailWorkspaces
from k3jax.runtime.workspace import TailLayout

LAYOUT = TailLayout(2, 128, 3584, 7168)
OWN = jax.process_index()
CARDS = os.environ.get("CUDA_VISIBLE_DEVICES", "")


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int = OWN
    local_hardware_id: int | None = 0
    platform: str = "gpu"


@dataclasses.dataclass
class Library:
    """The native library's calls, recorded."""

    calls: list
    refused: dict

    def __call__(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name in self.refused:
            raise RuntimeError(self.refused[name])

    @property
    def names(self):
        return [name.removeprefix("k3jax_tail_") for name, *_ in self.calls]


@pytest.fixture
def library(monkeypatch):
    library = Library([], {})
    monkeypatch.setattr(mailboxes, "_call", library)
    monkeypatch.setattr(mailboxes, "_groups", {})
    return library


def group_of(*ids):
    return fused.tail_workspaces([Device(id, local_hardware_id=id) for id in ids], 3584, 7168)


@pytest.mark.parametrize("members", [(0,), (0, 0), (0, 1, 2)])
def test_workspaces_have_one_device_a_rank(members):
    with pytest.raises(ValueError, match="2 different ones, one a rank"):
        TailWorkspaces(LAYOUT, members, (OWN,) * len(members))


def test_gpus_of_one_process_are_connected_once(library):
    group = group_of(0, 1)
    for _ in range(3):
        group.create()
    assert library.names == ["allocate", "connect"]
    devices, slot, ranks, *sizes, handles = library.calls[0][1:]
    assert (list(devices), slot, ranks, sizes, handles) == (
        [0, 1], LAYOUT.slot, 2, [128, 3584, 7168], None,
    )  # fmt: skip


def test_groups_that_share_a_gpu_and_mailboxes_are_refused(library):
    group_of(0, 1).create()
    for other in (group_of(1, 0), group_of(1, 2)):
        with pytest.raises(ValueError, match=r"\(0, 1\).*would share mailboxes.*allreduce_overlap"):
            other.create()
    fused.tail_workspaces([Device(0), Device(1)], 256, 256).create()  # mailboxes of their own
    assert library.names == ["allocate", "connect"] * 2


def test_concurrent_command_buffers_are_refused(library, monkeypatch):
    flag = "--xla_gpu_command_buffer_scheduling_mode"
    monkeypatch.setenv("XLA_FLAGS", f"--xla_foo=1 {flag}=CONCURRENT")
    with pytest.raises(ValueError, match=r"CONCURRENT.*same mailboxes.*allreduce_overlap"):
        group_of(0, 1).create()
    monkeypatch.setenv("XLA_FLAGS", f"{flag}=LHS")
    group_of(0, 1).create()
    assert library.names == ["allocate", "connect"]


def test_a_creation_that_failed_can_be_tried_again(library):
    library.refused = {"k3jax_tail_connect": "device 0 cannot address the memory of device 1"}
    group = group_of(0, 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device 0 cannot address"):
            group.create()
    library.refused = {}
    group.create()
    assert library.names == ["allocate", "connect"] * 3


class Peer:
    """Another process, as this one sees it through the key-value store."""

    def __init__(self, monkeypatch, answers, host=None):
        self.answers, self.said = list(answers), []
        host = host or processes.host_id()

        def gather(name, members, value):
            assert set(members) == {OWN, OWN + 1}
            self.said.append(value)
            answer = self.answers.pop(0)
            return {OWN: value, OWN + 1: answer.replace("HOST", host)}

        monkeypatch.setattr(processes, "gather", gather)


def over_two_processes():
    devices = [Device(0), Device(1, process_index=OWN + 1, local_hardware_id=None)]
    return fused.tail_workspaces(devices, 3584, 7168)


def handles_of(rank, byte):
    table = bytearray(2 * HANDLE_BYTES)
    table[rank * HANDLE_BYTES : (rank + 1) * HANDLE_BYTES] = bytes([byte]) * HANDLE_BYTES
    return bytes(table)


def test_processes_exchange_the_handles_of_their_own_gpus(library, monkeypatch):
    peer = Peer(monkeypatch, [CARDS, "+HOST " + handles_of(1, 0xBB).hex(), "+HOST ", "+", "+"])
    group = over_two_processes()
    assert group.devices == (0, ELSEWHERE)
    group.create()
    assert library.names == ["allocate", "share", "connect"]
    name, created = library.calls[1][-2:]
    assert name.startswith(b"/k3jax-")
    assert created
    assert peer.said[2].endswith(name.decode())
    table = library.calls[2][-1].raw
    assert table[HANDLE_BYTES : 2 * HANDLE_BYTES] == b"\xbb" * HANDLE_BYTES


def test_cpu_devices_of_two_processes_share_memory(library, monkeypatch):
    peer = Peer(monkeypatch, ["+HOST ", "+"])
    devices = [Device(0, platform="cpu"), Device(1, process_index=OWN + 1, platform="cpu")]
    group = fused.tail_workspaces(devices, 64, 128)
    for _ in range(2):
        group.create()
    assert library.names == ["host_join"]
    _, name, created, members, here, *numbers = library.calls[0]
    assert peer.said[0].endswith(name.decode())
    assert (created, list(members), list(here), numbers) == (
        True,
        [0, 1],
        [0],
        [1, 2, 128, 64, 128],
    )


def test_what_fails_on_one_process_fails_on_all(library, monkeypatch):
    first = [CARDS, "+HOST " + handles_of(1, 1).hex(), "+HOST ", "+"]
    Peer(monkeypatch, [*first, "-device 0 cannot address rank 0", *first, "+"])
    with pytest.raises(RuntimeError, match=f"process {OWN + 1} could not: device 0 cannot address"):
        over_two_processes().create()
    library.refused = {"k3jax_tail_connect": "no memory"}
    with pytest.raises(RuntimeError, match="no memory"):
        over_two_processes().create()


def test_a_group_over_machines_is_refused_by_name(library, monkeypatch):
    Peer(monkeypatch, [CARDS, "+HOST " + handles_of(1, 1).hex()], host="elsewhere")
    with pytest.raises(NotImplementedError, match=r"fabric handles are not built.*overlap"):
        over_two_processes().create()
    assert library.names == ["allocate"]


def test_processes_that_see_different_cards_are_refused(library, monkeypatch):
    Peer(monkeypatch, [CARDS + "7"])
    with pytest.raises(NotImplementedError, match=r"different cards.*local_device_ids"):
        over_two_processes().create()
    assert library.names == []


def test_processes_that_disagree_are_named(monkeypatch):
    Peer(monkeypatch, ["6 tokens", "5 tokens"])
    monkeypatch.setattr(processes, "_agreed", set())
    message = rf"process {OWN} has 5 tokens; process {OWN + 1} has 6 tokens"
    with pytest.raises(ValueError, match=message):
        processes.agree("tail", {OWN, OWN + 1}, "5 tokens")
    for _ in range(2):  # the second asks nobody
        processes.agree("tail", {OWN, OWN + 1}, "5 tokens")


def test_without_a_store_processes_are_refused():
    with pytest.raises(NotImplementedError, match=re.escape("jax.distributed.initialize")):
        processes.gather("tail", {OWN, OWN + 1}, "")


def test_without_a_driver_creation_says_so():
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("this machine has a driver")
    group = group_of(0, 1)
    for action in (group.create, group.check):
        with pytest.raises(RuntimeError, match=r"no NVIDIA driver|was not created"):
            action()
