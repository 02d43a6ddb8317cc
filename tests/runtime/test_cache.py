import os
import secrets
import shutil
import time

import pytest

from k3jax.runtime.cache import DiskCache


def key() -> str:
    return secrets.token_hex(32)


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "kernels")


def test_reads_what_it_wrote(cache):
    name, payload = key(), secrets.token_bytes(1000)
    assert cache.read(name) is None
    cache.write(name, {"arch": "sm_90a"}, payload)
    header, got = cache.read(name)
    assert got == payload
    assert header == {"arch": "sm_90a", "key": name}


def test_moved_folder_still_reads(cache, tmp_path):
    name = key()
    cache.write(name, {}, b"code")
    shutil.move(cache.directory, tmp_path / "elsewhere")
    assert DiskCache(tmp_path / "elsewhere").read(name) == ({"key": name}, b"code")
    assert cache.read(name) is None


def damaged(data: bytes):
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    return {
        "empty": b"",
        "cut": data[:-1],
        "flipped": bytes(flipped),
        "pickle": b"\x80\x04" + data,
        "other format": data.replace(b"k3jax kernel 1", b"k3jax kernel 2"),
        "longer": data + b"\0",
    }


@pytest.mark.parametrize("damage", damaged(bytes(100)))
def test_damaged_entry_is_absent_and_can_be_rewritten(cache, damage):
    name = key()
    cache.write(name, {}, secrets.token_bytes(50))
    path = cache.path(name)
    path.write_bytes(damaged(path.read_bytes())[damage])
    assert cache.read(name) is None
    cache.write(name, {}, b"again")
    assert cache.read(name) == ({"key": name}, b"again")


def test_entry_under_another_key_is_absent(cache):
    first, second = key(), key()
    cache.write(first, {}, b"code")
    shutil.copy(cache.path(first), cache.path(second))
    assert cache.read(second) is None


def test_foreign_owner_is_absent(cache, monkeypatch):
    name = key()
    cache.write(name, {}, b"code")
    monkeypatch.setattr(os, "getuid", lambda: cache.path(name).stat().st_uid + 1)
    assert cache.read(name) is None


def test_least_recently_used_entries_go_first(tmp_path):
    cache = DiskCache(tmp_path, max_bytes=3500)
    names = [key() for _ in range(4)]
    now = time.time()
    for age, name in enumerate(names[:3]):
        cache.write(name, {}, bytes(1000))
        os.utime(cache.path(name), (now - 100 + age, now - 100 + age))
    cache.read(names[0])  # used just now, so the second is the oldest
    cache.write(names[3], {}, bytes(1000))
    assert [cache.read(name) is not None for name in names] == [True, False, True, True]


def test_an_entry_larger_than_the_bound_is_kept_alone(tmp_path):
    cache = DiskCache(tmp_path, max_bytes=10)
    small, large = key(), key()
    cache.write(small, {}, b"")
    cache.write(large, {}, bytes(1000))
    assert cache.read(small) is None
    assert cache.read(large) is not None


def test_failed_write_leaves_nothing(cache, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.write(key(), {}, b"code")
    assert list(cache.directory.iterdir()) == []


def test_files_of_dead_writers_are_removed(cache):
    cache.write(key(), {}, b"code")
    old, young = cache.directory / "old.part", cache.directory / "young.part"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    cache.write(key(), {}, b"code")
    assert not old.exists()
    assert young.exists()
