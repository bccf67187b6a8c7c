"""What each rule of `scopetrace.infer.rules` saves, as a part of the time of a trace.

    python -m benchmarks.rules                    # 20 models with the sizes of the example, 10 with dynamic sizes
    python -m benchmarks.rules --only 'hf:*t5*'   # these models, in all ways

A model is traced with the rules and without them, each time with torch's cache of fake results empty, as in a fresh
process. A rule saves, of each op that it answers for, torch's time for the op less its own. Columns:

    all       the part of the time of all traces together
    best      the largest part of one trace, and of which

A rule that saves 2 % of no trace has to go.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

ROOT = pathlib.Path(__file__).resolve().parent.parent
if __package__ in {None, ""}:
    sys.path[0] = str(ROOT)

from benchmarks import checks, dynamic, each_model, models  # noqa: E402

STATIC = (
    *("timm:beit_base_patch16_224", "timm:dla34", "timm:convnext_atto", "timm:efficientformer_l1", "timm:lcnet_050"),
    *("timm:vit_small_r26_s32_224", "timm:xcit_nano_12_p8_224", "timm:inception_v4", "timm:resnest14d"),
    *("timm:hiera_tiny_224", "hf:bert-generation", "hf:llama", "hf:bart", "hf:hubert", "hf:mt5", "hf:phimoe"),
    *("hf:owlvit", "hf:zamba", "hf:modernbert", "hf:yolos"),
)
DYNAMIC = (
    *("timm:convnext_atto", "timm:hiera_tiny_224", "hf:hubert", "hf:bart", "hf:exaone4", "hf:modernbert", "hf:mt5"),
    *("hf:detr", "hf:imagegpt", "hf:poolformer"),
)

Build = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]
Seconds = dict[Any, float]


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(model, way) with the ways `static`, `batch` and `lengths`: which sizes are dynamic."""
    if options.only:
        yield from (
            (n, way) for n in each_model.named(options.zoo, options.only) for way in ("static", "batch", "lengths")
        )
        return
    yield from ((n, "static") for n in STATIC)
    yield from ((n, way) for n in DYNAMIC for way in ("batch", "lengths") if way == "batch" or n.startswith("hf:"))


def example(built: Build, way: str) -> tuple[Build, Any]:
    """The model with inputs of a batch of 3, and its `dynamic_shapes`."""
    model, args, kwargs = built
    if way == "static":
        return built, None
    first = next(t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
    names = list(dynamic.named(model, args, kwargs))[: len(args)]
    torch.manual_seed(3)
    size = dynamic.EXAMPLE, 1.0, first.shape[0]
    args = tuple(dynamic.resized(a, *size, name) for name, a in zip(names, args, strict=True))
    kwargs = dynamic.resized(kwargs, *size)
    return (model, args, kwargs), dynamic.shapes_of(dynamic.named(model, args, kwargs), way == "lengths")


def timed(function: Callable[..., Any], op: Callable[..., Any], spent: Seconds) -> Callable[..., Any]:
    """`function`, whose time is added to `spent` for the op; `op` finds that in its arguments."""

    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[op(*args)] += time.thread_time() - start

    return run


def traced(st: Any, built: Build, shapes: Any, rules: bool) -> tuple[float, Seconds, Seconds, set[Any]]:
    """Seconds of a trace; by op those of the rules and of torch; the ops that rules answered for."""
    from scopetrace.infer import inference
    from scopetrace.record import ops

    model, args, kwargs = built
    by_rule: Seconds = defaultdict(float)
    by_torch: Seconds = defaultdict(float)
    answered: set[Any] = set()
    original = inference.Inference._by_rule

    def _by_rule(self: Any, func: Any, *rest: Any) -> Any:
        found = original(self, func, *rest) if rules else None
        answered.update([func] if found is not None else [])
        return found

    with (
        mock.patch.object(inference.Inference, "_by_rule", timed(_by_rule, lambda _, f, *rest: f, by_rule)),
        mock.patch.object(ops, "run_op", timed(ops.run_op, lambda mode, f, *_: f, by_torch)),
    ):
        FakeTensorMode.cache_clear()
        for table in vars(inference._of_torch).values():
            table.clear()
        gc.collect()
        start = time.thread_time()
        st.trace(model, args, kwargs, dynamic_shapes=shapes)
        return time.thread_time() - start, by_rule, by_torch, answered


def saved(st: Any, built: Build, shapes: Any) -> tuple[float, Seconds]:
    """Seconds of a trace with rules, and what those of each op save: the best of two after one to warm up."""
    traced(st, built, shapes, True)
    seconds, by_rule, by_torch, answered = min((traced(st, built, shapes, True) for _ in "12"), key=lambda r: r[0])
    _, _, alone, _ = min((traced(st, built, shapes, False) for _ in "12"), key=lambda r: r[0])
    return seconds, {f: alone.get(f, 0.0) - by_torch.get(f, 0.0) - by_rule.get(f, 0.0) for f in answered}


def name_of(func: Any) -> str:
    """The rule of an op: the function for its size, or that of its view."""
    from scopetrace.infer import rules
    from scopetrace.ops import views

    if func in rules.RULES:
        return str(getattr(rules.RULES[func], "__name__", "_max_pool1d"))
    parser = views._PARSERS.get(func)
    return "_elementwise" if parser is None else f"view: {parser.__name__}"


def main() -> int:
    """Measure, and print a line for each rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=pathlib.Path, default=ROOT.parent / "shared" / "zoo", help="folder of the zoo")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names or globs, also comma-separated")
    options = parser.parse_args()
    st, zoo = models.import_scopetrace(), models.load_zoo(options.zoo)
    total = 0.0
    sums: Counter[str] = Counter()
    best: dict[str, tuple[float, str]] = {}
    for model, way in cases(options):
        try:
            seconds, ops = saved(st, *example(zoo.build(model), way))
        except Exception as error:
            print(f"{model}, {way}: {checks.first_line(error)}")
            continue
        total += seconds
        parts: Counter[str] = Counter()
        for func, gain in ops.items():
            parts[name_of(func)] += gain  # type: ignore[assignment]
        sums.update(parts)
        best |= {n: max(best.get(n, (-1.0, "")), (gain / seconds, f"{model}, {way}")) for n, gain in parts.items()}
    print(f"{'rule':24} {'all':>7} {'best':>7}")
    for name, gain in sums.most_common():
        part, trace = best[name]
        print(f"{name:24} {gain / total:7.1%} {part:7.1%} {trace}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
