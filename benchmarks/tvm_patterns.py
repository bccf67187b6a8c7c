"""Mutation patterns through TVM, alone and behind `scopetrace.functional_backend`, compared with eager.

    pip install -c constraints.txt '.[tvm]'
    python benchmarks/tvm_patterns.py FOLDER             # the mutation patterns in FOLDER
    python benchmarks/tvm_patterns.py FOLDER --only 'input_*' --json out.json

The patterns without gradients: those whose inputs do not require any, run under `torch.no_grad()`. Each is compiled by
torch.compile, graph breaks allowed, and run twice: results, inputs, state, and shared memory are compared with eager,
strides are not. One process for each run, so that a crash of a compiler is one row.

Rows of the table:
    ok              equal to eager, or raises as eager does
    wrong           not equal, and nobody said so
    refused by us   scopetrace raised an error
    unsupported     TVM raised an error, or crashed
    torch.compile   fails or differs before any compiler: with backend="eager" too
"""

import argparse
import fnmatch
import importlib
import json
import multiprocessing
import os
import pathlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __package__ in {None, ""}:
    sys.path[0] = str(ROOT)
os.environ.setdefault("TVM_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from tvm.relax.frontend.torch import relax_dynamo  # noqa: E402

from examples.tvm_backend import compile_aten, compile_torch_functions  # noqa: E402
from scopetrace import functional_backend, functionalize  # noqa: E402
from scopetrace.errors import ScopetraceError  # noqa: E402

OK, WRONG, REFUSED, UNSUPPORTED, FRONTEND = "ok", "wrong", "refused by us", "unsupported", "torch.compile"
VERDICTS = (OK, WRONG, REFUSED, UNSUPPORTED, FRONTEND)
SECONDS = 120

Backend = Callable[..., Any]


class Row(NamedTuple):
    """What came of one pattern with one backend."""

    verdict: str
    detail: str


class Seen:
    """The first error of a compile, by who raised it. torch.compile wraps errors, so they are noted where they pass."""

    def __init__(self) -> None:
        self.row: Row | None = None

    def note(self, error: BaseException, otherwise: str) -> None:
        if self.row is None:
            verdict = REFUSED if isinstance(error, ScopetraceError) else otherwise
            self.row = Row(verdict, f"{type(error).__name__}: {first_line(error)}")

    def watch(self, function: Backend, otherwise: str) -> Backend:
        """As `function`, and the same for what it returns."""

        def watched(*args: Any) -> Any:
            try:
                made = function(*args)
            except Exception as error:
                self.note(error, otherwise)
                raise
            return self.watch(made, otherwise) if callable(made) and not isinstance(made, torch.Tensor) else made

        return watched


def first_line(error: BaseException) -> str:
    """What an error says, without its stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("Traceback", "File", "[", "at "))]
    return (said or lines or [""])[0][:150]


def tvm_own(seen: Seen) -> Backend:
    """TVM's own backend for torch.compile."""
    return seen.watch(relax_dynamo(), UNSUPPORTED)


def tvm_exported(seen: Seen) -> Backend:
    """TVM's frontend for exported programs on the graph of Dynamo, which torch.export makes pure first."""
    return seen.watch(compile_aten, UNSUPPORTED)


def behind_us(compiler: Backend, level: Any) -> Callable[[Seen], Backend]:
    """TVM behind the wrapper."""

    def make(seen: Seen) -> Backend:
        watched = seen.watch(compiler, UNSUPPORTED)
        # An error that is not ours and not of the compile: TVM's values do not fit what follows the graph.
        return seen.watch(functional_backend(watched, level=level, lower_scatter="slice_scatter"), WRONG)

    return make


BACKENDS: dict[str, Callable[[Seen], Backend]] = {
    "TVM, from_fx": tvm_own,
    "TVM, exported": tvm_exported,
    "wrapped, torch": behind_us(compile_torch_functions, "torch"),
    "wrapped, aten": behind_us(compile_aten, "aten"),
}


def patterns_of(path: pathlib.Path) -> Any:
    """The module with the patterns; it finds its neighbours on sys.path."""
    if not (path / "patterns.py").is_file():
        raise SystemExit(f"no patterns.py in {path}: give the folder of the mutation patterns as argument")
    sys.path.insert(0, str(path.resolve()))
    return importlib.import_module("patterns")


def wants_gradients(make_args: Callable[[int], tuple[Any, ...]]) -> bool:
    return any(isinstance(a, torch.Tensor) and a.requires_grad for a in make_args(0))


def judge(patterns: Any, name: str, make_backend: Callable[[Seen], Backend] | None) -> Row:
    """Run one pattern with one backend, or with backend="eager" for None."""
    function, make_args, is_module = patterns.PAT[name]
    seen = Seen()
    backend: Any = make_backend(seen) if make_backend else "eager"

    def capture(target: Any, args: Any) -> Any:
        torch.compiler.reset()
        return sys.modules["peers"].Prog(torch.compile(target, backend=backend, dynamic=False), [])

    with torch.no_grad():
        if is_module:
            verdict, detail, _ = patterns.run_module(function, make_args, capture)
        else:
            verdict, detail, _ = sys.modules["check"].evaluate(function, make_args, capture, check_strides=False)
    if verdict.startswith("ok"):
        return Row(OK, detail)
    if verdict == "error":
        return seen.row or Row(UNSUPPORTED, detail)
    return Row(WRONG, f"{verdict}: {detail}" if verdict != "wrong" else detail)


def warm_up() -> None:
    """What the processes would else each import and compile anew. TVM's machine does not run here: it has threads."""
    gm = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(inplace=True)))
    example = [torch.ones(2)]
    torch.compile(gm, backend="eager")(*example)
    for level, compiler in (("torch", compile_torch_functions), ("aten", compile_aten)):
        pure: Any = functionalize(gm, example, level=level)  # type: ignore[arg-type]
        compiler(pure.graph_module, example)


