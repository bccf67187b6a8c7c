"""ONNX files for device compilers: custom ops, plugins with constants, LoRA weights as inputs, weights written later.

python examples/onnx_devices.py
"""

import onnxscript
import torch
from onnxscript import opset20 as op
from torch import nn

import scopetrace as st


@torch.library.custom_op("example::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


RMS_NORM = torch.ops.example.rms_norm.default


@onnxscript.script(onnxscript.values.Opset("my.device", 1))
def RmsNorm(x, weight, eps: float = 1e-6):
    squares = op.ReduceMean(op.Mul(x, x), [-1], keepdims=1)
    return op.Mul(op.Div(x, op.Sqrt(op.Add(squares, op.Constant(value_float=eps)))), weight)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-5

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class Layer(nn.Module):
    def __init__(self, width, rank=2):
        super().__init__()
        self.norm, self.fc = Norm(width), nn.Linear(width, width)
        self.lora_a, self.lora_b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.fc(y) + self.lora_b(self.lora_a(y))


FORMS = {RMS_NORM: RmsNorm}
"""The ONNX form of each custom op."""


def custom_ops_as_functions(tr, path):
    """The onnxscript function of a custom op stays a function of the file, beside those of the layers."""
    return tr.to_onnx(path, functions=["layers", RMS_NORM], custom_translation_table=FORMS)


def plugins_with_constants(tr, path):
    """Each Norm is a node of a TensorRT plugin; `attributes` says what the plugin's creator needs."""

    def attributes(call):
        return {"plugin_version": "1", "plugin_namespace": "", "eps": call.attributes["eps"]}

    return tr.to_onnx(path, plugins={Norm: "trt.plugins::RmsNorm"}, attributes=attributes)


def custom_ops_as_plugins(tr, path):
    """Each call of the custom op is such a node; its numbers are attributes. No ONNX form is needed."""
    return tr.to_onnx(path, plugins={RMS_NORM: "trt.plugins::RmsNorm"})


def lora_as_inputs(tr, path):
    """LoRA weights are inputs, and outputs that a runtime keeps: `X` and `X_RetainedState`."""

    def retained(name):
        return name.replace("_updated", "_RetainedState")

    options = {"weight_inputs": "**.lora_*.weight", "retain_weights": True, "output_names": retained}
    return tr.to_onnx(path, functions="layers", custom_translation_table=FORMS, **options)


def without_weights(build, inputs, path):
    """The file of a model that has no memory yet. `st.write_onnx_weights` writes its weights when they are there."""
    with torch.device("meta"):
        tr = st.trace(build(), tuple(x.to("meta") for x in inputs))
    return tr.to_onnx(path, functions="layers", custom_translation_table=FORMS, export_params=False)


def weights_in_chunks(tr, path, size):
    """The weights in files of at most `size` bytes: path-00001-of-00003.onnx.data and so on."""
    return tr.to_onnx(path, functions="layers", custom_translation_table=FORMS, external_data=size)


if __name__ == "__main__":

    def build():
        return nn.Sequential(*(Layer(32) for _ in range(4)))

    model, x = build(), torch.randn(2, 32)
    trace = st.trace(model, (x,))
    for write in (custom_ops_as_functions, plugins_with_constants, custom_ops_as_plugins, lora_as_inputs):
        made = write(trace, f"{write.__name__}.onnx")
        print(write.__name__, [node.op_type for node in made.graph], [f.name for f in made.functions.values()])
    without_weights(build, (x,), "without_weights.onnx")
    st.write_onnx_weights("without_weights.onnx", model.state_dict())
    weights_in_chunks(trace, "chunks.onnx", 10_000)
