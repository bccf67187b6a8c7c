"""Summaries and pages beside torchinfo, torchview, fvcore and torchlens: what they count, and the CPU time of it.

    make bench-view
    make bench-view ARGS="--peers DIRECTORY"      # where the peers are installed: pip install --target DIRECTORY ...

Data flow:
    model -> what is right: parameters, FLOPs by torch's counter with attention as products, module calls seen by hooks
    model -> each tool in turn -> the same three numbers, and the CPU seconds of the fastest run -> a Markdown table

A peer that is not installed is left out. A number that is not the right one is in bold; of FLOPs, one that is off by
more than 2 %, since some count norms and additions too.
"""

import argparse
import dataclasses
import gc
import importlib
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models import ROOT, import_scopetrace

PEERS = ("torchinfo", "fvcore", "torchview", "torchlens")


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a tool says of a model; None for what it does not count."""

    parameters: int | None
    flops: int | None
    calls: int | None


Case = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


class Reuse(torch.nn.Module):
    """A module called twice, a tied weight, a keyword argument and a dict as result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)
        self.embed = torch.nn.Embedding(100, 64)

    def forward(self, ids: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """Token numbers to scores."""
        x = self.inner(self.inner(self.embed(ids))) * scale
        return {"logits": torch.nn.functional.linear(x, self.embed.weight)}


def cases() -> Iterator[tuple[str, Case]]:
    """Models with random weights, by name."""
    import timm
    import transformers as hf

    ids = torch.ones(1, 128, dtype=torch.int64)
    yield "ResNet-18", (timm.create_model("resnet18"), (torch.randn(1, 3, 224, 224),), {})
    yield "BERT-base", (hf.BertModel(hf.BertConfig()), (), {"input_ids": ids, "attention_mask": ids})
    yield "T5-small", (hf.T5Model(hf.T5Config()), (), {"input_ids": ids, "decoder_input_ids": ids})
    mixture = hf.MixtralConfig(
        num_hidden_layers=4, hidden_size=256, intermediate_size=512, num_attention_heads=8, vocab_size=1000
    )
    yield "Mixtral, 4 layers", (hf.MixtralModel(mixture), (), {"input_ids": ids, "use_cache": False})
    yield "reuse", (Reuse(), (ids,), {"scale": 2.0})


def right(case: Case) -> Counts:
    """What the model has and does."""
    model, args, kwargs = case
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    with torch.nn.modules.module.register_module_forward_hook(count):
        model(*args, **kwargs)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # it does not count the fused op of the CPU
        model(*args, **kwargs)
    return Counts(sum(p.numel() for p in model.parameters()), counter.get_total_flops(), calls)


# Tools ---------------------------------------------------------------------------------------------------------------


def ours(model: torch.nn.Module, args: Any, kwargs: Any) -> Counts:
    """A summary as text."""
    found = import_scopetrace().trace(model, args, kwargs).summary()
    assert str(found)
    calls = sum(bool(row.type) for row in found.rows)
    return Counts(found.rows[0].parameters + sum(found.unused.values()), found.rows[0].flops, calls)


def our_page(model: torch.nn.Module, args: Any, kwargs: Any) -> Counts:
    """The HTML page."""
    assert import_scopetrace().trace(model, args, kwargs).to_html()
    return Counts(None, None, None)


def torchinfo(model: torch.nn.Module, args: Any, kwargs: Any) -> Counts:
    """Its table as text."""
    more = kwargs if args else {}
    found = importlib.import_module("torchinfo").summary(model, input_data=[*args] or kwargs, verbose=0, **more)
    assert str(found)
    return Counts(found.total_params, 2 * found.total_mult_adds, len(found.summary_list))


def fvcore(model: torch.nn.Module, args: Any, kwargs: Any) -> Counts:
    """FLOPs and parameters; keyword arguments by position, since it takes no others."""
    nn = importlib.import_module("fvcore.nn")
    counted = nn.FlopCountAnalysis(model, (*args, *kwargs.values()))
    counted.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    return Counts(nn.parameter_count(model)[""], 2 * int(counted.total()), None)


def torchview(model: torch.nn.Module, args: Any, kwargs: Any) -> Counts:
    """A picture with all modules open."""
    drawn = importlib.import_module("torchview").draw_graph(
        model, input_data=kwargs or args, expand_nested=True, depth=20, device="cpu", graph_name="g"
    )
    assert drawn.visual_graph.source
    return Counts(None, None, None)


def torchlens(model: torch.nn.Module, args: Any, kwargs: Any) -> Counts:
    """Its log of a run."""
    found = importlib.import_module("torchlens").trace(model, [*args], kwargs)
    return Counts(found.num_params, int(found.total_flops_forward), found.num_module_calls)


TOOLS: dict[str, Callable[[torch.nn.Module, Any, Any], Counts]] = {
    "summary": ours,
    "page": our_page,
    "torchinfo": torchinfo,
    "fvcore": fvcore,
    "torchview": torchview,
    "torchlens": torchlens,
}


def measured(tool: Callable[..., Counts], case: Case, rounds: int) -> tuple[Counts | str, float]:
    """What a tool says, or why it fails, and the CPU seconds of the fastest run after a first one."""
    found: Counts | str = ""
    best = float("inf")
    for i in range(rounds + 1):
        gc.collect()
        start = time.process_time()
        try:
            found = tool(*case)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:60]}", 0.0
        if i:
            best = min(best, time.process_time() - start)
    return found, best


def row(name: str, expected: Counts, found: Counts | str, seconds: float, unit: float) -> str:
    """A line of the table; wrong numbers in bold."""
    if isinstance(found, str):
        return f"| {name} | fails: {found} | | | |"
    cells = []
    for key in ("parameters", "flops", "calls"):
        said, known = getattr(found, key), getattr(expected, key)
        is_right = said is None or abs(said - known) <= (0.02 * known if key == "flops" else 0)
        cells.append("" if said is None else f"{said:,}" if is_right else f"**{said:,}**")
    return f"| {name} | {' | '.join(cells)} | {seconds / unit:.2f} |"


def main() -> None:
    """Print the tables."""
    options = argparse.ArgumentParser(description="Compare summaries and pictures.")
    options.add_argument("--peers", help="a directory with the peers")
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    sys.path += [str(ROOT), *([given.peers] if given.peers else [])]
    from scopetrace.cli.targets import declare_missing_ops

    declare_missing_ops()
    warnings.simplefilter("ignore")
    logging.disable()
    tools = {name: tool for name, tool in TOOLS.items() if name not in PEERS or importlib.util.find_spec(name)}
    found = {name: (model.eval(), args, kwargs) for name, (model, args, kwargs) in cases()}
    with torch.no_grad():
        known = {name: right(case) for name, case in found.items()}
        by_tool = {  # one tool after the other: torchlens leaves torch changed
            tool: {name: measured(use, case, given.rounds) for name, case in found.items()}
            for tool, use in tools.items()
        }
    for name, expected in known.items():
        results = {tool: of[name] for tool, of in by_tool.items()}
        print(
            f"\n{name}: {expected.parameters:,} parameters, {expected.flops:,} FLOPs, {expected.calls:,} module calls\n"
        )
        print("| | parameters | FLOPs | module calls | CPU time |\n|---|---|---|---|---|")
        for tool, (said, seconds) in results.items():
            print(row(tool, expected, said, seconds, results["summary"][1]))
        print(f"\nOur summary took {results['summary'][1]:.3f} s.")


if __name__ == "__main__":
    main()
