"""Training steps of the zoo's models: forward, the sum of their floats as loss, and backward(), beside eager.

    python -m benchmarks.steps                        # all models of the zoo (--zoo FOLDER), one process
    python -m benchmarks.steps --only 'hf:*bert*' --joint
    python -m benchmarks.steps --report-only          # print the last table again

Columns:
    ours      whether loss, gradients of all parameters and buffers of a call of the trace equal eager's
    s         seconds of processor time of the trace
    backward  ops of backward, and how many of them have a module call of the forward
    saved     bytes that `Trace.memory` says are saved, over those that `saved_tensors_hooks` sees in eager
    peak      its peak over that of eager, where a dispatch mode counts the storages that are alive
    joint     with --joint: whether `aot_export_joint_with_descriptors` takes the model; its seconds over ours
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import checks, each_model, report
from benchmarks.models import import_scopetrace

Row = each_model.Row
HEADER = ["model", "ours", "s", "backward", "saved", "peak", "joint"]


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that ops make, while somebody holds them.

    Attributes:
        peak: the most so far.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._held = set(map(storage_key, held))
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, and count."""
        out = func(*args, **(kwargs or {}))
        self._alive = {key: found for key, found in self._alive.items() if not found[0].expired()}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and storage_key(t) not in self._held:
                storage = t.untyped_storage()
                self._alive.setdefault(storage_key(t), (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def storage_key(t: torch.Tensor) -> int:
    """What is equal for tensors in one storage, while it lives."""
    return int(t.untyped_storage()._cdata)


def saved_by_autograd(loss: Callable[[], Any], held: Iterable[torch.Tensor]) -> int:
    """The bytes of the storages that `saved_tensors_hooks` sees, without those that are there before."""
    before = set(map(storage_key, held))
    seen: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen[storage_key(t)] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kept = loss()
    del kept
    return sum(size for key, size in seen.items() if key not in before)


def loss_of(out: Any) -> torch.Tensor:
    """The sum of all floats that require grad."""
    found = [t for t in _tensors(out) if t.is_floating_point() and t.requires_grad]
    return torch.stack([t.float().sum() for t in found]).sum()


def _tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    items = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else vars(x).values()
    return [t for item in items if isinstance(item, (torch.Tensor, dict, list, tuple)) for t in _tensors(item)]


def check(st: Any, build: each_model.Build, joint: bool) -> Row:
    """One model, traced once, called once, beside another instance in eager."""
    (model, args, kwargs), (twin, *_) = build(), build()
    model.train()
    twin.train()

    def step() -> torch.Tensor:
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        return loss

    start = time.process_time()
    tr = st.trace(step)
    row: Row = {"seconds": time.process_time() - start}
    torch.manual_seed(1)
    found = tr()
    torch.manual_seed(1)
    wanted = loss_of(twin(*args, **kwargs))
    wanted.backward()
    row["error"] = checks.same_result([found.detach(), *_state(model)], [wanted.detach(), *_state(twin)])
    row["ok"] = row["error"] is None
    nodes = [n for n in tr.graph_module.graph.nodes if tr.phase_of(n) == "backward"]
    row["backward"], row["with_call"] = len(nodes), len({*nodes} & {*tr.calls[0].backward_nodes})
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    held = [*twin.parameters(), *twin.buffers(), *given]
    memory, saved = tr.memory(), saved_by_autograd(lambda: loss_of(twin(*args, **kwargs)), held)
    row["saved"] = memory.saved_bytes / saved if saved else None
    twin.zero_grad()
    with LiveStorages(held) as live:
        loss_of(twin(*args, **kwargs)).backward()
    row["peak"] = memory.peak_bytes / live.peak
    if joint:
        row["joint"] = joint_seconds(build)
    return row


def _state(model: torch.nn.Module) -> list[Any]:
    return [*(p.grad for p in model.parameters()), *model.buffers()]


def joint_seconds(build: each_model.Build) -> float | None:
    """Seconds of torch's own joint graph; None where it does not take the model."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    model, args, kwargs = build()
    start = time.process_time()
    try:
        with contextlib.ExitStack() as stack:
            aot_export_joint_with_descriptors(stack, model.train(), args, kwargs)
    except Exception:
        return None
    return time.process_time() - start


def line(row: Row) -> list[str]:
    """The cells of one model."""
    ours, theirs = row.get("seconds"), row.get("joint")
    ratios = [f"{row[key]:.2f}" if row.get(key) else "-" for key in ("saved", "peak")]
    joint = f"{theirs / ours:.1f}" if theirs and ours else "no" if "joint" in row else ""
    backward = f"{row['with_call']}/{row['backward']}" if "backward" in row else "-"
    return [row["model"], "ok" if row.get("ok") else "no", report.seconds(ours), backward, *ratios, joint]


def report_rows(rows: Sequence[Row]) -> str:
    """The table, the totals and what is missed."""
    right = [row for row in rows if row.get("ok")]
    owned = sum(r["with_call"] for r in right), sum(r["backward"] for r in right)
    lines = [
        report.table([HEADER, *map(line, rows)]),
        "",
        f"{len(rows)} models: equal to eager {len(right)}; {owned[0]} of {owned[1]} ops of backward have a call",
    ]
    for key in ("saved", "peak"):
        ratios = sorted(row[key] for row in right if row.get(key))
        if ratios:
            within = sum(abs(r - 1) <= 0.1 for r in ratios)
            lines.append(
                f"  {key}: {within} of {len(ratios)} within 10 % of eager, {ratios[0]:.2f} to {ratios[-1]:.2f}"
            )
    both = [row for row in right if row.get("joint")]
    if both:
        whole = sum(row["joint"] for row in both) / sum(row["seconds"] for row in both)
        lines.append(f"  the joint graph of AOTAutograd, {len(both)} models: {whole:.1f} times our seconds")
    return "\n".join([*lines, *(f"  {r['model']}: {r.get('error')}" for r in rows if not r.get("ok"))])


def main(argv: list[str] | None = None) -> int:
    """Check the models; the exit code is 1 if one is wrong, not if one is refused."""
    parser = each_model.parser(__doc__, "steps.jsonl")
    parser.add_argument("--joint", action="store_true", help="the column of aot_export_joint_with_descriptors")
    parser.add_argument("--limit", type=int, default=300, help="seconds for a model")
    options = parser.parse_args(argv)
    st = import_scopetrace()

    def limited(name: str, build: each_model.Build) -> Row:
        with each_model.time_limit(options.limit):
            return check(st, build, options.joint)

    rows = each_model.run(options, limited, line, report_rows)
    return int(any("ok" in row and not row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
