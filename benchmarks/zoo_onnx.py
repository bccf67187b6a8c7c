"""`Trace.to_onnx(functions="repeated", verify=True)` on the models of the zoo, beside torch.onnx.export.

    python -m benchmarks.zoo_onnx                       # all models of the zoo (--zoo FOLDER), one process
    python -m benchmarks.zoo_onnx --only 'hf:*bert*' --no-peer
    python -m benchmarks.zoo_onnx --every 4 --offset 1  # each fourth model, from the second
    python -m benchmarks.zoo_onnx --llama               # 4 and 32 layers of a Llama of hidden size 128
    python -m benchmarks.zoo_onnx --report-only         # print the last table again

Columns:
    s         seconds of `st.trace` and `.to_onnx(functions="repeated")`, without verification
    peer s    seconds of `torch.onnx.export(dynamo=True)` in the same process
    functions, main, nodes   distinct functions, nodes of the main program, nodes in all
    peer      nodes of torch.onnx.export's graph
    error     the largest error against the model in ONNX Runtime; or why there is none
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import sys
import tempfile
import time
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __package__ in {None, ""}:
    sys.path[0] = str(ROOT)

from benchmarks import checks, each_model  # noqa: E402
from benchmarks.models import import_scopetrace, import_torchvision, quiet  # noqa: E402

Row = each_model.Row


def ours(st: Any, model: torch.nn.Module, args: Any, kwargs: Any, path: pathlib.Path, verify: bool = True) -> Row:
    """Our columns."""
    from scopetrace.api.trace import program_of
    from scopetrace.lower.onnx.export import Options, write
    from scopetrace.lower.onnx.verify import verify as verified

    row: Row = {}
    start = time.perf_counter()
    try:
        with torch.no_grad():
            traced = st.trace(model, args, kwargs)
            written = write(program_of(traced), path, Options(functions="repeated"), True, False, None)
        row |= {"seconds": time.perf_counter() - start, "bytes": path.stat().st_size, "main": len(written.model.graph)}
        row["functions"] = len(written.model.functions)
        row["nodes"] = row["main"] + sum(len(f) for f in written.model.functions.values())
        row["error"] = verified(written, program_of(traced), lambda text: None) if verify else None
    except Exception as error:
        row["failed"] = said(error)
    return row


def said(error: Exception) -> str:
    """The error in a line; of ops without an ONNX form, all of them."""
    ops = list(dict.fromkeys(op for op, _, _ in getattr(error, "ops", [])))
    text = f"no ONNX form of {', '.join(ops)}" if ops else checks.first_line(error)
    return re.sub(r'File "\S*/site-packages/', 'File "', text)


def peer(model: torch.nn.Module, args: Any, kwargs: Any, path: pathlib.Path) -> Row:
    """torch.onnx.export's columns."""
    start = time.perf_counter()
    try:
        with torch.no_grad():
            program = torch.onnx.export(model, args, path, kwargs=kwargs, dynamo=True, verbose=False)
    except Exception as error:
        return {"failed": checks.first_line(error)}
    assert program is not None
    return {"seconds": time.perf_counter() - start, "bytes": path.stat().st_size, "nodes": len(program.model.graph)}


def check(st: Any, build: each_model.Build, options: argparse.Namespace) -> Row:
    """The row of one model."""
    model, args, kwargs = build()
    row: Row = {}
    with tempfile.TemporaryDirectory() as folder:
        with each_model.time_limit(options.limit):
            row["ours"] = ours(st, model, args, kwargs, pathlib.Path(folder) / "ours.onnx")
        if not options.no_peer:
            with each_model.time_limit(options.limit):
                row["peer"] = peer(model, args, kwargs, pathlib.Path(folder) / "peer.onnx")
    return row


def cells(row: Row) -> list[str]:
    """A line of the table."""
    mine, other = row.get("ours", {}), row.get("peer", {})
    error = mine.get("error")
    said = f"{error:.1e}" if error is not None else mine.get("failed", "")[:240]
    seconds = [f"{x['seconds']:.1f}" if "seconds" in x else "-" for x in (mine, other)]
    counts = [str(mine.get(key, "-")) for key in ("functions", "main", "nodes")]
    return [row["model"], *seconds, *counts, str(other.get("nodes", "-")), said]


def table(rows: list[Row]) -> str:
    """All lines, and the sums."""
    lines = [["model", "s", "peer s", "functions", "main", "nodes", "peer", "error"], *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    right = [r for r in rows if r.get("ours", {}).get("error") is not None]
    known = [r for r in rows if "nodes" in r.get("peer", {})]
    both = [r for r in known if r.get("ours", {}).get("error") is not None]
    text.append(f"{len(right)} of {len(rows)} converted and verified")
    if known:
        mine, other = (sum(r[who]["seconds"] for r in both) for who in ("ours", "peer"))
        text.append(
            f"{len(both)} of the {len(known)} that torch.onnx.export converts; {other:.0f} s against {mine:.0f} s"
        )
    return "\n".join(text)


def llama(st: Any, options: argparse.Namespace) -> None:
    """The costs of layers: seconds, nodes, and bytes without the weights."""
    import_torchvision()
    from transformers import LlamaConfig, LlamaModel

    ids = torch.randint(0, 256, (2, 8))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.onnx"
        for layers in (4, 4, 32):  # the first one warms up
            sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 256}
            config = LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes)
            model = LlamaModel(config).eval()
            print(layers, "layers", ours(st, model, (ids,), {"use_cache": False}, path, verify=False))
        if not options.no_peer:
            print(layers, "layers, torch.onnx.export", peer(model, (ids,), {"use_cache": False}, path))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = each_model.parser(__doc__, "zoo_onnx.jsonl")
    parser.add_argument("--no-peer", action="store_true", help="leave torch.onnx.export out")
    parser.add_argument("--limit", type=int, default=600, help="seconds for either on one model")
    parser.add_argument("--llama", action="store_true", help="4 and 32 layers of a Llama instead")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    options = parse(argv)
    st = import_scopetrace()
    quiet()
    if options.llama:
        llama(st, options)
    else:
        each_model.run(options, lambda _, build: check(st, build, options), cells, table)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
