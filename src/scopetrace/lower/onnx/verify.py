"""Is an ONNX model what it should be: valid, equal to the model when it runs, with the calls of the trace?"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
import onnx_ir as ir
import torch

from scopetrace.errors import InputMismatchError, OnnxVerificationError
from scopetrace.lower.onnx.export import Exported
from scopetrace.lower.onnx.inputs import Example, examples
from scopetrace.lower.onnx.runtime import Session
from scopetrace.lower.onnx.weights import save
from scopetrace.program.check import run_once
from scopetrace.program.traced import TracedProgram

SEEDS = 3

TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest absolute error, relative to the largest value where that is above 1.

Where all values are small that alone would say nothing: there the error may be 100 times this part of the largest one.
"""
_TOLERANCE = 1e-4
_ROUNDING = 1e-2
"""The part of the tolerance by which values may differ that should be 0, where larger ones cancel."""


def verify(exported: Exported, program: TracedProgram, say: Callable[[str], None]) -> float:
    """The largest error of ONNX Runtime against the model. Raises OnnxVerificationError with all that is wrong."""
    if any(t.device.type == "meta" for t in program.tape.attributes.values()):
        raise OnnxVerificationError("the model is on the meta device: it has no weights to compute with; verify=False")
    if exported.without_form:
        names = ", ".join(exported.without_form)
        raise OnnxVerificationError(f"the bodies of the plugins {names} have no ONNX form to run: verify=False")
    with tempfile.TemporaryDirectory() as folder:
        say("checking the file")
        modular, flat = _files(exported, Path(folder))
        _check_calls(exported)
        return _Comparison(exported, program, modular, flat, say).run()


def _files(exported: Exported, folder: Path) -> tuple[Path, Path]:
    """The model, checked, and the same with all functions inlined. Both have the bodies that plugins stand for."""
    model = exported.model
    whole = ir.Model(model.graph, ir_version=model.ir_version, functions=exported.functions)
    try:
        if exported.plugins:
            save(model, folder / "file.onnx", True)
            onnx.checker.check_model(str(folder / "file.onnx"), full_check=True)
        save(whole, folder / "modular.onnx", True)
        onnx.checker.check_model(str(folder / "modular.onnx"), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise OnnxVerificationError(f"onnx.checker: {error}") from error
    proto = onnx.load(folder / "modular.onnx", load_external_data=False)
    onnx.save(onnx.inliner.inline_local_functions(proto), folder / "flat.onnx")
    return folder / "modular.onnx", folder / "flat.onnx"


def _check_calls(exported: Exported) -> None:
    """Each function is called as often as the trace calls the modules that it stands for."""
    written = exported.calls_in_file()
    per_class: Counter[Any] = Counter()
    for key, count in written.items():
        per_class[exported.classes[key]] += count
    if per_class != exported.expected_calls:
        raise OnnxVerificationError(
            f"calls in the file: {_said(per_class)}; in the trace: {_said(exported.expected_calls)}"
        )


def _said(counts: Counter[Any]) -> str:
    return ", ".join(f"{getattr(cls, '__name__', cls)} ×{n}" for cls, n in sorted(counts.items(), key=str)) or "none"


@dataclasses.dataclass
class _Comparison:
    exported: Exported
    program: TracedProgram
    modular: Path
    flat: Path
    say: Callable[[str], None]

    def run(self) -> float:
        """Run the model and both files on the same inputs."""
        modular, flat = Session(self.modular), Session(self.flat)
        worst, compared = 0.0, 0
        for i, inputs in enumerate(examples(self.program.tape, SEEDS)):
            if self._goes_another_way(inputs):
                continue
            self.say(f"comparing with the model, inputs {i + 1}")
            found = modular.run(inputs.feed)
            worst = max(worst, self._compare(f"inputs {i + 1}", inputs, self._eager(inputs), found))
            if not compared:
                self._compare("the inlined file", inputs, found, flat.run(inputs.feed))
            compared += 1
        if not compared:
            raise OnnxVerificationError(
                "no random inputs go the way of the example inputs, which the trace is specialized on: "
                f"{self.program.tape.specializations[0]}; write verify=False, and compare on inputs of yours"
            )
        return worst

    def _goes_another_way(self, inputs: Example) -> bool:
        """Whether a decision by value, which the trace took from its example inputs, is another one on these."""
        if not self.program.tape.specializations:
            return False
        try:
            run_once(self.program, inputs.tape, *inputs.arguments(), lambda result, given: None)
        except InputMismatchError:
            return True
        return False

    def _eager(self, inputs: Example, seed: int = 0) -> list[torch.Tensor]:
        model = self.program.model or self.program
        with torch.no_grad():
            found: list[torch.Tensor] = run_once(model, inputs.tape, *inputs.arguments(), self._read, seed)
        return found

    def _read(self, result: Any, inputs: list[torch.Tensor]) -> list[Any]:
        values = self.exported.results.of_run(result, inputs, self.program.boundary.state.held)
        return [v.detach().clone() if isinstance(v, torch.Tensor) else torch.tensor(v) for v in values]

    def _compare(self, where: str, inputs: Example, expected: Any, found: Any) -> float:
        """The largest error. Raises OnnxVerificationError where it is too large."""
        worst = 0.0
        names = [value.name for value in self.exported.model.graph.outputs]
        for name, a, b in zip(names, map(_plain, expected), map(_plain, found), strict=True):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise OnnxVerificationError(
                    f"{where}: {name} is {b.dtype} {list(b.shape)}, and the model gives {a.dtype} {list(a.shape)}"
                )
            error = _error(a, b)
            if not self._is_small(error, a):
                raise OnnxVerificationError(
                    f"{where}: {name} differs from the model's by {error:.3g}{self._why(inputs)}"
                )
            worst = max(worst, error)
        return worst

    def _why(self, inputs: Example) -> str:
        runs = [list(map(_plain, self._eager(inputs, seed))) for seed in (0, 1)]
        if any(_error(a, b) for a, b in zip(*runs, strict=True)):
            return "; the model draws random numbers: trace it in eval mode"
        found = map(_plain, Session(self.modular, optimized=False).run(inputs.feed))
        if all(self._is_small(_error(a, b), a) for a, b in zip(runs[0], found, strict=True)):
            return (
                "; the file is right, and so is ONNX Runtime without its graph optimizations, which make this error: "
                "set graph_optimization_level=ORT_DISABLE_ALL in its SessionOptions"
            )
        return ""

    def _is_small(self, error: float, like: torch.Tensor) -> bool:
        return _is_small(error, like, self._limit)

    @functools.cached_property
    def _limit(self) -> float:
        """That of the least exact dtype in the program: what is computed in it does not become exact again."""
        dtypes = {v.fake.dtype for op in self.program.tape.ops for v in op.values()}
        return max(TOLERANCE.get(dtype, _TOLERANCE) for dtype in (*dtypes, torch.float32))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).cpu()


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.numel() == 0:
        return 0.0
    x, y = a.double(), b.double()
    special = ~(x.isfinite() & y.isfinite())
    if special.any() and not torch.equal(x[special].nan_to_num(7.5), y[special].nan_to_num(7.5)):
        return float("inf")
    x, y = x[~special], y[~special]
    return 0.0 if x.numel() == 0 else float((x - y).abs().max() / max(1.0, float(x.abs().max())))


def _is_small(error: float, like: torch.Tensor, limit: float) -> bool:
    largest = float(like.double().nan_to_num(0, 0, 0).abs().max()) if like.numel() else 0.0
    return error <= limit * min(1.0, max(100 * largest, _ROUNDING))
