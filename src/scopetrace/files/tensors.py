"""Real tensors in an archive: parameters, buffers and constants, which may share storages.

Data flow:
    tensor -> a row of metadata, with the number of its storage -> the tensor, over the storage that is read once
    a tensor without plain storage (sparse, quantized) -> torch.save -> torch.load with weights_only=True
"""

from __future__ import annotations

import io
import itertools
from typing import Any

import torch

from scopetrace._compat.tensors import id_of_storage
from scopetrace.files.archive import ArchiveReader, ArchiveWriter, check_archive

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The classes of tensors that a file can have: subclasses have a meaning of their own."""


class TensorWriter:
    """Writes tensors, and each storage once."""

    def __init__(self, archive: ArchiveWriter) -> None:
        self._archive = archive
        self._storages: dict[int, int] = {}
        self._keep: list[torch.UntypedStorage] = []  # ids must not be used again
        self._numbers = itertools.count()

    def row(self, t: torch.Tensor) -> dict[str, Any]:
        """Write the tensor's memory, and return its metadata as JSON."""
        row = {"requires_grad": t.requires_grad, "parameter": type(t) is torch.nn.Parameter}
        t = t.detach()
        if t.layout is not torch.strided or t.is_quantized or t.is_nested or t.is_conj() or t.is_neg():
            return {**row, "saved": self._save(t)}
        return {
            **row,
            "storage": self._storage(t.untyped_storage()),
            "dtype": str(t.dtype).removeprefix("torch."),
            "device": str(t.device),
            "size": list(t.size()),
            "stride": list(t.stride()),
            "offset": t.storage_offset(),
            "nbytes": t.untyped_storage().nbytes(),
        }

    def _save(self, t: torch.Tensor) -> str:
        name = f"tensors/{next(self._numbers)}.pt"
        file = io.BytesIO()
        torch.save(t, file)
        self._archive.add(name, file.getbuffer())
        return name

    def _storage(self, storage: torch.UntypedStorage) -> int:
        key = id_of_storage(storage)
        if key not in self._storages:
            number = self._storages[key] = len(self._storages)
            self._keep.append(storage)
            if storage.device.type != "meta":
                self._archive.add_storage(f"storages/{number}", storage)
        return self._storages[key]


class TensorReader:
    """Reads tensors. Raises KeyError, TypeError, ValueError, RuntimeError for damaged rows."""

    def __init__(self, archive: ArchiveReader) -> None:
        self._archive = archive
        self._storages: dict[tuple[int, torch.device], torch.UntypedStorage] = {}

    def tensor(self, row: dict[str, Any]) -> torch.Tensor:
        """The tensor of a row."""
        t = self._load(row["saved"]) if "saved" in row else self._view(row)
        requires_grad = bool(row["requires_grad"])
        if row["parameter"]:
            return torch.nn.Parameter(t, requires_grad=requires_grad)
        return t.requires_grad_(requires_grad)

    def _load(self, name: str) -> torch.Tensor:
        data = self._archive.read(name)
        check_archive(data)
        tensor = torch.load(io.BytesIO(data), weights_only=True)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is no tensor")
        return tensor

    def _view(self, row: dict[str, Any]) -> torch.Tensor:
        dtype, device = dtype_of(row["dtype"]), torch.device(row["device"])
        size, stride = whole_numbers(row["size"]), whole_numbers(row["stride"])
        offset, number, nbytes = whole_numbers([row["offset"], row["storage"], row["nbytes"]])
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
                read = self._archive.storage(f"storages/{number}")
                self._storages[key] = read if device.type == "cpu" else read.to(device=device)
        return self._storages[key]


def dtype_of(name: Any) -> torch.dtype:
    """The dtype of a name such as `float32`. Raises ValueError for another one."""
    dtype = getattr(torch, name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of this torch")
    return dtype


def whole_numbers(data: Any) -> list[int]:
    """A list of integers from 0 on. Raises ValueError for anything else."""
    if not isinstance(data, list) or not all(type(n) is int and 0 <= n < 2**62 for n in data):
        raise ValueError(f"{data!r} are no sizes")
    return data
