"""Ops whose ONNX form is a function: while the model is made, one node each, which calls a function or plugin.

Data flow:
    onnxscript functions in `custom_translation_table=`, and ops among `functions=` and `plugins=`
    -> a schema of the call: tensors are inputs, numbers and strings attributes (of the script or the op)
    -> the table for torch.onnx, whose entries make one node each
    -> the functions with those that they call: inlined after the translation, kept in the file, or left out of it
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import onnx_ir as ir
import onnxscript
from onnx.defs import OpSchema, get_schema
from onnx_ir.passes.common import InlinePass, RemoveUnusedFunctionsPass

from scopetrace._compat.ops import CustomOpDef, OpOverload, OpOverloadPacket, is_op, schema_of
from scopetrace.errors import OnnxOptionError
from scopetrace.lower.onnx import Table, Targets

Names = Mapping[OpOverload, str | None]
"""By op, the name `"domain::Name"` that a dict gives it."""

Script = onnxscript.OnnxFunction[..., Any]

_KINDS = {"int": "INT", "bool": "INT", "float": "FLOAT", "str": "STRING"}


def split_ops(targets: Targets, where: str) -> tuple[Targets, Names]:
    """The targets that are module calls, and the ops among them. Raises OnnxOptionError."""
    listed: Any = targets if isinstance(targets, (list, tuple, set, frozenset, Mapping)) else [targets]
    for target in listed:
        if isinstance(target, (OpOverloadPacket, CustomOpDef)):
            raise OnnxOptionError(f"{where}: {target!r} may have several forms: name one, as torch.ops.my.op.default")
    if isinstance(targets, Mapping):
        named = {t: name for t, name in targets.items() if is_op(t)}
        return {t: name for t, name in targets.items() if t not in named}, named
    ops: Names = dict.fromkeys(filter(is_op, listed))
    return ([t for t in listed if t not in ops], ops) if ops else (targets, ops)


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
    def of(cls, functions: Names, plugins: Names, table: Table | None) -> OpFunctions:
        """For the ops that `functions=` and `plugins=` name. Raises OnnxOptionError."""
        found = cls(dict(table or {}))
        scripts: dict[Any, Script] = {op: form for op, form in found.table.items() if _is_script(form)}
        for op, name in plugins.items():
            if name is not None:
                found.name_plugin(op, name)
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
                kept = found.functions if op in functions else found.plugins if op in plugins else found.inlined
                found.add(op, script, kept)
        return found

    def finish(self, model: ir.Model) -> None:
        """Inline the functions that are not kept in a translated model, and forget those that it does not call.

        Raises OnnxOptionError where one is written in another opset than that of the model.
        """
        every, version = (*self.inlined, *self.functions, *self.plugins), model.opset_imports.get("")
        model.functions.update({f.identifier(): f for f in every})
        RemoveUnusedFunctionsPass()(model)
        for function in model.functions.values():
            own = function.opset_imports.get("", version)
            if own != version:
                raise OnnxOptionError(
                    f"{function.domain}::{function.name} is written in opset {own}, and the model has opset {version}: "
                    f"write it with onnxscript.opset{version}, or opset_version={own}"
                )
        for kept in (self.functions, self.plugins):
            kept[:] = [f for f in kept if model.functions.pop(f.identifier(), None) is not None]
        InlinePass()(model)

    def name_plugin(self, op: Any, name: str) -> None:
        """Make a plugin of an op without a known function."""
        domain, separator, own = name.partition("::")
        if not separator:
            raise OnnxOptionError(f"plugins: {name!r} is no name of a plugin; write 'my.domain::{name}'")
        self.without_form.append(name)
        parameters = [argument.name for argument in schema_of(op).arguments]
        self.table[op] = _caller(_schema_of_op(op, domain, own), parameters)

    def add(self, op: Any, script: Script, into: list[ir.Function]) -> None:
        """Make a function of an op, and of all that it calls."""
        every = [script, *script.function_ir.get_called_functions().values()]
        made = [ir.serde.deserialize_function(f.to_function_proto()) for f in every]
        known = {f.identifier() for f in into}
        into += [f for f in made if f.identifier() not in known]
        self.table[op] = _caller(_schema_of_script(script), list(inspect.signature(script.function).parameters))


def _is_script(form: Any) -> TypeGuard[Script]:
    return isinstance(form, onnxscript.OnnxFunction) and not form.traceable


def _caller(schema: OpSchema, parameters: list[str]) -> Callable[..., Any]:
    """A form for torch.onnx that makes a node of the schema, with defaults of attributes written out."""
    op = onnxscript.values.Op(onnxscript.values.Opset(schema.domain, 1), schema.name, schema)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        return op(**{name: value for name, value in given.items() if value is not None})

    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in parameters]
    )
    return call


def _schema_of_script(script: Script) -> OpSchema:
    signature, inputs, attributes = script.op_signature, [], []
    assert signature is not None
    for parameter in signature.params:
        if isinstance(parameter, ir.schemas.Parameter):
            inputs.append((parameter.name, parameter.required))
        elif parameter.default is None:
            attributes.append(
                OpSchema.Attribute(parameter.name, getattr(OpSchema.AttrType, parameter.type.name), required=True)
            )
        else:
            attributes.append(OpSchema.Attribute(parameter.name, ir.serde.serialize_attribute(parameter.default)))
    return _schema(signature.domain, signature.name, inputs, attributes, len(script.function_ir.outputs))


def _schema_of_op(op: Any, domain: str, name: str) -> OpSchema:
    inputs, attributes = [], []
    for argument in schema_of(op).arguments:
        kind = str(argument.type)
        is_optional = kind.startswith("Optional[")
        kind = kind.removeprefix("Optional[").removesuffix("]") if is_optional else kind
        item = kind.removeprefix("List[").removesuffix("]")
        if kind == "Tensor":
            inputs.append((argument.name, not is_optional))
        elif item in _KINDS:
            attribute = getattr(OpSchema.AttrType, _KINDS[item] + ("S" if item != kind else ""))
            if argument.default is None:
                attributes.append(OpSchema.Attribute(argument.name, attribute, required=not is_optional))
            else:
                default = ir.convenience.convert_attribute(argument.name, argument.default)
                attributes.append(OpSchema.Attribute(argument.name, ir.serde.serialize_attribute(default)))
        else:
            raise OnnxOptionError(
                f"plugins: {op} takes {argument.name}, a {kind}: give it an onnxscript.script in "
                "custom_translation_table="
            )
    return _schema(domain, name, inputs, attributes, len(schema_of(op).returns))


def _schema(domain: str, name: str, inputs: list[tuple[str, bool]], attributes: list[Any], outputs: int) -> OpSchema:
    types = list(get_schema("Identity").type_constraints[0].allowed_type_strs)
    options = OpSchema.FormalParameterOption
    named = [(i, options.Single if is_needed else options.Optional) for i, is_needed in inputs]
    named += [(f"output_{i}", options.Single) for i in range(outputs)]
    parameters = [OpSchema.FormalParameter(n, f"T{i}", param_option=option) for i, (n, option) in enumerate(named)]
    return OpSchema(
        name,
        domain,
        1,
        inputs=parameters[: len(inputs)],
        outputs=parameters[len(inputs) :],
        type_constraints=[(f"T{i}", types, "") for i in range(len(named))],
        attributes=attributes,
    )
