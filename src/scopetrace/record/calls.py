"""Module calls: which module, with what, giving what, and which ops in between.

Data flow:
    `nn.Module.__call__` or `forward`, patched -> a Call with templates of its arguments -> the module's own Python
    its result -> the template of the call's outputs; its ops are those that were appended in the meantime
    a GraphModule whose nodes know where they come from -> `NodeRunner`, in place of its generated code

A module named in `leaf_modules` runs unseen, and its call is one op. What else `_compat.patches` reports of the forward
arrives here too: seeding, modes, collectives of Python objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

import torch
import torch.fx
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

from scopetrace._compat.ops import paused
from scopetrace._compat.questions import fast_path_enabled, grad_enabled
from scopetrace._compat.tensors import parameters_of, storage_id
from scopetrace.containers.contents import is_users_class
from scopetrace.containers.structure import (
    OpaqueContainer,
    is_plain_object,
    leaves_with_path,
    map_structure,
    opened_object,
    tensor_holders,
)
from scopetrace.errors import LeafPatternError, RandomStateError
from scopetrace.guards.attributes import current_attributes
from scopetrace.ir.guards import Guard
from scopetrace.ir.scopes import Scope, scope
from scopetrace.ir.segment import NESTED
from scopetrace.ir.selection import Candidate, Target, is_named, matches, near_text, several
from scopetrace.ir.tape import Call
from scopetrace.record.model import Model, plain_attributes
from scopetrace.record.nodes import NodeRunner, class_of_text, knows_origins, says_root, signature_of_nodes
from scopetrace.record.op_call import version_counter
from scopetrace.record.ops import OpRecorder
from scopetrace.record.reads import ReadRecorder
from scopetrace.record.values import ValueTable
from scopetrace.sources import SCOPETRACE

Progress = Callable[[str, int], None]
"""Called with the scope path of each module call that begins, and the number of ops recorded before it."""

_METHODS = frozenset(vars(torch.nn.Module)) | {"forward"}
_UNFLATTEN = "torch.export.unflatten"


class CallRecorder:
    """Records the module calls of one forward; `_compat.patches` tells it of them."""

    def __init__(
        self,
        ops: OpRecorder,
        object_types: frozenset[type],
        leaves: list[Target],
        progress: Progress | None,
        at_end: Callable[[], None],
        names: Set[str],
    ) -> None:
        """`at_end` is called where the traced callable has returned, for what others put on the tape there.

        `names` are those of methods that may be called.
        """
        self._ops, self._builder, self._reads = ops, ops.builder, ops.reads
        self._values, self._model = ops.values, ops.values.model
        self._object_types = object_types
        self.templates = Templates(ops.values, object_types, notes_objects=not leaves)
        self.result_types: frozenset[type] = frozenset()
        """The classes of the objects with tensors in the result of the root call."""
        self._leaves = leaves
        self._progress = progress
        self._next = 0  # the position of the next call
        self._counts: dict[Any, int] = {}  # by id of a module or scope, else by name: how often it was called
        self._classes: dict[Any, type] = {}
        self.paused = False
        """Whether a leaf module is running, so that the patches stay out of the way."""
        self._at_end = at_end
        self._entered: list[set[str]] = []  # of each open call, which of "call" and "forward" it was entered by
        self._methods = names - _METHODS
        self._running: list[torch.nn.Module | None] = []
        """The modules whose code runs, the innermost last."""

    def run_root(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the traced callable as the outermost call."""
        state = self._builder.state
        call = self._open(self._model.root, "", self._builder.tape.root, args, kwargs, self._model.kind)
        if call.module is None:
            with contextlib.suppress(TypeError, ValueError):  # built-in callables have no signature
                call.signature = inspect.signature(self._model.forward)
        state.listener = self
        try:
            return self.run(call, set(), fn, args, kwargs)
        finally:
            state.listener = None

    def on_call(self, module: torch.nn.Module, method: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module is called, or its forward: by the call that is open, or by the user in place of a call."""
        if method not in ("call", "forward"):
            return self._on_method(module, method, functools.partial(run, module, *args, **kwargs))
        call = self._builder.call and self._builder.call.of_module
        refusal = _other_path(module, args, kwargs, self._reads)
        if refusal is not None and not is_named(Candidate(module, type(module), *self._place(module)), self._leaves):
            raise self._builder.refusal(refusal[0], op=type(module).__qualname__, hint=refusal[1])
        if call is not None and call.module is module and method not in self._entered[-1]:
            self._entered[-1] |= {"call", method}
            is_root = isinstance(module, torch.fx.GraphModule) and call.parent is None
            if method == "forward" and is_root and knows_origins(module):
                return NodeRunner(module, self._builder).call(args, kwargs)
            return run(module, *args, **kwargs)  # the open call on its way in, no new one of the same module
        in_graph = isinstance(self._model.root, torch.fx.GraphModule)
        if in_graph and isinstance(module, torch.fx.GraphModule) and says_root(module.graph.nodes):  # of torch.export
            return NodeRunner(module, self._builder).call(args, kwargs)
        fqn, scope = self._place(module)
        call = self._open(module, fqn, scope, args, kwargs)
        call.direct = method == "forward"
        if self._progress is not None:
            self._progress(str(scope), len(self._builder.tape.ops))
        if self._leaves and is_named(call, self._leaves):
            return self._run_leaf(call, run, args, kwargs)
        return self.run(call, {"call", method}, run, (module, *args), kwargs)

    def methods_of(self, kind: type[torch.nn.Module]) -> dict[str, types.FunctionType]:
        """The methods of a class that its users have added to those of nn.Module, and that code names."""
        bases = [base for base in reversed(kind.__mro__) if is_users_class(base)]
        members = {name: x for base in bases for name, x in vars(base).items() if name in self._methods}
        return {name: x for name, x in members.items() if type(x) is types.FunctionType and not _is_scoped(x)}

    def _on_method(self, module: torch.nn.Module, name: str, run: functools.partial[Any]) -> Any:
        """Another module calls a method that is not `forward`: a user scope, if there are ops in it."""
        if self._running[-1] is module:
            return run()
        kind = self.class_of(module).__name__
        fqn = self._model.module_name(module, self._around()) or kind
        self._running.append(module)
        try:
            return self._in_scope(f"{fqn.removeprefix(f'{self._around()}.')}.{name}", run, method=f"{kind}.{name}")
        finally:
            self._running.pop()

    def on_trace(self, guards: Sequence[Guard], inputs: Sequence[Any]) -> None:
        """Another trace is called, and has compared these inputs and what else it depends on."""
        for guard in guards:
            self._reads.on_guard(guard, inputs)

    def on_nodes(
        self, fqn: str, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_kept: bool, run: Callable[[], Any]
    ) -> None:
        """Nodes of a graph begin that were a call of a module; `run` runs them and returns what that call did.

        `is_kept` says whether it is known which argument is which.
        """
        cls = self._classes.setdefault(kind, class_of_text(kind))
        call = self._open(None, fqn, self._scope(fqn, cls.__name__), args, kwargs, cls)
        call.signature = signature_of_nodes(cls, args, kwargs, is_kept=is_kept)
        if self._leaves and is_named(call, self._leaves):
            raise LeafPatternError(f"leaf_modules: {call.scope} is a part of the graph, in which no module is called")
        self.run(call, set(), run, (), {})

    def _place(self, module: torch.nn.Module) -> tuple[str | None, Scope]:
        fqn = self._model.module_name(module, self._around())
        return fqn, self._scope(fqn, self.class_of(module).__name__)

    def _around(self) -> str:
        """The name of the module that runs."""
        calls = self._builder.call.ancestors() if self._builder.call is not None else ()
        return next((call.fqn for call in calls if call.fqn is not None), "")

    def _scope(self, fqn: str | None, kind: str) -> Scope:
        """The scope of a module, named as in the module around it."""
        return self._builder.state.current_scope.child((fqn or "").removeprefix(f"{self._around()}."), kind)

    def _open(
        self, module: torch.nn.Module | None, fqn: str | None, scope: Scope, args: Any, kwargs: Any, kind: Any = None
    ) -> Call:
        builder, which = self._builder, fqn if fqn and module is None else id(scope if module is None else module)
        index = self._counts.get(which, 0)
        self._counts[which] = index + 1
        frames = builder.frames() if builder.call is not None else ()
        call = Call(module, fqn, index, builder.call, scope, (), {}, -1, frames, {}, self._next, module_type=kind)
        if module is not None:
            call.attributes = plain_attributes(current_attributes(module))
            call.module_type, call.replaced = kind or self.class_of(module), self._model.replaced(module)
        call.args, call.kwargs = self.templates.of((args, kwargs), call)
        call.start = len(builder.tape.ops)
        self._next += 1
        builder.tape.calls.append(call)
        return call

    def open_scope(self, scope: Scope) -> None:
        """A user scope begins, which is a call without a module."""
        if not self.paused:
            self._builder.call = self._open(None, None, scope, (), {})

    def close_scope(self, scope: Scope) -> None:
        """The call of a user scope ends."""
        call = self._builder.call
        if call is not None and call.scope is scope and not call.is_module:
            call.stop = len(self._builder.tape.ops)
            self._builder.call = call.parent

    def class_of(self, module: torch.nn.Module) -> type:
        """The class of a module. `torch.nn.utils.parametrize` makes one for each module: equal ones count as one."""
        kind = type(module)
        name: Any = getattr(module, "type_name", None) if kind.__module__ == _UNFLATTEN else None
        if name is not None and (name := name()) is not None:
            return self._classes.setdefault(name, class_of_text(name))
        if kind.__module__ != parametrize.__name__ or not parametrize.is_parametrized(module):
            return kind
        lists: Any = module.parametrizations
        kinds = tuple((name, tuple(map(type, chain))) for name, chain in lists.items())
        return self._classes.setdefault((parametrize.type_before_parametrizations(module), kinds), kind)

    def run(self, call: Call, entered: set[str], run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the Python of a call."""

        def finished() -> Any:
            same = len(self._values.same)
            out = run(*args, **kwargs)
            if call.parent is None:
                self.result_types = tensor_holders(out)
                kinds = self._object_types | self.result_types
                map_structure(self._values.detach_result_alias, out, torch.Tensor, kinds)
                self._at_end()
            call.outputs = self.templates.of(out, call)
            if len(self._values.same) > same:
                self._values.leave(same, call.outputs)
            return out

        self._entered.append(entered)
        self._running.append(call.module)
        try:
            return self._builder.in_call(call, finished)
        finally:
            self._entered.pop()
            self._running.pop()

    def _run_leaf(self, call: Call, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One op for the whole call: torch runs the module on fake tensors, unseen."""
        builder, values, module = self._builder, self._values, call.module
        assert module is not None
        call.leaf = True

        def finished() -> Any:
            arguments = leaves_with_path((args, kwargs), "", self._object_types)
            read = [(t, version_counter(t)) for _, t in arguments if isinstance(t, torch.Tensor)]
            with paused():
                out = run(module, *args, **kwargs)
            name = call.fqn or f"_leaf_module{len(builder.tape.modules)}"
            builder.tape.modules[name] = module
            writes = tuple(values.value_of(t) for t, old in read if version_counter(t) != old)
            slots = itertools.count()
            call.outputs = map_structure(
                lambda t: values.new_result(t, next(slots)), out, torch.Tensor, self._object_types
            )
            builder.append("call_module", name, call.args, call.kwargs, call.outputs, writes)
            return out

        self.paused = True
        try:
            return builder.in_call(call, finished)
        finally:
            self.paused = False

    # ---------------------------------------------------------------- what else the forward does

    def on_dispatch_mode(self, name: str) -> None:
        """The forward enters a mode of its own. An error here would leave what entered it half entered."""
        error = self._builder.refusal(
            f"the forward enters {name}, a TorchDispatchMode: what it does to ops is not in the graph",
            op="TorchDispatchMode.__enter__",
            hint="enter it around calls of the trace, or write it as a TorchFunctionMode, which is recorded",
        )
        self._builder.deferred.append(error)

    def on_nested_region(self, run: functools.partial[Any]) -> Any:
        """A function under `torch.compiler.nested_compile_region` is called."""
        mark = self._builder.mark()
        out = self._in_scope(getattr(run.func, "__name__", type(run.func).__name__), run, is_region=True)
        self._builder.end_region(NESTED, mark)
        return out

    def _in_scope(self, name: str, run: functools.partial[Any], **facts: Any) -> Any:
        """Call a function as a user scope with arguments, which is taken back if no op and no module ran in it.

        `facts` are further fields of its Call.
        """
        builder, outer = self._builder, self._builder.state.current_scope
        with scope(name):
            call = builder.call
            assert call is not None
            vars(call).update(facts)
            args, kwargs = map_structure(lambda m: type(m).__name__, (run.args, run.keywords), torch.nn.Module)
            call.args, call.kwargs = self.templates.of((args, kwargs), call)
            call.start = len(builder.tape.ops)
            with contextlib.suppress(TypeError, ValueError):  # built-in callables have no signature
                call.signature = inspect.signature(run.func)
            out = run()
            call.outputs = self.templates.of(out, call)
        if builder.tape.calls[-1] is call and call.start == call.stop:
            builder.tape.calls.pop()
            self._next -= 1
            if not call.index:
                outer.remove(call.scope)
                del self._counts[id(call.scope)]
        return out

    def on_seed(self) -> None:
        """The forward seeds torch's generator, or sets or reads its state."""
        raise RandomStateError(
            "the forward seeds torch's random generator, or sets its state, or reads it, which no graph can repeat",
            **self._builder.where(),
            hint="call torch.manual_seed or torch.random.fork_rng outside the model",
        )

    def on_object_collective(self, op: str) -> None:
        """The forward exchanges Python objects with other processes."""
        problem = "a collective that exchanges Python objects, which no graph holds"
        hint = "exchange them outside of the forward, and give it what it needs as an argument"
        raise self._builder.refusal(problem, op=op, hint=hint)


def _is_scoped(method: types.FunctionType) -> bool:
    """Whether a method has a scope already, by `st.scope`, or runs later than it is called, as a generator."""
    code = method.__code__
    is_later = code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
    return bool(is_later) or code.co_filename.startswith(SCOPETRACE)


# Modules of torch that take another path in eager --------------------------------------------------------------------


def _other_path(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reads: ReadRecorder
) -> tuple[str, str] | None:
    """What a module of torch would do otherwise than eager, and what to write instead; None where both do the same.

    What decides it, and may be otherwise at a call, is told to `reads`.
    """
    if isinstance(module, torch.nn.TransformerEncoder):
        return _NESTED if _takes_nested_path(module, args, kwargs, reads) else None
    operand = (args[0] if args else kwargs.get("input")) if isinstance(module, torch.nn.RNNBase) else None
    return _PACKED if isinstance(operand, PackedSequence) else None


_NESTED = (
    "nn.TransformerEncoder with a padding mask computes on nested tensors here, which are no ops of a graph; "
    "rows of padding would differ",
    "make it with nn.TransformerEncoder(..., enable_nested_tensor=False), or set encoder.use_nested_tensor = False",
)
_PACKED = (
    "a packed sequence, whose sizes depend on data, is given to a recurrent layer",
    "give the padded tensor, and pick the last valid step of each sequence (torch.gather); "
    "or name the layer and what packs for it in leaf_modules=",
)


def _takes_nested_path(
    module: torch.nn.TransformerEncoder, args: tuple[Any, ...], kwargs: dict[str, Any], reads: ReadRecorder
) -> bool:
    """The conditions of `nn.TransformerEncoder.forward`, but whether the padding is at the end, which is data."""
    operands: Any = dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)) | kwargs
    src, padding, first = operands["src"], operands.get("src_key_padding_mask"), module.layers[0]
    if not getattr(module, "use_nested_tensor", False) or torch.is_autocast_enabled():
        return False
    if first.training or padding is None or operands.get("mask") is not None or src.dim() != 3:
        return False
    if not fast_path_enabled():
        reads.on_flag("torch.backends.mha.get_fastpath_enabled", (), False)
        return False
    parameters = [p for part in first.modules() for p in parameters_of(part).values() if p is not None]
    needs = next((t for t in (*parameters, src) if t.requires_grad), None)
    if needs is None or not grad_enabled():
        return True
    reads.on_gradient(needs)
    return False


