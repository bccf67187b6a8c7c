"""ONNX forms of ops, which torch.onnx takes as `custom_translation_table`.

Data flow:
    forms() -> forms of ops that torch.onnx has none for, or one that is wrong; called with ONNX values for tensors
    onnxscript functions in `custom_translation_table=`, and ops among `functions=` and `plugins=`
    -> forms that make one node, whose attributes are the numbers and strings of the op (OpFunctions)
    -> the functions with those that they call -> inlined after the translation, kept in the file, or left out of it
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import onnxscript
import torch
from onnx_ir.passes.common import InlinePass, RemoveUnusedFunctionsPass
from onnxscript import opset18
from onnxscript.function_libs.torch_lib.ops import core as torchlib
from onnxscript.function_libs.torch_lib.tensor_typing import TTensor

from scopetrace._compat.onnx import call_op
from scopetrace._compat.ops import Argument, OpOverload, schema_of
from scopetrace.errors import OnnxExportError, OnnxOptionError
from scopetrace.lower.onnx import Table

op: Any = opset18

OpNames = Mapping[OpOverload, str | None]
"""By op, the name `"domain::Name"` that a dict gives it."""

_KINDS = {"int": "INT", "bool": "INT", "float": "FLOAT", "str": "STRING"}


def forms() -> Table:
    """By op, its form."""
    table: dict[Any, Callable[..., Any]] = {
        torch.ops.aten.copy.default: _copy,
        torch.ops.aten.diagonal_scatter.default: _diagonal_scatter,
        torch.ops.aten.sort.stable: _sort,
        torch.ops.aten.cumprod.default: _cumprod,
        torch.ops.aten.histc.default: _histc,
        **dict.fromkeys((torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor), _index),
        **dict.fromkeys((torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default), _index_put),
        torch.ops.aten._grouped_mm.default: _grouped_mm,
        torch.ops.aten.scatter_reduce.two: _scatter_reduce,
    }
    of_experts = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if of_experts is not None:  # what transformers calls where torch has no kernel, as on CPU
        table[of_experts.default] = _grouped_mm
    return table


def _copy(self: Any, src: Any, non_blocking: bool = False) -> Any:
    """`aten.copy`, which torch.onnx translates without broadcasting `src` to the shape of `self`."""
    return op.Expand(op.CastLike(src, self), op.Shape(self))


def _diagonal_scatter(self: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """`aten.diagonal_scatter`: torch.onnx decomposes it into a write, and then refuses it."""
    places = op.Reshape(op.Range(_int(0), op.Size(self), _int(1)), op.Shape(self))
    places.type, places.shape = ir.TensorType(ir.DataType.INT64), self.shape
    diagonal = op.Reshape(torchlib.aten_diagonal(places, offset, dim1, dim2), _ints(-1))
    elements = op.ScatterElements(op.Reshape(self, _ints(-1)), diagonal, op.Reshape(src, _ints(-1)))
    return op.Reshape(elements, op.Shape(self))


def _int(n: int) -> Any:
    return op.Constant(value_int=n)


def _ints(*numbers: int) -> Any:
    return op.Constant(value_ints=numbers)


def _sort(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """`aten.sort.stable`, which torch.onnx has no form for: TopK puts equal numbers in the order of their indices."""
    return torchlib.aten_sort(self, dim, descending)


def _cumprod(self: Any, dim: int, dtype: int = -1) -> Any:
    """`aten.cumprod`, for which ONNX has an op from opset 26 on: a Scan that multiplies."""
    rank = len(self.shape)
    wanted = ir.DataType(dtype) if dtype != -1 else ir.DataType.INT64 if self.dtype.is_integer() else self.dtype
    factors = op.Cast(self, to=wanted)
    if not rank or 0 in self.shape:  # ONNX Runtime (1.31) aborts at a Scan of an empty tensor
        return factors
    dim %= rank
    others = op.Concat(op.Shape(self, start=0, end=dim), op.Shape(self, start=dim + 1), axis=0)
    ones = op.Expand(op.CastLike(_int(1), factors), others)
    product, factor = (ir.Value(name=name, type=ir.TensorType(wanted)) for name in ("product", "factor"))
    nodes = [node := ir.node("Mul", [product, factor]), ir.node("Identity", node.outputs)]
    outputs = [node.outputs[0] for node in nodes]
    for name, value in zip(("new_product", "result"), outputs, strict=True):
        value.name, value.type = name, product.type
    body = ir.Graph([product, factor], outputs, nodes=nodes, name="multiply")
    axes: dict[str, Any] = {"scan_input_axes": [dim], "scan_output_axes": [dim], "num_scan_inputs": 1}
    return call_op("Scan", ones, factors, _num_outputs=2, body=body, **axes)[-1]


def _scatter_reduce(self: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True) -> Any:
    """`aten.scatter_reduce.two`: of a mean torch.onnx keeps the last of several elements, since ONNX has none."""
    rank = len(self.shape)
    if rank and tuple(index.shape) != tuple(src.shape):  # as much of it as there are indices
        src = op.Slice(src, _ints(*[0] * rank), op.Shape(index))
    if reduce != "mean":
        return torchlib.aten_scatter_reduce(self, dim, index, src, reduce, include_self)
    one = op.CastLike(_int(1), self)
    if rank:
        total = torchlib.aten_scatter_reduce(self, dim, index, src, "sum", include_self)
        ones, rest = op.Expand(one, op.Shape(index)), op.Expand(one, op.Shape(self))
        before = rest if include_self else op.Sub(rest, rest)
        count = op.Max(op.ScatterElements(before, index, ones, axis=dim, reduction="add"), one)
    else:  # one element, and one index
        total, count = (op.Add(self, src), op.Add(one, one)) if include_self else (src, one)
    if self.dtype.is_integer():  # rounded down: Mod has the sign of the count
        total = op.Sub(total, op.Mod(total, count))
    return op.Div(total, count)


def _histc(self: Any, bins: int = 100, min: float = 0.0, max: float = 0.0) -> Any:
    """`aten.histc`, also of integers, of which torch.onnx has no form: they are counted as floating numbers."""
    if not self.dtype.is_integer():
        return torchlib.aten_histc(self, bins, min, max)
    return op.CastLike(torchlib.aten_histc(_cast(self, ir.DataType.FLOAT), bins, min, max), self)


def _index(self: Any, indices: Any) -> Any:
    """`aten.index`, also by indices of 32 bits, which ONNX has no gathering for."""
    return torchlib.aten_index(self, _int64(indices))


def _index_put(self: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """As `_index`, of `aten.index_put`: decompositions of torch make such indices."""
    return torchlib.aten_index_put(self, _int64(indices), values, accumulate)


def _int64(indices: Any) -> list[Any]:
    return [_cast(i, ir.DataType.INT64) if i is not None and i.dtype == ir.DataType.INT32 else i for i in indices]


def _cast(x: Any, to: ir.DataType) -> Any:
    result = op.Cast(x, to=to)
    result.type, result.shape = ir.TensorType(to), x.shape
    return result


def _grouped_mm(self: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: int = -1) -> Any:
    """`aten._grouped_mm` of the rows of all experts of a mixture: a Loop with a product for each expert.

    The rows of expert i are those from `offs[i - 1]` to `offs[i]`; those behind the last are zero.
    """
    if offs is None or len(self.shape) != 2 or len(mat2.shape) != 3 or bias is not None:
        raise OnnxExportError("a grouped product is exported of rows that belong to experts: 2-d by 3-d with offs=")
    wanted = ir.DataType(out_dtype) if out_dtype != -1 else self.dtype
    return op.Cast(_products(self, mat2, op.Cast(offs, to=ir.DataType.INT64)), to=wanted)


@onnxscript.script(default_opset=op)
def _products(x: TTensor, weights: TTensor, ends: onnxscript.INT64) -> TTensor:
    zero = op.Constant(value_ints=[0])
    nothing = op.CastLike(op.Constant(value_int=0), x)
    columns = op.Shape(weights, start=2, end=3)
    products = op.Expand(nothing, op.Concat(zero, columns, axis=0))
    start = op.Identity(zero)
    for i in range(op.Squeeze(op.Shape(weights, start=0, end=1))):
        end = op.Gather(ends, op.Unsqueeze(i, zero))
        product = op.MatMul(op.Slice(x, start, end, zero), op.Gather(weights, i))
        products = op.Concat(products, product, axis=0)
        start = end
    rest = op.Concat(op.Sub(op.Shape(x, start=0, end=1), start), columns, axis=0)
    return op.Concat(products, op.Expand(nothing, rest), axis=0)


@dataclasses.dataclass
class OpFunctions:
    """The ops whose form is a function.

    Attributes:
        table: the forms of all ops for torch.onnx, where these ops are one node each.
        inlined: the functions that are not in the file.
        functions: those that it has.
        plugins: those that it calls and leaves out.
        without_form: the names of plugins of which no function is known.
    """

    table: dict[Any, Callable[..., Any]]
    inlined: list[ir.Function] = dataclasses.field(default_factory=list)
    functions: list[ir.Function] = dataclasses.field(default_factory=list)
    plugins: list[ir.Function] = dataclasses.field(default_factory=list)
    without_form: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, functions: OpNames, plugins: OpNames, table: Table | None) -> OpFunctions:
        """For the ops that `functions=` and `plugins=` name. Raises OnnxOptionError."""
        result = cls(dict(table or {}))
        scripts = {t: f for t, f in result.table.items() if isinstance(f, onnxscript.OnnxFunction) and not f.traceable}
        for target, name in plugins.items():
            if name is not None:
                result.table[target] = _plugin_form(target, name)
                result.without_form.append(name)
            elif target not in scripts:
                raise OnnxOptionError(f"plugins: {target} needs a name: plugins={{op: 'my.domain::Name'}}")
        for target, name in functions.items():
            if name is not None:
                raise OnnxOptionError(
                    f"functions: {target} has the name of its onnxscript function, not {name!r}: write a list"
                )
            if target not in scripts:
                raise OnnxOptionError(
                    f"functions: {target} has no body: give it one, an onnxscript.script, in custom_translation_table="
                )
        for target, script in scripts.items():
            if plugins.get(target) is None:
                result.table[target] = _script_form(script)
                kept = (
                    result.functions if target in functions else result.plugins if target in plugins else result.inlined
                )
                known = {f.identifier() for f in kept}
                for called in (script, *script.function_ir.get_called_functions().values()):
                    function = ir.serde.deserialize_function(called.to_function_proto())
                    kept += [] if function.identifier() in known else [function]
        return result

    def finish(self, model: ir.Model) -> None:
        """Inline the functions that are not kept in a translated model, and forget those that it does not call.

        Raises OnnxOptionError where one is written in another opset than that of the model.
        """
        version = model.opset_imports.get("")
        model.functions.update({f.identifier(): f for f in (*self.inlined, *self.functions, *self.plugins)})
        RemoveUnusedFunctionsPass()(model)
        for function in model.functions.values():
            written_in = function.opset_imports.get("", version)
            if written_in != version:
                raise OnnxOptionError(
                    f"{function.domain}::{function.name} is written in opset {written_in}, and the model has opset "
                    f"{version}: write it with onnxscript.opset{version}, or opset_version={written_in}"
                )
        for kept in (self.functions, self.plugins):
            kept[:] = [f for f in kept if model.functions.pop(f.identifier(), None) is not None]
        InlinePass()(model)


def _script_form(script: onnxscript.OnnxFunction[..., Any]) -> Callable[..., Any]:
    signature, kinds, defaults = script.op_signature, dict[str, ir.AttributeType | None](), dict[str, Any]()
    assert signature is not None
    for parameter in signature.params:
        kinds[parameter.name] = parameter.type if isinstance(parameter, ir.schemas.AttributeParameter) else None
        if isinstance(parameter, ir.schemas.AttributeParameter) and parameter.default is not None:
            defaults[parameter.name] = parameter.default.value
    return _form(signature.domain, signature.name, kinds, defaults, len(script.function_ir.outputs))


def _plugin_form(target: Any, name: str) -> Callable[..., Any]:
    """A form for torch.onnx that makes a node of a plugin, for an op without a known function."""
    domain, separator, op_type = name.partition("::")
    if not separator:
        raise OnnxOptionError(f"plugins: {name!r} is no name of a plugin; write 'my.domain::{name}'")
    schema = schema_of(target)
    kinds = {argument.name: _attribute_type(target, argument) for argument in schema.arguments}
    return _form(domain, op_type, kinds, {a.name: a.default for a in schema.arguments}, len(schema.returns))


def _attribute_type(target: Any, argument: Argument) -> ir.AttributeType | None:
    """The type of the attribute that an argument of an op becomes; None for a tensor, which is an input."""
    kind = argument.type.removeprefix("Optional[").removesuffix("]") if "Optional" in argument.type else argument.type
    item = kind.removeprefix("List[").removesuffix("]")
    if kind == "Tensor":
        return None
    if item not in _KINDS:
        raise OnnxOptionError(
            f"plugins: {target} takes {argument.name}, a {kind}: give it an onnxscript.script in "
            "custom_translation_table="
        )
    return ir.AttributeType[_KINDS[item] + ("S" if item != kind else "")]


def _form(
    domain: str, op_type: str, kinds: Mapping[str, ir.AttributeType | None], defaults: Mapping[str, Any], outputs: int
) -> Callable[..., Any]:
    """A form that makes one node: attributes, of these types, with their defaults written out, and inputs, of None."""

    def form(*args: Any, **kwargs: Any) -> Any:
        operands = {**dict.fromkeys(kinds), **defaults, **dict(zip(kinds, args, strict=False)), **kwargs}
        read = [operands[name] for name, kind in kinds.items() if kind is None]
        inputs = [x if x is None or isinstance(x, ir.Value) else op.Constant(value=ir.tensor(x)) for x in read]
        attributes: dict[str, Any] = {
            name: ir.convenience.convert_attribute(name, operands[name], kind)
            for name, kind in kinds.items()
            if kind is not None and operands[name] is not None
        }
        results = call_op(op_type, *inputs, _domain=domain, _num_outputs=outputs, **attributes)
        results[0].producer().version = 1  # type: ignore[union-attr]
        return results if outputs > 1 else results[0]

    form.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in kinds]
    )
    return form
