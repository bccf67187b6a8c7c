"""The archive that a trace is written to: a zip file whose entries are not compressed.

Data flow:
    header, program as JSON -> entries `scopetrace/...`
    tensor -> a row of metadata, with the number of its storage -> the tensor, over the storage that is read once
    a tensor without plain storage (sparse, quantized) -> torch.save -> torch.load with weights_only=True
    a file -> checked entries: known names, no compression, together no larger than the file -> JSON, tensors
    storages that several traces share -> an archive beside these, where each has its hash for a name

Python's zipfile checks the CRC of each entry. As nothing is compressed, no file is larger in memory than on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import io
import itertools
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from scopetrace._compat.tensors import id_of_storage
from scopetrace.errors import TraceFileError

_PREFIX = "scopetrace/"
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The classes of tensors that a file can have: subclasses have a meaning of their own."""


class ArchiveWriter:
    """Writes entries one after the other, and each storage once.

    Attributes:
        shared: by their names, the storages that `add_shared` is to write beside the archive; None for storages in it.
    """

    def __init__(self, entries: zipfile.ZipFile, shares: bool = False) -> None:
        self._zip = entries
        self.shared: dict[str, torch.UntypedStorage] | None = {} if shares else None
        self.places: dict[int, str] = {}
        self._storages: dict[int, int] = {}
        self._keep: list[torch.UntypedStorage] = []  # ids must not be used again
        self._numbers = itertools.count()

    def add_json(self, name: str, data: Any) -> None:
        """Write an entry of JSON."""
        _add(self._zip, name, json.dumps(data, separators=(",", ":"), allow_nan=False).encode())

    def add_tensor(self, t: torch.Tensor) -> dict[str, Any]:
        """Write the tensor's memory, and return its metadata as JSON."""
        row = {"requires_grad": t.requires_grad, "parameter": type(t) is torch.nn.Parameter}
        t = t.detach()
        if t.layout is not torch.strided or t.is_quantized or t.is_nested or t.is_conj() or t.is_neg():
            name, file = f"tensors/{next(self._numbers)}.pt", io.BytesIO()
            torch.save(t, file)
            _add(self._zip, name, file.getbuffer())
            return {**row, "saved": name}
        return {
            **row,
            "storage": self._storage(t.untyped_storage()),
            "dtype": name_of(t.dtype),
            "device": str(t.device),
            "size": list(t.size()),
            "stride": list(t.stride()),
            "offset": t.storage_offset(),
            "nbytes": t.untyped_storage().nbytes(),
        }

    def _storage(self, storage: torch.UntypedStorage) -> int:
        key = id_of_storage(storage)
        if key not in self._storages:
            number = self._storages[key] = len(self._storages)
            self._keep.append(storage)
            if storage.device.type != "meta":
                on_cpu = storage.cpu()
                if self.shared is None:
                    _add(self._zip, f"storages/{number}", _bytes_of(on_cpu))
                else:
                    name = self.places[number] = f"storages/{hashlib.sha256(_bytes_of(on_cpu)).hexdigest()}"
                    self.shared[name] = storage
        return self._storages[key]


