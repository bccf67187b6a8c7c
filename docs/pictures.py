"""Makes docs/images: `make pictures`. Needs the extras zoo and view, Graphviz, and Chromium for the screenshots.

Data flow:
    DATA_FLOW -> Graphviz -> data-flow.svg
    models with random weights -> traces -> Trace.to_svg, and pages -> Chromium -> screenshots
    BERT's trace -> Trace.to_chrome_trace -> the events of the file as boxes -> bert-timeline.svg

One picture is made by hand: Netron's of an ONNX file, `Trace.to_onnx` of the ResNet with `functions=Bottleneck`.
"""

import html
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import graphviz
import torch
from torch import nn

import scopetrace as st
from scopetrace.cli.targets import load_model

IMAGES = Path(__file__).parent / "images"

DATA_FLOW = """
digraph {
  graph [rankdir=TB, nodesep=0.25, ranksep=0.3, bgcolor=white]
  node [fontname="Helvetica", fontsize=10, shape=box, style="rounded,filled", fillcolor="#ffffff", color="#57606a"]
  edge [fontname="Helvetica", fontsize=9, color="#57606a", fontcolor="#0550ae", arrowsize=0.6]
  model [label="model, example inputs", fillcolor="#eaeef2"]
  recorded [label="recorded tape\\nops as they ran, module calls,\\nwhich tensors share memory", fillcolor="#ddf4ff"]
  functional [label="functional tape\\nno op writes", fillcolor="#ddf4ff"]
  write_back [label="write-back\\ncopies into inputs and buffers", fillcolor="#ddf4ff"]
  trace [label="Trace", fillcolor="#fff8c5"]
  gm [label="graph_module, calls\\nsave, check, a call"]
  view [label="print, summary, diff\\nHTML, SVG"]
  outline [label="functions:\\none for each\\ndistinct layer"]
  lower [label="ONNX,\\nExportedProgram"]
  order [label="execution order"]
  plans [label="FSDP2 plans,\\npipeline stages"]
  model -> recorded [label="  record: runs the Python once, on fake tensors"]
  recorded -> functional [label="functionalize  "]
  recorded -> write_back
  functional -> trace
  write_back -> trace
  trace -> gm
  trace -> view
  trace -> outline [label=" outline"]
  trace -> lower [label=" lower"]
  trace -> order [label=" order"]
  outline -> lower
  order -> plans [label=" distributed"]
}
"""


def chromium() -> str:
    """The browser that takes screenshots."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise SystemExit("pictures need Chromium")
    return found


def screenshot(page: Path, name: str, fragment: str = "", size: str = "1280,800") -> None:
    """A picture of an HTML file as a browser shows it, after its scripts have run."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
    target = [f"--screenshot={IMAGES / name}", f"--window-size={size}", page.as_uri() + fragment]
    subprocess.run([chromium(), *options, *target], check=True, capture_output=True)


def timeline(events: list[dict[str, Any]]) -> str:
    """An SVG of the events of a Chrome trace: calls and ops as nested boxes, and below them the bytes in memory."""
    boxes, counts = ([event for event in events if event["ph"] == kind] for kind in "XC")
    scale, rows = 1280 / boxes[0]["dur"], []
    around: list[float] = []  # where the boxes around an event end
    for event in boxes:
        around = [end for end in around if event["ts"] < end]
        rows.append(len(around))
        around.append(event["ts"] + event["dur"])
    base = 18 * (max(rows) + 1)
    shapes = []
    for event, row in zip(boxes, rows, strict=True):
        x, width, name = event["ts"] * scale, event["dur"] * scale, event["name"]
        hue = sum(name.partition("[")[0].encode()) * 37 % 360
        text = html.escape(name[: int(width / 6.5)]) if width > 20 else ""
        shapes.append(
            f'<rect x="{x:.1f}" y="{18 * row}" width="{width:.1f}" height="17" fill="hsl({hue} 45% 80%)">'
            f'<title>{html.escape(name)}</title></rect><text x="{x + 3:.1f}" y="{18 * row + 13}">{text}</text>'
        )
    top = max(event["args"]["bytes"] for event in counts)
    steps = "".join(f"H{c['ts'] * scale:.1f}V{base + 68 - 60 * c['args']['bytes'] / top:.1f}" for c in counts)
    shapes.append(f'<path d="M0,{base + 68}{steps}H1280V{base + 68}Z" fill="#d4a72c66" stroke="#9a6700"/>')
    shapes.append(f'<text x="3" y="{base + 16}">{top / 1e6:.1f} MB of activations</text>')
    style = "text { font: 11px sans-serif } rect { stroke: white }"
    size = f'width="1280" height="{base + 70}" viewBox="0 0 1280 {base + 70}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(shapes)}</svg>'


def resnet(layers: int) -> st.Trace:
    """A ResNet-18 or a ResNet-50."""
    return st.trace(load_model(f"torchvision:resnet{layers}").eval(), (torch.randn(1, 3, 224, 224),))


def llama() -> st.Trace:
    """A Llama of 80 layers without memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672)).eval()
        return st.trace(model, (), {"input_ids": torch.ones(1, 128, dtype=torch.int64), "use_cache": False})


def bert() -> st.Trace:
    """BERT-base."""
    return st.trace(load_model("hf:bert").eval(), (torch.ones(1, 128, dtype=torch.int64),))


def versions() -> Iterator[st.Trace]:
    """Two versions of a model: the second has another activation and no bias in its head."""
    for activation, bias in ((nn.GELU(), True), (nn.SiLU(), False)):
        block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), activation, nn.Linear(32, 8))
        yield st.trace(nn.Sequential(block, nn.Linear(8, 4, bias=bias)), (torch.randn(2, 8),))


@torch.no_grad()
def make(folder: Path) -> None:
    """All pictures; `folder` is for what they are taken of."""
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "data-flow.svg").write_bytes(graphviz.Source(DATA_FLOW).pipe(format="svg"))
    resnet(18).to_svg(IMAGES / "resnet18.svg", depth=1)
    traced = bert()
    traced.to_svg(IMAGES / "bert-layer.svg", depth=2, scope="encoder.layer.0")
    traced.to_chrome_trace(folder / "bert.json")
    events = json.loads((folder / "bert.json").read_text())["traceEvents"]
    (IMAGES / "bert-timeline.svg").write_text(timeline(events), encoding="utf-8")
    for name, opened, box in (
        ("resnet50-page.png", resnet(50), "ResNet/Sequential[layer1]"),
        ("bert-page.png", traced, "BertModel/BertEncoder[encoder]/BertLayer[layer.0]/BertAttention[attention]"),
        ("llama80-page.png", llama(), "LlamaForCausalLM/LlamaModel[model]/LlamaDecoderLayer[layers.3]/LlamaMLP[mlp]"),
    ):
        opened.to_html(folder / "page.html")
        screenshot(folder / "page.html", name, "#" + quote(box), "1400,900")
    page = folder / "page.html"
    st.diff(*versions()).to_html(page)
    screenshot(page, "diff.png", size="1100,700")
    page.write_text(f"<body style='font: 13px sans-serif; margin: 16px'>{traced.summary(depth=2).to_html()}</body>")
    screenshot(page, "bert-summary.png", size="1250,480")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        make(Path(made))
