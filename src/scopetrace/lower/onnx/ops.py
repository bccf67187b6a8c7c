"""Ops whose ONNX form is a function: while the model is made, one node each, which calls a function or plugin.

Data flow:
    onnxscript functions in `custom_translation_table=`, and ops among `functions=` and `plugins=`
    -> the table for torch.onnx: forms that make one node, whose attributes are the numbers and strings of the op
    -> the functions with those that they call -> inlined after the translation, kept in the file, or left out of it
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import onnx_ir as ir
import onnxscript
from onnx_ir.passes.common import InlinePass, RemoveUnusedFunctionsPass

from scopetrace._compat.onnx import call_op
from scopetrace._compat.ops import Argument, OpOverload, schema_of
from scopetrace.errors import OnnxOptionError
from scopetrace.lower.onnx import Table

OpNames = Mapping[OpOverload, str | None]
"""By op, the name `"domain::Name"` that a dict gives it."""

Script = onnxscript.OnnxFunction[..., Any]

_KINDS = {"int": "INT", "bool": "INT", "float": "FLOAT", "str": "STRING"}


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
        scripts: dict[Any, Script] = {op: form for op, form in result.table.items() if _is_script(form)}
        for op, name in plugins.items():
            if name is not None:
                result.table[op] = _plugin_form(op, name)
                result.without_form.append(name)
            elif op not in scripts:
                raise OnnxOptionError(f"plugins: {op} needs a name: plugins={{op: 'my.domain::Name'}}")
        for op, name in functions.items():
            if name is not None:
                raise OnnxOptionError(
                    f"functions: {op} has the name of its onnxscript function, not {name!r}: write a list"
                )
            if op not in scripts:
                raise OnnxOptionError(
                    f"functions: {op} has no body: give it one, an onnxscript.script, in custom_translation_table="
                )
        for op, script in scripts.items():
            if plugins.get(op) is None:
                result.table[op] = _script_form(script)
                kept = result.functions if op in functions else result.plugins if op in plugins else result.inlined
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


def _is_script(form: Any) -> TypeGuard[Script]:
    return isinstance(form, onnxscript.OnnxFunction) and not form.traceable


def _script_form(script: Script) -> Callable[..., Any]:
    """A form for torch.onnx that makes a node which calls the function of a script."""
    signature, kinds, defaults = script.op_signature, dict[str, ir.AttributeType | None](), dict[str, Any]()
    assert signature is not None
    for parameter in signature.params:
        kinds[parameter.name] = parameter.type if isinstance(parameter, ir.schemas.AttributeParameter) else None
        if isinstance(parameter, ir.schemas.AttributeParameter) and parameter.default is not None:
            defaults[parameter.name] = parameter.default.value
    return _form(signature.domain, signature.name, kinds, defaults, len(script.function_ir.outputs))


def _plugin_form(op: Any, name: str) -> Callable[..., Any]:
    """A form for torch.onnx that makes a node of a plugin, for an op without a known function."""
    domain, separator, op_type = name.partition("::")
    if not separator:
        raise OnnxOptionError(f"plugins: {name!r} is no name of a plugin; write 'my.domain::{name}'")
    schema = schema_of(op)
    kinds = {argument.name: _attribute_type(op, argument) for argument in schema.arguments}
    return _form(domain, op_type, kinds, {a.name: a.default for a in schema.arguments}, len(schema.returns))


def _attribute_type(op: Any, argument: Argument) -> ir.AttributeType | None:
    """The type of the attribute that an argument of an op becomes; None for a tensor, which is an input."""
    kind = argument.type.removeprefix("Optional[").removesuffix("]") if "Optional" in argument.type else argument.type
    item = kind.removeprefix("List[").removesuffix("]")
    if kind == "Tensor":
        return None
    if item not in _KINDS:
        raise OnnxOptionError(
            f"plugins: {op} takes {argument.name}, a {kind}: give it an onnxscript.script in custom_translation_table="
        )
    return ir.AttributeType[_KINDS[item] + ("S" if item != kind else "")]


def _form(
    domain: str, op_type: str, kinds: Mapping[str, ir.AttributeType | None], defaults: Mapping[str, Any], outputs: int
) -> Callable[..., Any]:
    """A form that makes one node: attributes, of these types, with their defaults written out, and inputs, of None."""

    def form(*args: Any, **kwargs: Any) -> Any:
        operands = {**dict.fromkeys(kinds), **defaults, **dict(zip(kinds, args, strict=False)), **kwargs}
        inputs = [_as_input(operands[name]) for name, kind in kinds.items() if kind is None]
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


def _as_input(x: Any) -> Any:
    constant: Any = onnxscript.opset18.Constant
    return x if x is None or isinstance(x, ir.Value) else constant(value=ir.tensor(x))