def in_a_process(work: Callable[[], Row]) -> Row:
    """The row, also where the compiler kills its process."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_send, args=(work, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(SECONDS) else Row(UNSUPPORTED, f"not done after {SECONDS} s")
    except EOFError:
        process.join()
        return Row(UNSUPPORTED, f"crashed, exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send(work: Callable[[], Row], to: Connection) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        row = work()
    except Exception as error:
        row = Row(UNSUPPORTED, f"{type(error).__name__}: {first_line(error)}")
    to.send(row)


def rows_of(patterns: Any, name: str) -> dict[str, Row]:
    """One pattern with every backend. What backend="eager" cannot do is held against no compiler."""
    base = in_a_process(lambda: judge(patterns, name, None))
    if base.verdict != OK:
        return dict.fromkeys(BACKENDS, Row(FRONTEND, base.detail))
    return {title: in_a_process(lambda make=make: judge(patterns, name, make)) for title, make in BACKENDS.items()}


def table(results: dict[str, dict[str, Row]]) -> str:
    """Verdicts counted, as a Markdown table."""
    counts = {title: Counter(rows[title].verdict for rows in results.values()) for title in BACKENDS}
    head = ["", *BACKENDS]
    body = [[verdict, *(str(counts[title][verdict]) for title in BACKENDS)] for verdict in VERDICTS]
    lines = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body]]
    return "\n".join(lines)


def details(results: dict[str, dict[str, Row]]) -> str:
    """Each wrong one, and behind the wrapper all that is not ok."""
    lines = []
    for title in BACKENDS:
        told = VERDICTS[1:] if title.startswith("wrapped") else (WRONG,)
        for verdict in told:
            rows = [(name, found[title].detail) for name, found in results.items() if found[title].verdict == verdict]
            lines += [f"\n{title}: {verdict} ({len(rows)})"] if rows else []
            lines += [f"  {name:36} {detail}" for name, detail in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=pathlib.Path, default=ROOT.parent / "shared" / "oracles")
    parser.add_argument("--only", default="*", help="a pattern of names")
    parser.add_argument("--json", type=pathlib.Path, help="write all rows there")
    options = parser.parse_args()
    patterns = patterns_of(options.path)
    chosen = [n for n, (_, make_args, _) in patterns.PAT.items() if not wants_gradients(make_args)]
    print(f"{len(chosen)} of {len(patterns.PAT)} patterns have no gradients")
    warm_up()
    results = {}
    for name in fnmatch.filter(chosen, options.only):
        results[name] = rows_of(patterns, name)
        print(f"{name:36}", *(f"{row.verdict:14}" for row in results[name].values()), file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    print(table(results))
    print(details(results))


if __name__ == "__main__":
    main()
