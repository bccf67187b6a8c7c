"""The archive that a trace is written to: a zip file whose entries are not compressed.

Data flow:
    header, program as JSON; storages of tensors as raw bytes -> entries `scopetrace/...`
    a file -> checked entries: known names, no compression, together no larger than the file -> JSON, storages

Python's zipfile checks the CRC of each entry. As nothing is compressed, no file is larger in memory than on disk.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import torch

_PREFIX = "scopetrace/"
_CHUNK = 1 << 20


class ArchiveWriter:
    """Writes entries one after the other. The archive is complete after `close`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)

    def add(self, name: str, data: bytes | memoryview) -> None:
        """Write an entry. `data` is not copied."""
        entry = zipfile.ZipInfo(_PREFIX + name)  # of a fixed date: equal traces are equal files
        with self._zip.open(entry, "w", force_zip64=len(data) > zipfile.ZIP64_LIMIT // 2) as file:
            file.write(data)

    def add_json(self, name: str, data: Any) -> None:
        """Write an entry of JSON."""
        self.add(name, json.dumps(data, separators=(",", ":"), allow_nan=False).encode())

    def add_storage(self, name: str, storage: torch.UntypedStorage) -> None:
        """Write the bytes of a storage of any device."""
        on_cpu = storage if storage.device.type == "cpu" else storage.cpu()
        self.add(name, _bytes_of(on_cpu))

    def close(self) -> None:
        """Write the table of entries."""
        self._zip.close()


class ArchiveReader:
    """The entries of an archive. Raises what zipfile and json raise, and ValueError, for a damaged one."""

    def __init__(self, file: IO[bytes]) -> None:
        self._zip = zipfile.ZipFile(file)
        self._entries = _checked_entries(self._zip, file.seek(0, os.SEEK_END))

    def json(self, name: str) -> Any:
        """An entry of JSON. Raises ValueError for one that is not."""
        data = self.read(name)
        content = json.loads(data, parse_constant=_refuse_constant)
        if b"\\ud" in data.lower():  # halves of characters, which are no text where the other half is missing
            json.dumps(content, ensure_ascii=False).encode()
        return content

    def read(self, name: str) -> bytes:
        """The bytes of an entry. Raises KeyError where there is none."""
        return self._zip.read(self._entries[_PREFIX + name])

    def has(self, name: str) -> bool:
        """Whether there is an entry of this name."""
        return _PREFIX + name in self._entries

    def storage(self, name: str) -> torch.UntypedStorage:
        """A new storage with the bytes of an entry. Raises KeyError where there is none."""
        entry = self._entries[_PREFIX + name]
        storage = torch.empty(entry.file_size, dtype=torch.uint8, device="cpu").untyped_storage()
        with self._zip.open(entry) as file:
            for part in _parts(_bytes_of(storage)):
                if file.readinto(part) != len(part):  # type: ignore[attr-defined]  # typeshed has IO[bytes]
                    raise ValueError(f"the entry {name} is too short")
            if file.read(1):
                raise ValueError(f"the entry {name} is too long")
        return storage


def check_archive(data: bytes) -> None:
    """Raise ValueError for a zip file inside an archive that would be larger in memory than it is."""
    _checked_entries(zipfile.ZipFile(io.BytesIO(data)), len(data))


def _checked_entries(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    entries = {entry.filename: entry for entry in archive.infolist()}
    if len(entries) != len(archive.infolist()):
        raise ValueError("two entries have one name")
    for entry in entries.values():
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError(f"the entry {entry.filename} is compressed")
    if sum(entry.file_size for entry in entries.values()) > size:
        raise ValueError("the entries are larger than the file")
    return entries


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """The memory of a storage, which must live as long as the view of it."""
    count = storage.nbytes()
    if not count:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * count).from_address(storage.data_ptr())).cast("B")


def _parts(view: memoryview) -> Iterator[memoryview]:
    """Chunks, as a file makes a copy of what it is asked for."""
    for start in range(0, len(view), _CHUNK):
        yield view[start : start + _CHUNK]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
