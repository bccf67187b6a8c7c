"""One program in one compiler, printed as one JSON line: `python -m benchmarks.client_jobs CLIENT MODEL SOURCE`.

Started by `benchmarks.clients`, in the environment of the client. SOURCE is `export` or `trace`: who made the program.
"""

import json
import os
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import models

Program = torch.export.ExportedProgram
Result = Callable[..., Any] | str
"""What runs the compiled program on tensors; or what there is to say of one that cannot run here."""


def resnet18() -> models.Built:
    """ResNet-18 of timm."""
    models.import_torchvision()
    import timm

    return timm.create_model("resnet18", pretrained=False).eval(), (torch.randn(1, 3, 64, 64),)


def bert() -> models.Built:
    """A BERT of two layers, and its hidden states alone."""
    models.import_torchvision()
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    return _First(BertModel(config)).eval(), (torch.randint(3, 1000, (1, 16)),)


def llama() -> models.Built:
    """A Llama of two layers, and its logits alone."""
    models.import_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=1000, num_key_value_heads=2, use_cache=False, **sizes)
    return _First(LlamaForCausalLM(config)).eval(), (torch.randint(3, 1000, (1, 16)),)


class _First(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> Any:
        """The first result of the model."""
        return self.model(ids)[0]


# The clients ---------------------------------------------------------------------------------------------------------


def executorch(make: Callable[[], Program], decomposed: Callable[[], Program], args: Any) -> Result:
    """Lowered to XNNPACK, and run in ExecuTorch's runtime."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    lowered = to_edge_transform_and_lower(make(), partitioner=[XnnpackPartitioner()]).to_executorch()
    program = Runtime.get().load_program(lowered.buffer)  # which a method needs to stay
    return lambda *args: program.load_method("forward").execute(args)


def executorch_edge(make: Callable[[], Program], decomposed: Callable[[], Program], args: Any) -> Result:
    """`to_edge` alone, without a backend, and run in ExecuTorch's runtime."""
    from executorch.exir import to_edge
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(to_edge(make()).to_executorch().buffer)
    return lambda *args: program.load_method("forward").execute(args)


def litert(make: Callable[[], Program], decomposed: Callable[[], Program], args: Any) -> Result:
    """Converted by litert-torch, from the program in place of the one that it would export itself."""
    import litert_torch
    from litert_torch import progress  # noqa: F401

    real, program = torch.export.export, make()
    torch.export.export = lambda *_, **__: program
    try:
        converted = litert_torch.convert(torch.nn.Identity().eval(), args)
    finally:
        torch.export.export = real
    return lambda *args: torch.as_tensor(converted(*(a.int() if a.dtype is torch.int64 else a for a in args)))


def openvino(make: Callable[[], Program], decomposed: Callable[[], Program], args: Any) -> Result:
    """Converted from the program, and run on the CPU."""
    import openvino

    converted = openvino.convert_model(make())
    compiled = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda *args: [torch.from_numpy(found) for found in compiled([a.numpy() for a in args]).values()]


def coremltools(make: Callable[[], Program], decomposed: Callable[[], Program], args: Any) -> Result:
    """Converted to an ML program, which runs on a Mac only."""
    import coremltools

    converted = coremltools.convert(decomposed(), convert_to="mlprogram", skip_model_load=True)
    return f"converted, {len(converted.get_spec().mlProgram.functions['main'].block_specializations)} block"


def torchao(make: Callable[[], Program], decomposed: Callable[[], Program], args: Any) -> Result:
    """PT2E: prepared, calibrated and converted with the quantizer of x86."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(make().module(), quantizer)
    prepared(*args)
    targets = [str(n.target) for n in convert_pt2e(prepared).graph.nodes]
    return f"{sum('.quantize_per' in t for t in targets)} quantize ops"


def tvm(make: Callable[[], Program], decomposed: Callable[[], Program], args: Any) -> Result:
    """Imported into Relax, built for the CPU and run."""
    import tvm
    from tvm import relax
    from tvm.relax.frontend.torch import from_exported_program

    module = from_exported_program(make(), keep_params_as_input=False)
    machine = relax.VirtualMachine(relax.build(module, target="llvm"), tvm.cpu())

    def run(*args: torch.Tensor) -> Any:
        return [torch.from_numpy(t.numpy()) for t in machine["main"](*(tvm.runtime.tensor(a.numpy()) for a in args))]

    return run


def iree(make: Callable[[], Program], decomposed: Callable[[], Program], args: Any) -> Result:
    """Imported by iree-turbine, compiled for the CPU and run."""
    import iree.runtime as runtime
    import iree.turbine.aot as aot

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.vmfb")
        aot.export(make()).compile(save_to=str(path), target_backends="llvm-cpu")
        content = path.read_bytes()
    config = runtime.Config("local-task")
    module = runtime.load_vm_module(runtime.VmModule.copy_buffer(config.vm_instance, content), config)
    return lambda *args: torch.from_numpy(module.main(*(a.numpy() for a in args)).to_host())


CLIENTS = {f.__name__: f for f in (executorch, executorch_edge, litert, openvino, coremltools, torchao, tvm, iree)}
MODELS = {f.__name__: f for f in (resnet18, bert, llama)}


def verdict(client: str, model: str, source: str) -> str:
    """What comes out: `right`, what the client says of a program that cannot run here, or what is wrong."""
    torch.manual_seed(0)
    net, args = MODELS[model]()
    with torch.no_grad():
        expected = net(*args)
        if source == "export":
            ways: Any = (
                lambda: torch.export.export(net, args),
                lambda: torch.export.export(net, args).run_decompositions({}),
            )
        else:
            import scopetrace as st

            ways = (
                lambda: st.trace(net, args).to_exported_program(),
                lambda: st.trace(net, args).decompose({}).to_exported_program(),
            )
        run = CLIENTS[client](*ways, args)
        if isinstance(run, str):
            return run
        got = run(*args)
    got = got[0] if isinstance(got, (list, tuple)) else got
    error = (torch.as_tensor(got) - expected).abs().max().item()
    return "right" if error < 1e-3 * expected.abs().max().item() + 1e-4 else f"WRONG, error {error:.2g}"


def main() -> None:
    """Print the verdict as the last line."""
    warnings.simplefilter("ignore")
    try:
        found = verdict(*sys.argv[1:])
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        found = f"fails: {type(error).__name__}: {first}"
    print(json.dumps(found), flush=True)
    os._exit(0)  # some runtimes crash when the interpreter ends


if __name__ == "__main__":
    main()
