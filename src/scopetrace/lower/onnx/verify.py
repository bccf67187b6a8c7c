"""Checks that an ONNX model is valid and computes what the model computes.

Data flow:
    tape -> random example inputs: the traced sizes, and others where sizes are dynamic
    inputs -> the traced model; the file in ONNX Runtime; the same file with all functions inlined -> compared
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx.inliner
import onnx_ir as ir
import onnxruntime
import torch
from onnx_ir import tensor_adapters

from scopetrace._compat.shape_env import evaluated
from scopetrace._compat.symbols import Symbolic, example, to_expr
from scopetrace.containers.structure import instantiate
from scopetrace.errors import InputMismatchError, OnnxVerificationError
from scopetrace.ir.tape import ProgramTape, Value
from scopetrace.lower.onnx.assemble import Exported
from scopetrace.lower.onnx.weights import save
from scopetrace.program.check import run_once, tracked_as
from scopetrace.program.traced import TracedProgram

Size = Callable[[Any], int]
"""Gives the value of a size, symbolic or not."""


class _Example(NamedTuple):
    """Inputs of a program: args and kwargs, and what the graph takes of them."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    tensors: list[torch.Tensor]
    numbers: list[int]


def _examples(tape: ProgramTape) -> Iterator[_Example]:
    """Random inputs: some of the traced sizes, and one of other sizes where sizes are dynamic.

    Whole numbers are 0 and 1, which are valid as indices, masks and positions alike. The last dimension begins with 1
    and ends in 0: for a mask that hides everything, whether it hides by 1 or by 0, attention has no defined result.
    """
    for seed in range(_SEEDS):
        yield _example(tape, seed, example)
    changes: list[Callable[[int], int]] = [lambda n: n + 1, lambda n: 2 * n, lambda n: n - 1, lambda n: 3 * n]
    rules = tape.sizes
    for change in changes if rules is not None else ():  # of all dynamic sizes: the first that the trace accepts
        assert rules is not None
        values = {s: change(int(rules.env.backed_var_to_val[s])) for s in rules.specs}

        def size(n: Any, values: dict[Any, int] = values) -> int:
            return int(evaluated(to_expr(n), values)) if isinstance(n, Symbolic) else n

        with contextlib.suppress(InputMismatchError, RuntimeError):
            inputs = _example(tape, _SEEDS, size)
            rules.check(inputs.tensors, inputs.numbers)
            yield inputs
            return


def _example(tape: ProgramTape, seed: int, size: Size) -> _Example:
    """Random inputs with the strides of the traced ones; one that was given twice in the trace is here, too."""
    random, tensors = torch.Generator().manual_seed(seed), dict[int, torch.Tensor]()
    for fake in {id(value.fake): value.fake for value in tape.inputs}.values():
        shape, stride = ([size(n) for n in numbers] for numbers in (fake.size(), fake.stride()))
        length = max(1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)), 1)
        if fake.dtype.is_floating_point or fake.dtype.is_complex:
            dtype = torch.complex64 if fake.dtype.is_complex else torch.float32
            memory = torch.randn(length, generator=random, dtype=dtype)
        else:
            memory = torch.randint(0, 2, [length], generator=random)
            if shape:
                numbers = memory.as_strided(shape, stride)
                numbers[..., -1:].fill_(0)
                numbers[..., :1].fill_(1)
        tensors[id(fake)] = tracked_as(fake, memory.to(fake.dtype).to(fake.device).as_strided(shape, stride))
    by_value = {value: tensors[id(value.fake)] for value in tape.inputs}
    arguments = instantiate(lambda x: by_value[x] if isinstance(x, Value) else size(x), tape.args, (Value, *Symbolic))
    return _Example(arguments, list(by_value.values()), [size(n) for n in tape.numbers])


