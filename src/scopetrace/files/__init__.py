"""Traces as files: a zip archive with a header, the tapes as JSON, and the tensors' memory.

archive   entries of the zip file: JSON, and tensors over shared storages
records   the classes that a file may have, the types of their fields, and what of a tape would be code
encoder   tapes -> tables of rows
decoder   tables of rows -> tapes

    scopetrace/header.json     {"format": "scopetrace trace", "version": 3, "scopetrace": "0.1.0", "torch": "2.13.0"}
    scopetrace/program.json    {"tables": {...}, "environment": ..., "recorded": row, "program": row}
    scopetrace/storages/0      raw bytes, in the byte order of the machine
    scopetrace/tensors/0.pt    torch.save of a tensor that is not strided
    scopetrace/shared.json     {"file": "weights.data", "places": {"0": "storages/HASH"}}, of an archive beside it

Reading runs no code of the file: it imports nothing and calls nothing that the file names. What torch.fx would write
into the code of the graph is checked (`refuse_code`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from scopetrace._compat.expressions import encode_environment
from scopetrace._compat.ops import building
from scopetrace.containers.structure import leaves_with_path
from scopetrace.errors import ScopetraceError, TraceFileError
from scopetrace.files.archive import ArchiveReader, ArchiveWriter, add_shared, replacing
from scopetrace.files.decoder import Decoder
from scopetrace.files.encoder import Encoder, NoForm
from scopetrace.files.records import refuse_code
from scopetrace.ir.tape import ProgramTape
from scopetrace.ir.verify import verify

FORMAT = "scopetrace trace"
VERSION = 3
"""Goes up when a file can no longer be read by the version before."""


def save(recorded: ProgramTape, tape: ProgramTape, path: Path, external_data: str | None) -> None:
    """As `write`, to a path, the storages to a file beside it if one is named."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    is_name = isinstance(external_data, str) and Path(external_data).name == external_data not in ("", path.name)
    if external_data is not None and not is_name:
        raise TraceFileError(f"external_data={external_data!r}: write the name of a file that lies beside the trace")
    shared = None if external_data is None else path.with_name(external_data)
    with replacing(path) as part, part.open("wb") as file:
        write(recorded, tape, file, None, shared)


def write(
    recorded: ProgramTape, tape: ProgramTape, file: IO[bytes], foreign: list[Any] | None, shared: Path | None = None
) -> None:
    """Write a program: its tape, and that of the recording, which may be the same.

    `foreign` takes what has no form as data, for a pickle; None: it is refused. `shared` is the archive
    of storages beside the file, where there is one.

    Raises TraceFileError for what a file cannot hold.
    """
    versions = {"scopetrace": sys.modules["scopetrace"].__version__, "torch": torch.__version__}
    with zipfile.ZipFile(file, "w") as entries:
        archive = ArchiveWriter(entries, shared is not None)
        archive.add_json("header.json", {"format": FORMAT, "version": VERSION, **versions, "byteorder": sys.byteorder})
        encoder = Encoder(archive, foreign)
        try:
            rows = {"recorded": encoder.row_of(recorded), "program": encoder.row_of(tape)}
            environment = None if tape.shape_env is None else encode_environment(tape.shape_env)
        except NoForm as error:
            raise _refusal(error.args[0], recorded) from None
        except ValueError as error:
            raise TraceFileError(f"a size of the trace has no form in a file: {error}") from error
        archive.add_json("program.json", {"tables": encoder.tables, "environment": environment, **rows})
        if shared is not None and archive.shared is not None:
            archive.add_json("shared.json", {"file": shared.name, "places": archive.places})
            try:
                add_shared(shared, archive.shared)
            except zipfile.BadZipFile as error:
                raise TraceFileError(f"{shared} is no file of weights of traces: name another one") from error


def _refusal(x: Any, recorded: ProgramTape) -> TraceFileError:
    """The error for an object that has no form as data; it says where the object is."""
    name = f"a {type(x).__module__}.{type(x).__qualname__}"
    way_out = "pickle.dumps(trace) keeps it, where pickle can"
    for fqn, module in recorded.modules.items():
        if module is x:
            way_out = f"trace without leaf_modules=, or {way_out}"
            return TraceFileError(f"{fqn} is a leaf module, {name}, whose code cannot be in a file; {way_out}")
    where = next(_places(x, recorded), "a constant of the program")
    return TraceFileError(f"{where} is {name}, which is no data that a file can hold; {way_out}")