# Leaf modules --------------------------------------------------------------------------------------------------------


def leaf_targets(leaf_modules: Any, model: Model) -> list[Target]:
    """The targets in `leaf_modules=`.

    Raises LeafPatternError for what is no target, and for a pattern or class that matches no module of the model. Which
    scope paths there are is known after the trace: see `refuse_unmatched`.
    """
    with_forward = [module for module in model.modules if type(module).forward is not torch.nn.Module.forward]
    names, kinds = [name for m in with_forward for name in model.names_of(m) if name], list(map(type, model.modules))
    targets = several(leaf_modules)
    for target in targets:
        is_class = isinstance(target, type)
        if not (callable(target) or isinstance(target, str)) or (is_class and not issubclass(target, torch.nn.Module)):
            raise LeafPatternError(
                f"leaf_modules: {target!r} is a {type(target).__name__}, not a torch.nn.Module; give a module class, a "
                "module, a pattern of names such as 'layers.*.attn', or a predicate on a module call"
            )
        if is_class:
            what, matching = f"the model has no {target.__name__}", any(issubclass(kind, target) for kind in kinds)
        else:
            texts = (*names, *(kind.__name__ for kind in kinds))
            is_name = isinstance(target, str) and "/" not in target
            what, matching = f"no module is named {target!r}", not is_name or any(matches(x, target) for x in texts)
        if not matching and (kinds or not is_class):
            raise LeafPatternError(f"leaf_modules: {what}; {near_text(target, names, [k.__name__ for k in kinds])}")
    return targets


