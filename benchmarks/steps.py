"""Training steps of the zoo's models: forward, the sum of their floats as loss, and backward(), beside eager.

    python -m benchmarks.steps                        # all models of the zoo (--zoo FOLDER), one process
    python -m benchmarks.steps --only 'hf:*bert*' --joint
    python -m benchmarks.steps --every 23 --adamw 3   # three steps of AdamW
    python -m benchmarks.steps --only-joint           # torch's joint graph alone
    python -m benchmarks.steps --checkpointing        # with the models' own torch.utils.checkpoint, where they have it
    python -m benchmarks.steps --report-only          # print the last table again

Columns:
    ours      whether loss, gradients of all parameters and floating inputs, buffers and the state of the random number
              generator after a call of the trace equal eager's; with --adamw N, the parameters too, after N calls
    s         seconds of processor time of the trace
    backward  ops of backward, and how many of them have a module call of the forward
    saved     bytes that `Trace.memory` says are saved, over those that `saved_tensors_hooks` sees in eager
    peak      its peak over that of eager, where a dispatch mode counts the storages that are alive
    joint     with --joint: whether Dynamo and `aot_export_joint_with_descriptors` take the model; their seconds over
              ours, and the ops of backward whose module of the forward the graph knows
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
from torch.utils._pytree import tree_leaves, tree_map_only

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


def checkpointing(model: torch.nn.Module) -> None:
    """Let a model of transformers or timm run its layers under torch.utils.checkpoint, where it can."""
    for name, given in (
        ("gradient_checkpointing_enable", ({"use_reentrant": False},)),
        ("set_grad_checkpointing", (True,)),
    ):
        if hasattr(model, name):
            with contextlib.suppress(ValueError, AssertionError):  # it has the method and says that it cannot
                getattr(model, name)(*given)


def trainable(build: each_model.Build) -> each_model.Build:
    """The same model for training, with floating inputs that require grad.

    There is a batch of two where one is too few, and no input that requires grad where the model sets that itself.
    """
    copies, with_grad = 1, True

    def made() -> tuple[torch.nn.Module, Any, Any]:
        model, args, kwargs = build()
        repeat = lambda t: torch.cat([t] * copies).requires_grad_(with_grad and t.is_floating_point())  # noqa: E731
        return model.train(), *tree_map_only(torch.Tensor, repeat, (args, kwargs))

    model, args, kwargs = made()
    try:
        model(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        if "more than 1 value per channel" in str(error):
            copies = 2
        elif "change requires_grad flags" in str(error):
            with_grad = False
        else:
            raise
    return made


class Twin:
    """A model and a function that trains it for one step."""

    def __init__(self, build: each_model.Build, adamw: bool, checkpoints: bool) -> None:
        self.model, self.args, self.kwargs = build()
        if checkpoints:
            checkpointing(self.model)
        self.given = [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, torch.Tensor)]
        self.optimizer = torch.optim.AdamW(self.model.parameters()) if adamw else None

    def step(self) -> torch.Tensor:
        """Forward, backward and a step of the optimizer, if there is one."""
        loss = self.loss()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss

    def loss(self) -> torch.Tensor:
        """The forward and its loss."""
        return loss_of(self.model(*self.args, **self.kwargs))

    def after(self, step: Callable[[], torch.Tensor], times: int) -> list[Any]:
        """The losses of steps from one seed, and what they leave behind."""
        torch.manual_seed(1)
        losses = [step().detach() for _ in range(times)]
        grads = [t.grad for t in [*self.model.parameters(), *self.given]]
        return [torch.get_rng_state(), losses, grads, [*self.held()]]

    def held(self) -> list[torch.Tensor]:
        """Parameters, buffers and inputs."""
        return [t.detach() for t in [*self.model.parameters(), *self.model.buffers(), *self.given]]


def check(st: Any, build: each_model.Build, *, joint: bool, adamw: int, checkpoints: bool) -> Row:
    """One model, traced once, called once, beside another instance in eager."""
    build = trainable(build)
    ours, eager = (Twin(build, bool(adamw), checkpoints) for _ in range(2))
    start = time.process_time()
    tr = st.trace(ours.step)
    row: Row = {"seconds": time.process_time() - start}
    times = adamw or 1
    row["error"] = checks.same_result(ours.after(tr, times), eager.after(eager.step, times))
    row["ok"] = row["error"] is None
    nodes = [n for n in tr.graph_module.graph.nodes if tr.phase_of(n) == "backward"]
    row["backward"], row["with_call"] = len(nodes), len({*nodes} & {*tr.calls[0].backward_nodes})
    row["recomputed"] = sum(map(tr.is_recomputed, nodes))
    if not adamw:
        held = eager.held()
        memory, saved = tr.memory(), saved_by_autograd(eager.loss, held)
        row["saved"] = memory.saved_bytes / saved if saved else None
        for t in [*eager.model.parameters(), *eager.given]:
            t.grad = None
        with LiveStorages(held) as live:
            eager.step()
        row["peak"] = memory.peak_bytes / live.peak
    return {**row, **joint_of(build)} if joint else row


def joint_of(build: each_model.Build) -> Row:
    """Seconds of torch's own joint graph, its ops of backward, and of how many it knows the module of the forward.

    Dynamo captures the model first: without it no op knows its module, and fewer models are taken.
    """
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    model, args, kwargs = build()
    start = time.process_time()
    try:
        with contextlib.ExitStack() as stack:
            captured = dynamo_graph_capture_for_export(model)(*args, **kwargs)
            graph = aot_export_joint_with_descriptors(stack, captured, args, kwargs).graph_module.graph
    except TimeoutError:
        raise
    except Exception as error:
        return {"joint": None, "joint_error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
    seconds = time.process_time() - start
    ops = [n for n in graph.nodes if n.op == "call_function"]
    backward = [n for n in ops if n.meta.get("partitioner_tag") == "is_backward"]
    known = sum(bool(n.meta.get("fwd_nn_module_stack") or n.meta.get("nn_module_stack")) for n in backward)
    return {"joint": seconds, "joint_backward": len(backward), "joint_known": known}


def line(row: Row) -> list[str]:
    """The cells of one model."""
    ours, theirs = row.get("seconds"), row.get("joint")
    ratios = [f"{row[key]:.2f}" if row.get(key) else "-" for key in ("saved", "peak")]
    joint = "no" if "joint" in row else ""
    if theirs:
        joint = f"{row['joint_known']}/{row['joint_backward']}" + (f", {theirs / ours:.1f}" if ours else "")
    backward = f"{row['with_call']}/{row['backward']}" if "backward" in row else "-"
    return [row["model"], "ok" if row.get("ok") else "no", report.seconds(ours), backward, *ratios, joint]


def report_rows(rows: Sequence[Row]) -> str:
    """The table, the totals and what is missed."""
    right = [row for row in rows if row.get("ok")]
    again = [row["recomputed"] for row in right if row.get("recomputed")]
    owned = sum(r["with_call"] for r in right), sum(r["backward"] for r in right)
    lines = [
        report.table([HEADER, *map(line, rows)]),
        "",
        f"{len(rows)} models: equal to eager {len(right)}; {owned[0]} of {owned[1]} ops of backward have a call",
    ]
    if again:
        lines.append(f"  {sum(again)} of them run again under torch.utils.checkpoint, in {len(again)} models")
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
    taken = [row for row in rows if row.get("joint")]
    if taken:
        counts = sum(row["joint_known"] for row in taken), sum(row["joint_backward"] for row in taken)
        lines.append(
            f"  it takes {len(taken)} of {len(rows)} models, and knows the module of {counts[0]} of {counts[1]} ops"
        )
    return "\n".join([*lines, *(f"  {r['model']}: {r.get('error')}" for r in rows if not r.get("ok"))])


def main(argv: list[str] | None = None) -> int:
    """Check the models; the exit code is 1 if one is wrong, not if one is refused."""
    parser = each_model.parser(__doc__, "steps.jsonl")
    parser.add_argument("--joint", action="store_true", help="the column of aot_export_joint_with_descriptors")
    parser.add_argument("--only-joint", action="store_true", help="that column alone")
    parser.add_argument("--checkpointing", action="store_true", help="with the models' own checkpointing")
    parser.add_argument("--adamw", type=int, default=0, metavar="N", help="N calls of a step with AdamW")
    parser.add_argument("--limit", type=int, default=300, help="seconds for a model")
    options = parser.parse_args(argv)
    st = import_scopetrace()

    def limited(name: str, build: each_model.Build) -> Row:
        with each_model.time_limit(options.limit):
            if options.only_joint:
                return joint_of(trainable(build))
            return check(st, build, joint=options.joint, adamw=options.adamw, checkpoints=options.checkpointing)

    rows = each_model.run(options, limited, line, report_rows)
    return int(any("ok" in row and not row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