class _Session:
    """An ONNX file in ONNX Runtime, on the CPU. Raises OnnxVerificationError where that does not load or run it."""

    def __init__(self, path: Path, optimized: bool = True) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's own classes are not public
            raise _refused(error) from error

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        names = [i.name for i in self._session.get_inputs()]
        feed = {name: _to_runtime(t) for name, t in zip(names, tensors, strict=True)}
        try:
            return list(map(_from_runtime, self._session.run_with_ort_values(None, feed)))
        except Exception as error:
            raise _refused(error) from error


def _refused(error: Exception) -> OnnxVerificationError:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "NOT_IMPLEMENTED" in said:
        said += "; it has no kernel for this on the CPU: verify a float32 copy of the model"
    return OnnxVerificationError(f"ONNX Runtime: {said}")


def _to_runtime(tensor: torch.Tensor) -> Any:
    tensor = _as_real(tensor.detach()).contiguous()
    dtype = int(tensor_adapters.from_torch_dtype(tensor.dtype))
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(tensor.shape), dtype)
    ctypes.memmove(value.data_ptr(), tensor.data_ptr(), tensor.nbytes)  # numpy has not all dtypes
    return value


def _from_runtime(value: Any) -> torch.Tensor:
    tensor = torch.empty(value.shape(), dtype=tensor_adapters.to_torch_dtype(ir.DataType(value.element_type())))
    ctypes.memmove(tensor.data_ptr(), value.data_ptr(), tensor.nbytes)
    return tensor


_SEEDS = 3

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2, **{dtype: torch.finfo(dtype).eps for dtype in _FLOAT8}}
"""The largest error: absolute, and relative to the largest value where that is above 1.

For outputs with small values only, the limit is 100 times this part of the largest value, since an absolute limit
would accept anything.
"""
_TOLERANCE = 1e-4
_ROUNDING = 1e-2
"""The least part of the tolerance that applies to small outputs, which may be what is left where values cancel."""


def verify(exported: Exported, program: TracedProgram, say: Callable[[str], None]) -> float:
    """The largest error of ONNX Runtime against the model. Raises OnnxVerificationError."""
    if any(t.device.type == "meta" for t in program.tape.attributes.values()):
        raise OnnxVerificationError("the model is on the meta device: it has no weights to compute with; verify=False")
    if not exported.model.graph.outputs:
        problem = "the program returns no tensor and writes to none: ONNX Runtime has nothing to compute"
        raise OnnxVerificationError(f"{problem}; return a tensor, or write verify=False")
    if exported.without_form:
        names = ", ".join(exported.without_form)
        raise OnnxVerificationError(f"the bodies of the plugins {names} have no ONNX form to run: verify=False")
    with tempfile.TemporaryDirectory() as folder:
        say("checking the file")
        modular, flat = _files(exported, Path(folder))
        return _Comparison(exported, program, modular, flat, say).run()