def _add(entries: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    """Write an entry. `data` is not copied."""
    entry = zipfile.ZipInfo(_PREFIX + name)  # of a fixed date: equal traces are equal files
    with entries.open(entry, "w", force_zip64=len(data) > zipfile.ZIP64_LIMIT // 2) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside this one, whose file takes its place in the end; after an error all is as it was."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def add_shared(path: Path, storages: Mapping[str, torch.UntypedStorage]) -> None:
    """Add what an archive lacks. Who has the old one open keeps it. Raises BadZipFile for another file."""
    known = zipfile.ZipFile(path).NameToInfo if path.exists() else {}
    if not all(name.startswith(f"{_PREFIX}storages/") for name in known):
        raise zipfile.BadZipFile("an archive of something else")
    missing = {name: storage for name, storage in storages.items() if _PREFIX + name not in known}
    if missing:
        with replacing(path) as part:
            if known:
                shutil.copyfile(path, part)
            with zipfile.ZipFile(part, "a") as entries:
                for name, storage in missing.items():
                    on_cpu = storage.cpu()
                    _add(entries, name, _bytes_of(on_cpu))


class ArchiveReader:
    """The entries of an archive. Raises what zipfile, json and torch raise, and ValueError, for a damaged one."""

    def __init__(self, file: IO[bytes], folder: Path) -> None:
        self._zip = zipfile.ZipFile(file)
        self._entries = _checked_entries(self._zip, file.seek(0, os.SEEK_END))
        shared = self.json("shared.json") or {"file": "", "places": {}}
        self._file, self._places = folder / Path(shared["file"]).name, shared["places"]
        self._storages: dict[tuple[int, torch.device], torch.UntypedStorage] = {}

    def json(self, name: str) -> Any:
        """An entry of JSON; None where there is none of this name. Raises ValueError for one that is not JSON."""
        if _PREFIX + name not in self._entries:
            return None
        data = self._read(name)
        content = json.loads(data, parse_constant=_refuse_constant)
        if b"\\ud" in data.lower():  # halves of characters, which are no text where the other half is missing
            json.dumps(content, ensure_ascii=False).encode()
        return content

    def tensor(self, row: dict[str, Any]) -> torch.Tensor:
        """The tensor of the metadata that `add_tensor` gave."""
        t = self._load(row["saved"]) if "saved" in row else self._view(row)
        requires_grad = bool(row["requires_grad"])
        if row["parameter"]:
            return torch.nn.Parameter(t, requires_grad=requires_grad)
        return t.requires_grad_(requires_grad)

    def _read(self, name: str) -> bytes:
        return self._zip.read(self._entries[_PREFIX + name])

    def _bytes(self, number: int) -> bytes:
        name = self._places.get(str(number))
        if name is None:
            return self._read(f"storages/{number}")
        shared, entries = self._shared
        return shared.read(entries[_PREFIX + name])

    @functools.cached_property
    def _shared(self) -> tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]:
        if not self._file.is_file():
            raise TraceFileError(f"the weights of the trace are in {self._file}, which is not there")
        archive = zipfile.ZipFile(self._file)
        return archive, _checked_entries(archive, self._file.stat().st_size)

    def _load(self, name: str) -> torch.Tensor:
        data = self._read(name)
        _checked_entries(zipfile.ZipFile(io.BytesIO(data)), len(data))
        tensor = torch.load(io.BytesIO(data), weights_only=True)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is no tensor")
        return tensor

    def _view(self, row: dict[str, Any]) -> torch.Tensor:
        dtype, device = torch_object(torch.dtype, row["dtype"]), torch.device(row["device"])
        size, stride = _whole_numbers(row["size"]), _whole_numbers(row["stride"])
        offset, number, nbytes = _whole_numbers([row["offset"], row["storage"], row["nbytes"]])
        end = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
        storage = self._storage(number, device, nbytes)
        if 0 not in size and end * dtype.itemsize > storage.nbytes():
            raise ValueError("a tensor is larger than its storage")
        return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, size, stride)

    def _storage(self, number: int, device: torch.device, nbytes: int) -> torch.UntypedStorage:
        key = number, device
        if key not in self._storages:
            if device.type == "meta":  # of which the file has no bytes
                self._storages[key] = torch.UntypedStorage(nbytes, device=device)
            else:
                data = self._bytes(number)
                storage = torch.empty(len(data), dtype=torch.uint8, device="cpu").untyped_storage()
                _bytes_of(storage)[:] = data
                self._storages[key] = storage if device.type == "cpu" else storage.to(device=device)
        return self._storages[key]


def name_of(x: Any) -> str:
    """`float32` of torch.float32."""
    return str(x).removeprefix("torch.")


def torch_object(kind: type, name: Any) -> Any:
    """A dtype, layout or memory format by its name, such as `float32`. Raises ValueError for another name."""
    x = getattr(torch, name) if isinstance(name, str) else None
    if not isinstance(x, kind):
        raise ValueError(f"{name!r} is no {kind.__name__} of this torch")
    return x


def _whole_numbers(data: Any) -> list[int]:
    if not isinstance(data, list) or not all(type(n) is int and 0 <= n < 2**62 for n in data):
        raise ValueError(f"{data!r} are no sizes")
    return data


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
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * count).from_address(storage.data_ptr())).cast("B")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
