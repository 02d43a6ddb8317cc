"""Compiled kernels on disk: own format, atomic, locked, bounded, and safe to delete at any time.

An entry is one file: magic, header length, JSON header, payload, SHA-256 of all before it. Nothing
in it names a path, so the folder may be moved or copied to another machine; nothing is unpickled.
An entry that is cut short, altered, of another format, or owned by another user is taken for absent
and written anew.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger("k3jax")

MAGIC = b"k3jax kernel 1\n"
SUFFIX = ".k3kernel"
DEFAULT_MAX_BYTES = 256 << 20
NUM_LOCKS = 16
ABANDONED_SECONDS = 3600
"""Age at which a half-written file is taken for one whose writer died."""


def default_directory() -> Path:
    """`$K3JAX_CACHE_DIR`, else `k3jax/kernels` in the user's cache folder."""
    if chosen := os.environ.get("K3JAX_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "k3jax" / "kernels"


class DiskCache:
    """A folder of entries, each a JSON header and a payload under a hexadecimal key."""

    def __init__(self, directory: Path, max_bytes: int = DEFAULT_MAX_BYTES):
        """Creates nothing yet: the folder appears with the first entry."""
        self.directory = directory
        self.max_bytes = max_bytes

    def path(self, key: str) -> Path:
        """Where the entry of a key lies, or would."""
        return self.directory / (key + SUFFIX)

    def read(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        """The entry's header and payload, or None where there is no sound entry."""
        path = self.path(key)
        try:
            if path.stat().st_uid != os.getuid():
                return None
            data = path.read_bytes()
            entry = _unpack(data)
            if entry is None or entry[0].get("key") != key:
                logger.warning("k3jax: ignoring the damaged cache entry %s", path)
                return None
            os.utime(path)  # eviction is by last use
        except OSError:
            return None
        return entry

    def write(self, key: str, header: dict[str, Any], payload: bytes) -> None:
        """Stores an entry whole or not at all, then evicts the least recently used ones.

        Raises:
            OSError: the folder cannot be written.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = _pack(header | {"key": key}, payload)
        handle, name = tempfile.mkstemp(dir=self.directory, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, self.path(key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._evict(keep=self.path(key))

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Holds other processes off this key; a folder that cannot be written locks nothing."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = open(self.directory / f"lock{int(key[:8], 16) % NUM_LOCKS}", "ab")  # noqa: SIM115
        except OSError:
            yield
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _evict(self, keep: Path) -> None:
        for path in self.directory.glob("*.part"):
            with contextlib.suppress(FileNotFoundError):  # another process evicts too
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()
        entries = []
        for path in self.directory.glob("*" + SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.max_bytes:
                break
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size


def _pack(header: dict[str, Any], payload: bytes) -> bytes:
    text = json.dumps(header, sort_keys=True).encode()
    body = MAGIC + len(text).to_bytes(4, "little") + text + payload
    return body + hashlib.sha256(body).digest()


def _unpack(data: bytes) -> tuple[dict[str, Any], bytes] | None:
    body, digest = data[:-32], data[-32:]
    if not body.startswith(MAGIC) or hashlib.sha256(body).digest() != digest:
        return None
    start = len(MAGIC) + 4
    end = start + int.from_bytes(body[len(MAGIC) : start], "little")
    return json.loads(body[start:end]), body[end:]