def _files(exported: Exported, folder: Path) -> tuple[Path, Path]:
    """Files of the checked model and of the same with all functions inlined, both with the bodies of plugins."""
    model = exported.model
    whole = ir.Model(model.graph, ir_version=model.ir_version, functions=[*exported.functions, *exported.op_functions])
    try:
        if exported.plugins:
            save(model, folder / "file.onnx", True)
            onnx.checker.check_model(str(folder / "file.onnx"))  # full: fails behind a plugin, whose types it lacks
        save(whole, folder / "modular.onnx", True)
        onnx.checker.check_model(str(folder / "modular.onnx"), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise OnnxVerificationError(f"onnx.checker: {error}") from error
    proto = onnx.load(folder / "modular.onnx", load_external_data=False)
    onnx.save(onnx.inliner.inline_local_functions(proto), folder / "flat.onnx")
    return folder / "modular.onnx", folder / "flat.onnx"


@dataclasses.dataclass
class _Comparison:
    exported: Exported
    program: TracedProgram
    modular: Path
    flat: Path
    say: Callable[[str], None]

    def run(self) -> float:
        """Run the model and both files on the same inputs; gives the largest error."""
        modular, flat = _Session(self.modular), _Session(self.flat)
        worst, compared = 0.0, 0
        refused: Exception | None = None
        for i, inputs in enumerate(_examples(self.program.tape)):
            try:  # whether the specializations of the trace hold on these inputs
                if self.program.tape.specializations:
                    run_once(self.program, self.program.tape, *inputs.arguments, lambda result, tensors: None)
            except InputMismatchError:
                continue
            self.say(f"comparing with the model, inputs {i + 1}")
            try:
                expected = self._eager(inputs)
            except Exception as error:  # as of a torch._check, or an index that is no random number
                refused = error
                continue
            results = modular.run(self._feed(inputs))
            worst = max(worst, self._compare(f"inputs {i + 1}", inputs, expected, results))
            if not compared:
                self._compare("the inlined file", inputs, results, flat.run(self._feed(inputs)))
            compared += 1
        if not compared and refused is not None:
            raise OnnxVerificationError(
                f"the model raises on all random inputs: {refused}; write verify=False, and compare on inputs of yours"
            ) from refused
        if not compared:
            raise OnnxVerificationError(
                "no random inputs go the way of the example inputs, which the trace is specialized on: "
                f"{self.program.tape.specializations[0]}; write verify=False, and compare on inputs of yours"
            )
        return worst

    def _feed(self, inputs: _Example) -> list[torch.Tensor]:
        return [*inputs.tensors, *map(torch.tensor, inputs.numbers), *self.exported.weight_inputs]

    def _eager(self, inputs: _Example, seed: int = 0) -> list[torch.Tensor]:
        model = (not self.program.tape.edited and self.program.model) or self.program
        with torch.set_grad_enabled(self.program.tape.grad):  # the model may differentiate
            results: list[torch.Tensor] = run_once(model, self.program.tape, *inputs.arguments, self._read, seed)
        return results

    def _read(self, result: Any, inputs: list[torch.Tensor]) -> list[Any]:
        values = self.exported.results.of_run(result, inputs, self.program.boundary.state.held)
        values += self.exported.retained
        return [v.detach().clone() if isinstance(v, torch.Tensor) else torch.tensor(v) for v in values]

    def _compare(
        self, where: str, inputs: _Example, expected: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> float:
        worst = 0.0
        names = [value.name for value in self.exported.model.graph.outputs]
        for name, a, b in zip(names, map(_as_real, expected), map(_as_real, results), strict=True):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise OnnxVerificationError(
                    f"{where}: {name} is {b.dtype} {list(b.shape)}, and the model gives {a.dtype} {list(a.shape)}"
                )
            error = _error(a, b)
            if not _is_small(error, a, self._limit):
                by = "in which values are finite" if error == float("inf") else f"by {error:.3g}"
                raise OnnxVerificationError(f"{where}: {name} differs from the model's {by}{self._why(inputs)}")
            worst = max(worst, error)
        return worst

    def _why(self, inputs: _Example) -> str:
        runs = [list(map(_as_real, self._eager(inputs, seed))) for seed in (0, 1)]
        if any(_error(a, b) for a, b in zip(*runs, strict=True)):
            return "; the model draws random numbers: trace it in eval mode"
        results = map(_as_real, _Session(self.modular, optimized=False).run(self._feed(inputs)))
        if all(_is_small(_error(a, b), a, self._limit) for a, b in zip(runs[0], results, strict=True)):
            return (
                "; the file is right, and so is ONNX Runtime without its graph optimizations, which make this error: "
                "set graph_optimization_level=ORT_DISABLE_ALL in its SessionOptions"
            )
        return ""

    @functools.cached_property
    def _limit(self) -> float:
        """The tolerance for the least precise dtype in the program, whose rounding all later values have."""
        dtypes = {v.fake.dtype for op in self.program.tape.ops for v in op.values()}
        return max(_TOLERANCES.get(dtype, _TOLERANCE) for dtype in (*dtypes, torch.float32))


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs, on the CPU: what an ONNX model gives for them."""
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