def _places(x: Any, recorded: ProgramTape) -> Iterator[str]:
    args, kwargs = recorded.args
    named = [*((f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items(), ("the result", recorded.result)]
    for name, template in named:
        yield from (f"{name}{path}" for path, leaf in leaves_with_path(template) if leaf is x)
    for op in (op for tape in recorded.walk() for op in tape.ops):
        if any(leaf is x for _, leaf in leaves_with_path((op.args, op.kwargs))):
            yield f"an argument of {op.target} in {op.scope.path}"


@contextlib.contextmanager
def as_damage() -> Iterator[None]:
    """Inside, what is wrong with a tape that was read is a TraceFileError."""
    try:
        yield
    except TraceFileError:
        raise
    except ScopetraceError as error:
        raise TraceFileError(f"the file is damaged: {error}") from error
    except Exception as error:  # a damaged file may be wrong in any way
        raise TraceFileError(f"the file is no trace, or damaged: {type(error).__name__}: {error}") from error


@as_damage()
@building()
def read(file: IO[bytes], foreign: Sequence[Any], folder: Path) -> tuple[ProgramTape, ProgramTape]:
    """The tapes that `write` wrote: that of the recording, and that of the program. `folder` is that of the file.

    Raises TraceFileError for anything else.
    """
    archive = ArchiveReader(file, folder)
    _check_header(archive.json("header.json"))
    data = archive.json("program.json")
    decoder = Decoder(data["tables"], data["environment"], archive, list(foreign))
    recorded, tape = (decoder.row("tapes", data[name]) for name in ("recorded", "program"))
    holders: dict[str, torch.nn.Module] = {}
    for program in (recorded, tape):
        if not isinstance(program, ProgramTape):
            raise TypeError("a tape is no program")
        refuse_code(program, is_file=not foreign)
        verify(program, "the file")
        _bind_gradients(program)
        _bind_attributes(program, holders)
    return recorded, tape


def _bind_gradients(tape: ProgramTape) -> None:
    """Let tensors have the `grad` that the program reads, and the program follow it to the next one."""
    for name, (module, attribute) in tape.owners.items():
        tensor = tape.attributes.get(name.removesuffix("_grad"))
        if module is None and attribute.endswith(".grad") and tensor is not None:
            tensor.grad = tape.attributes[name]
            holder = torch.nn.Module()
            holder.__dict__[attribute.removesuffix(".grad")] = tensor
            tape.owners[name] = holder, attribute


def _bind_attributes(tape: ProgramTape, holders: dict[str, torch.nn.Module]) -> None:
    """Give attributes that the program binds to new tensors one place: in `holders`, by names of modules."""
    for i, write in enumerate(tape.attribute_writes):
        if write.of is not None:
            continue
        holder = holders.setdefault(write.fqn, torch.nn.Module())
        tape.attribute_writes[i] = dataclasses.replace(write, module=holder)
        tensor = tape.attributes.get(write.path)
        if tensor is not None and write.path in tape.owners:
            if write.buffer is None:
                holder.__dict__[write.name] = tensor
            else:
                holder.register_buffer(write.name, tensor, persistent=write.buffer)
            tape.owners[write.path] = holder, write.name


def _check_header(header: Any) -> None:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TraceFileError("this zip file is no trace: Trace.save did not write it")
    version, by = header.get("version"), header.get("scopetrace")
    if type(version) is not int or not isinstance(by, str):
        raise TraceFileError("the header of the trace is damaged")
    if version > VERSION:
        raise TraceFileError(
            f"the trace was written by scopetrace {by} in version {version} of the format, and this one reads up to "
            f"{VERSION}: install scopetrace {by} or newer"
        )
    if header.get("byteorder") != sys.byteorder:
        raise TraceFileError(f"the trace was written on a machine of another byte order, {header.get('byteorder')}")
