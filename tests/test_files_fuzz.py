"""Damaged files: a load gives a trace or a TraceFileError; neither it nor what one does with the trace runs code.

seed -> a file of one of `MODELS`, damaged in one of `DAMAGES` ways -> st.load, LOOKS at what it gives, a call
each text in a file -> replaced by each of CODES, which would run if it got into Python code -> the same
"""

import contextlib
import io
import itertools
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


ARGUMENTS = {
    "net": lambda: (torch.ones(2, 4), Cache(torch.ones(2, 4))),
    "sizes": lambda: (torch.randn(6, 2), 1),
    "linear": lambda: (torch.ones(2, 4),),
}

MODELS = {
    "net": lambda: st.trace(Net(), ARGUMENTS["net"]()),
    "sizes": lambda: st.trace(sizes, ARGUMENTS["sizes"](), dynamic_shapes=({0: Dim("n")}, Dim.DYNAMIC)),
    "linear": lambda: st.trace(nn.Linear(4, 4), ARGUMENTS["linear"]()),
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


LOOKS = {
    "text": str,
    "code": lambda tr: tr.graph_module.code,
    "graph": lambda tr: (str(tr.graph_module), tr.graph_module.print_readable(print_output=False)),
    "write-back": lambda tr: str(tr.write_back),
    "calls": lambda tr: [(repr(call), str(call.arguments), str(call.outputs)) for call in tr.calls],
    "summary": lambda tr: str(tr.summary()),
    "order": lambda tr: str(tr.order),
    "facts": lambda tr: [str(x) for x in (tr.specializations, tr.mutations, tr.aliases, tr.side_effects, tr.digest)],
    "lint": lambda tr: tr.lint(),
}
"""What people do with a trace that they do not know."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "trace"
    contents = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        make().save(path)
        contents[name] = path.read_bytes()
    return contents


def is_trace(name, data, path, what):
    """Whether a damaged file is a trace still, which is looked at and called. Raises where something else happens."""
    path.write_bytes(data)
    try:
        loaded = st.load(path)
        assert isinstance(loaded, st.Trace)
        for look in LOOKS.values():
            with contextlib.suppress(st.ScopetraceError):
                look(loaded)
        call(loaded, name)
    except TraceFileError:
        return False
    except Exception as error:
        error.add_note(f"in {name}: {what}")
        raise
    finally:
        ran = RAN.exists()
        if ran:
            RAN.rmdir()
        assert not ran, f"code of a file ran, in {name}: {what}"
    return True


def call(loaded, name):
    """Call a trace. A wrong program may raise what torch's ops raise; what is no Python is refused before."""
    try:
        with torch.no_grad():
            loaded(*ARGUMENTS[name]())
    except (SyntaxError, NameError, ImportError):
        raise
    except Exception:
        pass


# Damages at random ----------------------------------------------------------------------------------------------------


def run(files, seeds, path):
    count = 0
    for seed in seeds:
        rng = random.Random(seed)
        name = rng.choice(list(files))
        count += is_trace(name, rng.choice(DAMAGES)(files[name], rng), path, f"seed {seed}")
    return count


def test_damaged_files(files, tmp_path):
    assert run(files, range(200), tmp_path / "damaged") < 50


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", range(200, 10_200, 1000))
def test_many_damaged_files(files, start, tmp_path):
    assert run(files, range(start, start + 1000), tmp_path / "damaged") < 300


# Code in each text of a file ------------------------------------------------------------------------------------------

CODE = f"__import__('os').mkdir({str(RAN)!r})"
CODES = {
    "alone": lambda text: CODE,
    "default of an argument": lambda text: f"{text}={CODE}",
    "after a quote": lambda text: f'{text}"), {CODE}, ("',
    "after another quote": lambda text: f"{text}'), {CODE}, ('",
    "line": lambda text: f"{text}\n    {CODE}\n",
    "body": lambda text: f"{text}): {CODE}; return (",
    "guard": lambda text: f"{text}'] or {CODE}) or (L['x",
    "keyword": lambda text: "class",
    "quote": lambda text: text + '"',
    "backslash": lambda text: text + "\\",
    "nothing": lambda text: "",
    "half of a character": lambda text: "\ud800",
    "function": lambda text: "os.system",
}
"""By what they try, the texts in place of a text."""


def texts(x, path=()):
    """(holder, key, path) of each text: values, and the names of symbols and fields that are keys."""
    for key, item in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
        if isinstance(key, str):
            yield x, key, (*path, key), True
        if isinstance(item, str):
            yield x, key, (*path, key), False
        yield from texts(item, (*path, key))


def with_code(data, number, make):
    """A file with another text in the place of the one with this number."""
    entries = entries_of(data)
    program = json.loads(entries["scopetrace/program.json"])
    holder, key, _, is_key = next(itertools.islice(texts(program), number, None))
    if is_key:
        items = [(make(key) if k == key else k, item) for k, item in holder.items()]
        holder.clear()
        holder.update(items)
    else:
        holder[key] = make(holder[key])
    entries["scopetrace/program.json"] = json.dumps(program).encode()
    return archive_of(entries)


def places(data):
    """The texts of a file by their number: those at like places (fields of ops, of calls, ...) under one key."""
    program = json.loads(entries_of(data)["scopetrace/program.json"])
    like = {}
    for number, (_, _, path, is_key) in enumerate(texts(program)):
        key = tuple("*" if isinstance(part, int) else part for part in path), is_key
        like.setdefault(key, []).append(number)
    return like


def test_code_in_the_texts_of_a_file(files, tmp_path):
    """One text of each kind, and two of CODES for it, which are others for the next one."""
    codes = itertools.cycle(CODES.items())
    seen = set()
    for name, data in files.items():
        for key, numbers in places(data).items():
            for what, make in itertools.islice(codes, 2) if key not in seen and not key[1] else ():
                is_trace(name, with_code(data, numbers[0], make), tmp_path / "damaged", (what, key))
            seen.add(key)
    assert len(seen) > 100


AIMED = {
    "placeholder": lambda tables: op_of(tables, "placeholder").update(target=f"input={CODE}"),
    "attribute": lambda tables: op_of(tables, "get_attr").update(target=f'weight"), {CODE}, ("'),
    "keyword": lambda tables: op_of(tables, "call_function").update(kwargs={"dict": [[f"a={CODE}, b", 1]]}),
    "constant": lambda tables: add_argument(tables, {"object": [0, None, CODE]}),
    "function that is imported": lambda tables: add_argument(tables, {"named": ["os", "system", CODE]}),
    "wrap": lambda tables: op_of(tables, "call_function").update(
        target={"higher_order": "wrap"}, args={"tuple": [{"named": ["os", "mkdir", "x"]}, str(RAN)]}
    ),
    "name of a body": lambda tables: tables["tapes"][0][1].update(name=f'x"), {CODE}, ("'),
    "result": lambda tables: tables["tapes"][-1][1].update(returned=[{"object": [0, None, CODE]}]),
    "module": lambda tables: op_of(tables, "call_function").update(kind="call_module", target=f'x"), {CODE}, ("'),
    "fqn": lambda tables: tables["calls"][-1].update(fqn=f'x"), {CODE}, ("'),
    "size": lambda tables: op_of(tables, "call_function").update(
        unbacked={"dict": [[{"expression": {"u9": {}}}, {"tuple": [{"record": ["CallMethodKey", {"name": CODE}]}]}]]}
    ),
}
"""Code in each place that torch.fx writes as it is."""


def op_of(tables, kind):
    return next(op for op in tables["ops"] if op["kind"] == kind)


def add_argument(tables, x):
    op_of(tables, "call_function")["args"]["tuple"].append(x)


@pytest.mark.parametrize("what", AIMED)
def test_code_that_is_aimed_at_the_graph(files, what, tmp_path):
    refused = 0
    for name, data in files.items():
        entries = entries_of(data)
        program = json.loads(entries["scopetrace/program.json"])
        try:
            AIMED[what](program["tables"])
        except StopIteration:  # the model has no such op
            continue
        entries["scopetrace/program.json"] = json.dumps(program).encode()
        refused += not is_trace(name, archive_of(entries), tmp_path / "damaged", what)
    assert refused


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("what", CODES)
def test_code_in_all_texts_of_a_file(files, name, what, tmp_path):
    for key, numbers in places(files[name]).items():
        for number in numbers:
            data = with_code(files[name], number, CODES[what])
            is_trace(name, data, tmp_path / "damaged", (what, key, number))
