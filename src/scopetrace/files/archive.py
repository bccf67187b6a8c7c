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
from typing import IO, Any

import torch

_PREFIX = "scopetrace/"


class ArchiveWriter:
    """Writes entries one after the other."""

    def __init__(self, entries: zipfile.ZipFile) -> None:
        self._zip = entries

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
        on_cpu = storage.cpu()
        self.add(name, _bytes_of(on_cpu))


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
        data = self.read(name)
        storage = torch.empty(len(data), dtype=torch.uint8, device="cpu").untyped_storage()
        _bytes_of(storage)[:] = data
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


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
