"""What `functions=` and `plugins=` of `Trace.to_onnx` say: which module calls and ops, and under which names.

Data flow:
    targets, or a dict from targets to names -> FunctionTargets
    a module call + both arguments -> Label: whether it is a plugin, and its name; calls with other labels share nothing
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from scopetrace._compat.ops import CustomOpDef, OpOverloadPacket, is_op
from scopetrace.errors import OnnxOptionError
from scopetrace.ir.selection import is_named, target_text
from scopetrace.lower.onnx import Targets
from scopetrace.lower.onnx.forms import OpNames
from scopetrace.lower.onnx.naming import TAKEN_FOR_OPS
from scopetrace.program.outlined import GENERAL, OUTERMOST, OutlineTarget
from scopetrace.program.traced import ModuleCall

_NAME = re.compile(r"[A-Za-z_][\w.\-]*::[A-Za-z_]\w*")

_OF_RUNTIMES = frozenset({"ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft"})


class Label(NamedTuple):
    """What `functions=` and `plugins=` say of a call."""

    is_plugin: bool
    name: str | None
    """`domain::Name`, where a dict has one."""


class FunctionTargets:
    """The argument `functions=` or `plugins=`, read. Raises OnnxOptionError.

    Attributes:
        targets: those of `Trace.outline`.
        names: by target, the name that a dict gives it.
        ops: the ops, with their names.
    """

    def __init__(self, targets: Targets, where: str) -> None:
        names: Any = targets if isinstance(targets, Mapping) else {}
        several = isinstance(targets, (list, tuple, set, frozenset, Mapping))
        listed: list[Any] = list(targets) if several else [] if targets is False else [targets]  # type: ignore[arg-type]
        for target in listed:
            if isinstance(target, (OpOverloadPacket, CustomOpDef)):
                raise OnnxOptionError(
                    f"{where}: {target!r} may have several forms: name one, as torch.ops.my.op.default"
                )
            if isinstance(targets, Mapping) and not is_op(target):
                _check_name(target, names[target], where)
        self.where = where
        self.ops: OpNames = {target: names.get(target) for target in listed if is_op(target)}
        self.targets: list[OutlineTarget] = [target for target in listed if not is_op(target)]
        self.names: dict[Any, str] = {target: name for target, name in names.items() if not is_op(target)}
        self.by_rule = any(target in GENERAL for target in self.targets)

    def naming(self, call: ModuleCall) -> list[OutlineTarget]:
        """The targets that name a call; of classes the most derived, and none of those that name by a rule."""
        targets = [target for target in self.targets if target not in GENERAL and is_named(call, target)]
        classes = [target for target in targets if isinstance(target, type)]
        return [t for t in targets if not any(t in other.__mro__[1:] for other in classes)]

    def name(self, call: ModuleCall) -> str | None:
        """The name that a dict gives a call. Raises OnnxOptionError where it gives two."""
        names = {self.names[target]: target for target in self.naming(call) if target in self.names}
        if len(names) > 1:
            both = " and ".join(f"{name!r} by {target_text(target)}" for name, target in names.items())
            raise OnnxOptionError(f"{self.where}: {call.scope} has the names {both}; give it one")
        return next(iter(names), None)


def read_targets(functions: Targets, plugins: Targets) -> tuple[FunctionTargets, FunctionTargets]:
    """The arguments `functions=` and `plugins=`. Raises OnnxOptionError, also for what only one of them may name."""
    read = FunctionTargets(functions, "functions"), FunctionTargets(plugins, "plugins")
    for both in read[0].ops.keys() & read[1].ops.keys():
        raise OnnxOptionError(f"functions= and plugins= both name {both}: name it in one")
    for name in {*read[0].names.values()} & {*read[1].names.values()}:
        raise OnnxOptionError(f"functions= and plugins= both give the name {name!r}: a runtime takes one for the other")
    if read[0].by_rule and read[1].by_rule:
        raise OnnxOptionError("functions= and plugins= both name calls by a rule: give classes or patterns in one")
    return read


def label(functions: FunctionTargets, plugins: FunctionTargets, call: ModuleCall) -> Label:
    """What the arguments say of a call that one of them names: a rule such as "layers" names what the other leaves."""
    function, plugin = functions.naming(call), plugins.naming(call)
    if function and plugin:
        raise OnnxOptionError(
            f"{call.scope} is named by functions={target_text(function[0])} and by plugins={target_text(plugin[0])}: "
            f"leave it out of one, as functions=lambda call: isinstance(call.module, …) and call.fqn != {call.fqn!r}, "
            f"or give functions={OUTERMOST!r}, which leaves what plugins= names"
        )
    is_plugin = bool(plugin) or (plugins.by_rule and not function)
    return Label(is_plugin, (plugins if is_plugin else functions).name(call))


def _check_name(key: Any, name: Any, where: str) -> None:
    if key in GENERAL or not (isinstance(key, str) or callable(key)):
        what = "names calls by a rule" if key in GENERAL else "is no target"
        raise OnnxOptionError(
            f"{where}: {key!r} {what}; a dict names classes, modules or patterns, {{Block: 'my.domain::Block'}}"
        )
    base = key.__name__ if isinstance(key, type) else "Name"
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OnnxOptionError(f"{where}: {name!r} is no name of a function; write 'my.domain::{base}'")
    domain, _, op_type = name.partition("::")
    if where == "functions" and domain in _OF_RUNTIMES:
        raise OnnxOptionError(
            f"{where}: {name!r} is in a domain of ops that runtimes have, and these win over a function: "
            f"write 'my.domain::{base}', or name it in plugins="
        )
    if where == "functions" and op_type in TAKEN_FOR_OPS:
        raise OnnxOptionError(
            f"{where}: ONNX Runtime takes {name!r} for the op of that name, and aborts: write '{name}Module'"
        )
