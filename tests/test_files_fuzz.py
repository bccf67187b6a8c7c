"""Damaged files: a load gives a trace or a TraceFileError, and runs nothing.

seed -> a file of one of `MODELS`, damaged in one of `DAMAGES` ways -> st.load, and the text of what it gives
"""

import io
import json
import os
import pickle
import random
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import scopetrace as st
from scopetrace.errors import TraceFileError

RAN = Path("/tmp/scopetrace_ran_code")


class Evil:
    def __reduce__(self):
        return os.mkdir, (str(RAN),)


class Cache:
    def __init__(self, keys):
        self.keys = keys


class Net(nn.Module):
    """Writes, attributes, a cache, a constant that is sparse."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, 4)
        self.eye = torch.eye(40).to_sparse()

    def forward(self, x, cache):
        cache.keys = cache.keys + x
        x[0] *= 2
        return {"y": self.fc(self.norm(x)), "eye": self.eye.sum(), "cache": cache}


def sizes(x, n):
    found = x[x > 0]
    return torch.cond(found.sum() > 1, lambda t: t * 2, lambda t: t - 1, (found,)), x.reshape(-1)[: x.shape[0] // 2 + n]


MODELS = {
    "net": lambda: st.trace(Net(), (torch.ones(2, 4), Cache(torch.ones(2, 4)))),
    "sizes": lambda: st.trace(sizes, (torch.randn(6, 2), 1), dynamic_shapes=({0: Dim("n")}, Dim.DYNAMIC)),
    "linear": lambda: st.trace(nn.Linear(4, 4), (torch.ones(2, 4),)),
}


# Damages: bytes of a file, random numbers -> bytes --------------------------------------------------------------------


def flipped(data, rng):
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncated(data, rng):
    return data[: rng.randrange(len(data))]


def cut(data, rng):
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:a] + rng.choice([b"", rng.randbytes(b - a), data[a:b] * 2]) + data[b:]


def flipped_table(data, rng):
    """Only in the zip's own tables, at the end."""
    start = data.rindex(b"scopetrace/header.json") - 46
    return data[:start] + flipped(data[start:], rng)


def entries_of(data):
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def archive_of(entries, compression=zipfile.ZIP_STORED):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return made.getvalue()


def swapped_entries(data, rng):
    entries = entries_of(data)
    a, b = rng.sample(list(entries), 2)
    entries[a], entries[b] = entries[b], entries[a]
    return archive_of(entries)


def changed_entries(data, rng):
    entries = entries_of(data)
    name = rng.choice(list(entries))
    if rng.random() < 0.3:
        del entries[name]
    else:
        payloads = [
            b"",
            b"{}",
            b"null",
            b"[" * 10**5,
            b"9" * 10**5,
            rng.randbytes(99),
            pickle.dumps(Evil()),
            tensor_file(),
        ]
        entries[name] = rng.choice(payloads)
    return archive_of(entries, rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))


def tensor_file():
    """What torch.save writes, with a pickle that runs code."""
    file = io.BytesIO()
    torch.save({"a": Evil()}, file)
    return file.getvalue()


VALUES = [
    *(None, True, 0, 1, -1, 2, 3, 7, 10**6, 2**31, 2**62, 2**64, -(2**63), 10**40, 1.5, 1e300),
    *("", "x", "load", "cpu", "cuda:7", "meta", "float32", "float8_e4m3fn", "torch.os", "__class__", "s0"),
    *([], {}, [[]], {"values": 0}, {"ops": 0}, {"calls": 0}, {"tapes": 0}, {"scopes": 0}, {"fakes": 0}, {"numbers": 0}),
    *({"tensors": 0}, {"classes": 0}, {"tuple": []}, {"tuple": [1]}, {"dict": [[{"dict": []}, 1]]}, {"set": [[1]]}),
    *({"named": ["os", "system", "x"]}, {"named": ["os", "mkdir", "x"]}, {"op": ["aten::add", "Tensor"]}),
    *({"op": ["load_library", "x"]}, {"object": [0, {"dict": [["a", 1]]}, "x"]}, {"container": [0, None, []]}),
    *({"expression": ["sympy.Pow", 9, 10**9]}, {"size": [2**62, 2**62]}, {"device": "cuda"}, {"foreign": 0}),
    *({"layout": "load"}, {"dtype": "load"}, {"bytes": "x"}, {"slice": [1]}, {"record": ["WriteBack", {}]}),
]


def changed_json(data, rng):
    """Parts of the program replaced by others of it, or by values of other types; keys and items removed."""
    entries = entries_of(data)
    name = rng.choice(["scopetrace/program.json"] * 9 + ["scopetrace/header.json"])
    program = json.loads(entries[name])
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        places = [*parts(program)]
        holder, key = rng.choice(places)
        other, other_key = rng.choice(places)
        what = rng.random()
        if what < 0.15:
            del holder[key]
        elif what < 0.4:
            holder[key] = json.loads(json.dumps(other[other_key]))
        elif what < 0.5 and type(holder[key]) is int:
            holder[key] += rng.choice([-1, 1])
        else:
            holder[key] = json.loads(json.dumps(rng.choice(VALUES)))
    entries[name] = json.dumps(program).encode()
    return archive_of(entries)


def parts(x):
    found = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, item in list(found):
        yield x, key
        yield from parts(item)


def foreign(data, rng):
    return rng.choice(
        [
            lambda: pickle.dumps(Evil(), protocol=rng.randrange(6)),
            tensor_file,
            lambda: archive_of({"a": b"b"}),
            lambda: archive_of({"scopetrace/header.json": b"0" * 10**7}, zipfile.ZIP_DEFLATED),
            lambda: rng.randbytes(rng.randrange(2000)),
            lambda: data * 2,
            lambda: rng.randbytes(50) + data,
        ]
    )()


DAMAGES = [
    flipped,
    truncated,
    cut,
    flipped_table,
    swapped_entries,
    changed_entries,
    changed_json,
    changed_json,
    foreign,
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "trace"
    found = []
    for make in MODELS.values():
        torch.manual_seed(0)
        make().save(path)
        found.append(path.read_bytes())
    return found


def load_damaged(files, seed, path):
    """Whether a damaged file is one still. Raises what is neither a trace nor a TraceFileError."""
    rng = random.Random(seed)
    path.write_bytes(rng.choice(DAMAGES)(rng.choice(files), rng))
    try:
        loaded = st.load(path)
    except TraceFileError:
        return False
    finally:
        assert not RAN.exists()
    assert isinstance(loaded, st.Trace)
    return True


def run(files, seeds, path):
    return sum(load_damaged(files, seed, path) for seed in seeds)


def test_damaged_files(files, tmp_path):
    assert run(files, range(400), tmp_path / "damaged") < 100


@pytest.mark.slow
@pytest.mark.parametrize("start", range(400, 10_000, 800))
def test_many_damaged_files(files, start, tmp_path):
    assert run(files, range(start, start + 800), tmp_path / "damaged") < 250