def refuse_unmatched(targets: list[Target], calls: list[Call]) -> None:
    """Raise LeafPatternError for a pattern of scope paths that matches no call."""
    calls = [call for call in calls if call.is_module]
    for target in targets:
        if isinstance(target, str) and "/" in target and not any(is_named(call, target) for call in calls):
            near = near_text(target, [call.scope.path for call in calls[1:]])
            raise LeafPatternError(f"leaf_modules: no module is named {target!r}; {near}")


# Templates of what calls take and return: a value of the tape in place of each tensor ---------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class _Undecided:
    """Stands in a template for an object of which only the end of the forward says whether its class is opened."""

    original: Any
    contents: Any
    """The template of what it held."""


def _opened(template: Any, kinds: Collection[type]) -> Any:
    """A template with the contents of its objects of `kinds`; the others are leaves."""

    def settled(noted: _Undecided) -> Any:
        return _opened(noted.contents, kinds) if type(noted.original) in kinds else noted.original

    return map_structure(settled, template, _Undecided)


class Templates:
    """Makes the templates of the arguments and results of calls.

    An object may get its first tensors after a call has taken it, as an empty cache does. So what an object of an
    unknown class holds is noted when a call takes it, and `settle` says at the end which of them were containers.
    """

    def __init__(self, values: ValueTable, object_types: frozenset[type], *, notes_objects: bool) -> None:
        """`object_types` are the classes whose instances are known to hold tensors; see `containers.structure`."""
        self._values = values
        self._object_types = object_types
        self._is_plain: dict[type, bool] = {}
        self._noted: dict[int, Any] = {}  # by id, those in the template that is being made
        self._unsettled: list[Call] = []
        """The calls whose templates have some."""
        self._knows_all = notes_objects

    def of(self, x: Any, call: Call) -> Any:
        """The template of what a call takes or gives."""
        template = map_structure(self._values.value_of, x, torch.Tensor, self._object_types, self._note)
        if self._noted:
            self._noted.clear()
            self._unsettled.append(call)
        return template

    def settle(self, kinds: Collection[type]) -> bool:
        """Open the noted objects of `kinds`, and keep the others as leaves. False where not all is known of them."""
        for call in self._unsettled:
            call.args, call.kwargs, call.outputs = _opened((call.args, call.kwargs, call.outputs), kinds)
        return self._knows_all

    def _note(self, x: Any) -> Any:
        kind = type(x)
        if kind not in self._is_plain:
            self._is_plain[kind] = is_plain_object(x)
        self._knows_all &= len(self._noted) < _MANY
        if not (self._is_plain[kind] and self._knows_all):
            return x
        if id(x) not in self._noted:
            self._noted[id(x)] = x  # for those inside of it that lead back to it
            context, children = opened_object(x)
            keys, values = [key for key, _ in children], [child for _, child in children]
            items = map_structure(self._known, values, torch.Tensor, self._object_types, self._note)
            self._noted[id(x)] = _Undecided(x, OpaqueContainer(kind, context, keys, items))
        return self._noted[id(x)]

    def _known(self, t: torch.Tensor) -> Any:
        """The value of a tensor in an object. One that no op has met yet gets none: that may put an op on the tape."""
        value = self._values.by_id.get(id(t))
        self._knows_all &= value is not None and value.storage == storage_id(t)
        return value


_MANY = 100  # objects inside of each other, beyond which they are no containers of a model
