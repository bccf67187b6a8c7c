"""What a call of a trace does before and after its graph.

Data flow:
    arguments -> compared with the example inputs -> tensors and dynamic numbers, in the order of the placeholders
    reads of the tape, asked again -> an answer other than that of the trace is an error that names the read
    submodules and hooks of the modules -> compared at once -> an error for those of modules that the trace has
    the model's present parameters and buffers -> bound to the GraphModule
    values of the graph -> write-back: inputs, buffers and attributes get their new values -> the result's structure
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from scopetrace._compat.gradients import Leaf
from scopetrace._compat.graph_module import holder_of
from scopetrace._compat.ops import in_transform
from scopetrace._compat.questions import MISSING
from scopetrace._compat.tensors import buffers_of, is_symbolic, storage_id, unsaved_buffers_of
from scopetrace.containers.contents import same
from scopetrace.containers.structure import (
    Effect,
    Given,
    Returned,
    apply_effects,
    container_type,
    effect_targets,
    leaves,
    match,
    walk,
)
from scopetrace.errors import InputMismatchError, StateMismatchError
from scopetrace.ir.guards import At, CallInputs, OfInput, OfTensor, Probe, check_numbers, is_same, unchanged
from scopetrace.ir.registered import put_tensor, table_of, tensor_in
from scopetrace.ir.scopes import running_recorder
from scopetrace.ir.tape import ProgramTape, Value, bind, forward_of
from scopetrace.ir.write_back import GraphInput, StateRef, resolved
from scopetrace.ops.history import History
from scopetrace.ops.view_inverses import Geometry
from scopetrace.program.arguments import (
    MISMATCHES,
    CallCode,
    EntryOrder,
    ExpectedArguments,
    SizeSlot,
    TensorSlot,
    output_template,
)
from scopetrace.program.mismatches import layout_for, mismatch, not_as_traced
from scopetrace.program.outputs import other_count
from scopetrace.program.sharing import Sharing
from scopetrace.record.model import argument_names, more_keywords

_NUMBERS = (bool, int, float, str, type(None))
_kind = operator.attrgetter("dtype", "shape")


class Entered(list[Any]):
    """The tensors and numbers of a call."""

    objects: Mapping[tuple[str, ...], Any] = types.MappingProxyType({})
    """By path, the objects among its arguments that forward changes, or that are in the result or in such objects."""


class CallBoundary:
    """`enter` runs before the graph, `leave` after it.

    `enter` raises InputMismatchError for arguments unlike those of the trace; `leave` passes on what torch raises where
    a value cannot be written back.
    """

    def __init__(self, tape: ProgramTape, graph_module: torch.nn.Module, forward: Callable[..., Any] | None) -> None:
        self.tape = tape
        self.forward = forward
        self._signed = forward_of(tape.calls[0], forward)
        """What has the signature of `forward`: of a loaded trace, that is all that is known of it."""
        self.expected = ExpectedArguments(tape)
        self.more_keywords = more_keywords(self._signed, self.expected.kwargs)
        self._count = len(tape.graph_outputs())
        self.outputs = output_template(tape)
        self._objects: list[Given | Effect] = [*leaves(self.outputs, Given), *getattr(self.outputs, "effects", ())]
        self.state = LiveState(tape, graph_module)
        self._guards = [guard for guard in tape.guards if guard.source.kind != "input"]
        self.facts = [guard for guard in tape.guards if guard.source.kind == "input"]  # what was read of inputs
        self._code = CallCode()
        written = tape.written_storages()
        self._written = {v: _may_overlap(v.fake) for v in tape.inputs if v.storage in written}
        self._left_behind = set() if tape.write_back is None else tape.write_back.inputs_left_behind()
        self._enables_grad = not tape.grad and any(op.grad for op in tape.ops if op.kind == "call_function")
        """Whether a block of the forward switches autograd on, and around it was off."""
        sharing = Sharing(tape) if len(tape.inputs) + len(tape.attributes) > 1 else None
        self._sharing = sharing if sharing is not None and sharing.matters else None
        changed = {effect.name for effect in tape.side_effects}
        paths = enumerate(zip(tape.input_paths, tape.inputs, strict=True))
        self.made_leaves = [i for i, (p, v) in paths if v.requires_grad and f"{p}.requires_grad" in changed]
        """The inputs that the forward makes require grad before all else."""
        self._asks = any((self.facts, self._written, tape.argument_numbers, tape.uses_absolute_offset))
        """Whether a call compares more of its arguments than what they are."""
        self.is_plain = not any((self._asks, self._objects, self._left_behind, self.made_leaves))
        """Whether a call compares what its arguments are, runs the graph and writes back."""
        writes = written and tape.write_back is not None
        outside: list[tuple[Any, Value]] = [*enumerate(tape.inputs), *tape.attribute_reads()]
        self._outside = outside if writes else []
        """Inputs by place and tensors of the model by name, where the write-back writes to some of them."""
        self._unseen = [key for key, v in self._outside if not (tape.grad and v.requires_grad)]
        """Those that autograd did not follow in the trace."""
        self._after = self._statements()
        self.leave = self._code.function("inputs, values", self._after)
        """Writes back the new values among the graph's outputs, and gives what the model would return."""

    def written_unseen(self, inputs: Sequence[Any]) -> set[int]:
        """The storages that the write-back writes, where autograd follows a tensor that it did not in the trace.

        Backward may read there, and the graph makes copies only of what it read in the trace.
        """
        if not self._unseen or not (self._enables_grad or torch.is_grad_enabled()) or in_transform():
            return set()  # torch has no such copies in a transform

        def current(key: int | str) -> torch.Tensor:
            return inputs[key] if isinstance(key, int) else self.state.held(key)

        if not any([current(key).requires_grad for key in self._unseen]):
            return set()
        written = self.tape.written_storages()
        return {storage_id(current(key)) for key, v in self._outside if v.storage in written}

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The graph's inputs. Binds the parameters and buffers that the model has now to the GraphModule."""
        try:
            inputs = self._compared(args, kwargs)
        except MISMATCHES:
            inputs = None
        is_as_traced = inputs is not None
        if inputs is None:
            args, kwargs = self._order.arguments(*self.in_traced_form(args, kwargs))
            inputs = self._matched(args, kwargs)
        if self._asks:
            self._compare(args, kwargs, inputs)
        if not is_as_traced:
            self.check_state()
            self.state.refresh()
        if self._written and (self._enables_grad or torch.is_grad_enabled()):  # autograd would see the writes
            self._check_gradients(inputs)
        if self._objects:
            inputs, objects = Entered(inputs), effect_targets(self._objects, (args, kwargs))
            inputs.objects = dict(zip([part.path for part in self._objects], objects, strict=True))
        if self._sharing is not None:
            self._sharing.check(inputs, self.state.held)
        for i in self.made_leaves:
            inputs[i].requires_grad_()
        if (recorder := running_recorder()) is not None:
            recorder.on_trace(self.tape.guards, inputs)
        return inputs

    def _matched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        tensors, numbers = self.expected.match(args, kwargs)
        if self.tape.sizes is not None:
            self.tape.sizes.check(tensors, numbers)
        return [*tensors, *numbers]

    @functools.cached_property
    def _order(self) -> EntryOrder:
        forward = None if self._objects else self.forward  # it would change a copy
        return EntryOrder(forward, self.expected, self.more_keywords)

    @functools.cached_property
    def _object_types(self) -> frozenset[type]:
        return frozenset(container_type(x) for _, x, children in walk(self.tape.args) if children is not None)

    @functools.cached_property
    def _compared(self) -> Callable[..., list[Any] | None]:
        condition, inputs = self._condition
        return self._code.function("args, kwargs", [f"return [{inputs}] if {condition} else None"])

    @functools.cached_property
    def _condition(self) -> tuple[str, str]:
        """That arguments and state are as in the trace, and the inputs then."""
        code, sizes = self._code, self.tape.sizes
        terms, tensors, numbers = code.terms(self.expected)
        if self.more_keywords:
            terms.append(f"[*kwargs] == {code.constant([*self.expected.kwargs])}")
        if sizes is not None:
            terms.append(f"{code.constant(sizes.all_hold())}([{', '.join(tensors)}], [{', '.join(numbers)}])")
        known = set[int]()
        probes = [probe for guard in self._guards for probe in unchanged(guard, known)]
        terms += [code.asking(probes), *self.state.terms(code)]
        return " and ".join(terms), ", ".join(tensors + numbers)

    def whole_call(self, probes: list[Probe], **functions: Callable[..., Any]) -> Callable[..., Any]:
        """A call of a plain program, as one function of args and kwargs, where `probes` say no other than the state.

        `graph` gives what runs the graph, `explain` takes what that raises, `otherwise` is a call in every other case.
        """
        code, (condition, inputs) = self._code, self._condition
        code.constants |= functions | {"MISMATCHES": MISMATCHES}
        unseen = f" or {code.constant(self.written_unseen)}(inputs)" if self._unseen else ""
        shares = [] if self._sharing is None else [f"{code.constant(self._sharing.check)}(inputs, held)"]
        before = f"""
    try:
        is_as_traced = {condition} and {code.asking(probes)}
    except MISMATCHES:
        is_as_traced = False
    inputs = [{inputs}] if is_as_traced else None
    if not is_as_traced{unseen}:
        return otherwise(args, kwargs)"""
        runs = """try:
        values = graph()(*inputs)
    except Exception as error:
        explain(error, inputs)"""
        return code.function("args, kwargs", [before, *shares, runs, *self._after])

    def in_traced_form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments split into positional and keyword ones as in the trace; unchanged where they do not fit.

        They may be passed by name or by position, and defaults passed or left out, as to the model, if the signature of
        `forward` is known.
        """
        expected = self.expected
        if self._signed is None or (len(args) == len(expected.args) and set(kwargs) == set(expected.kwargs)):
            return args, kwargs
        more = expected.kwargs.keys() & set(self.more_keywords)
        called = bind(self._signed, args, kwargs) | {name: kwargs[name] for name in more & kwargs.keys()}
        traced = bind(self._signed, tuple(expected.args), expected.kwargs) | {n: expected.kwargs[n] for n in more}
        names = argument_names(self._signed, len(expected.args))
        if called.keys() != traced.keys() or not {*names, *expected.kwargs} <= called.keys():
            return args, kwargs
        for name in called.keys() - {*names, *expected.kwargs}:
            match(traced[name], called[name], TensorSlot, [], name, SizeSlot)
        return tuple([called[name] for name in names]), {name: called[name] for name in expected.kwargs}

    def _compare(self, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Any]) -> None:
        """Raise InputMismatchError for arguments that differ in what only some programs depend on."""
        tape = self.tape
        for path, value, tensor in zip(tape.input_paths, tape.inputs, inputs, strict=False):
            if value.storage in tape.uses_absolute_offset and tensor.storage_offset() != value.offset:
                raise InputMismatchError(
                    f"{path}: began at element {value.offset} of its memory when traced and begins at "
                    f"{tensor.storage_offset()} now, and as_strided counts from the start; clone() it"
                )
            if self._written.get(value) is False and _may_overlap(tensor):
                raise InputMismatchError(
                    f"{path}, which the model writes, has elements that share memory, as after expand(), and had none "
                    "when traced; pass x.clone()"
                )
        check_numbers(tape.argument_numbers, (args, kwargs))
        if not self.facts:
            return
        call, number = CallInputs(args, kwargs, inputs, self._object_types), self.number(inputs)
        for guard in self.facts:
            source, was, now = guard.source, resolved(guard.value, number), guard.source.current(call)
            if isinstance(source, OfInput) and source.fact == "layout":
                was = layout_for(call.tensors[source.index], was, number)
            if not same(was, now):
                raise mismatch(guard, was, now)

    def _check_gradients(self, inputs: list[Any]) -> None:
        """Raise InputMismatchError for inputs whose gradients would be lost."""
        is_as_traced = torch.is_grad_enabled() == self.tape.grad
        for path, value, tensor in zip(self.tape.input_paths, self.tape.inputs, inputs, strict=False):
            if tensor.requires_grad and not (value.requires_grad and is_as_traced):
                then = "did not" if is_as_traced else "autograd was off"
                raise InputMismatchError(
                    f"{path} requires grad now, and when traced {then}: the model writes to its inputs, and the "
                    "gradient would be lost; trace again with inputs like these, or call under torch.no_grad()"
                )

    def check_state(self) -> None:
        """Raise StateMismatchError for what is not as it was, beside the inputs."""
        for guard in self._guards:
            if not is_same(guard):
                current = guard.current()
                if isinstance(guard.source, OfTensor) and guard.source.fact == "metadata":
                    raise not_as_traced(self.tape, guard.name, guard.value, None if current is MISSING else current)
                raise mismatch(guard, guard.value, current)

    def check_numbers(self) -> None:
        """The part of `check_state` that torch.compile can trace: numbers and text in attributes and globals."""
        for guard in self._guards:
            source, value, is_number = guard.source, guard.value, type(guard.value) in _NUMBERS
            if not (is_number and isinstance(source, At) and isinstance(source.owner, dict)) or guard.others:
                continue
            if (current := source.owner.get(source.key, MISSING)) != value:
                now = f"{value} when traced and {current} now"
                raise StateMismatchError(f"{guard.name}: {now}; trace again, or put it back")

    def left_behind(self, inputs: Sequence[Any]) -> set[int]:
        """The inputs of the call of which autograd would see a change, and not that results come from the new value.

        It is so where the input was computed by other ops: `x.mul_(2)`, and a result `x + 1`.
        """
        followed = self._left_behind if torch.is_grad_enabled() else ()
        computed = {i for i in followed if inputs[i].requires_grad and not inputs[i].is_leaf}
        return computed and computed - self._comes_from_before

    def refuse_left_behind(self, inputs: Sequence[Any], behind: set[int]) -> None:
        """Raise InputMismatchError where a gradient of such an input is asked for in the call itself.

        So it is where it retains its gradient, or where it or a view of it is a result beside what comes from it.
        """
        write_back = self.tape.write_back
        returned = set() if write_back is None else write_back.returned_inputs()
        for i in sorted(behind):
            if inputs[i].retains_grad or i in returned:
                raise InputMismatchError(
                    f"{self.tape.input_paths[i]} was computed by other ops, and the model changes it: gradients with "
                    "respect to what it is after the call would lack a part, since what runs here writes to nothing; "
                    "call a trace made with functional=False, or write out of place"
                )

    @functools.cached_property
    def _comes_from_before(self) -> set[int]:
        """Of the inputs that may be left behind, those from whose new values no result of the graph comes."""
        tape = self.tape
        assert tape.write_back is not None
        graph_values: list[Any] = tape.graph_outputs()
        results = [graph_values[s.index] for s in tape.write_back.given_results()]
        behind: set[int] = set()
        for target, value in tape.write_back.seen_updates():
            new = tape.inputs[target.index] if value is None else graph_values[value.index]
            history = History(tape.ops, {new: 1})
            if any(history.of(v) for v in results if isinstance(v, Value)):
                behind.add(target.index)
        return self._left_behind - behind

    def _statements(self) -> list[str]:
        """Python that writes back what `values` has, for the `inputs` of the call, and returns what the model would."""
        tape, code, count = self.tape, self._code, self._count
        promised, program = count + len(tape.attribute_writes), tape.write_back
        code.constants |= {"held": self.state.held, "number": self.number}
        count_differs = f"{code.constant(other_count)}(len(values), {promised}, {code.constant(tape)})"
        lines = [f"if len(values) != {promised}: raise {count_differs}"]
        lines += ["results = values"] if program is None else program.statements(code.constant)
        lines.append(f"out = {code.result(self.outputs)}")
        if promised > count or tape.cleared:
            bound = "()" if program is None else f"results[{len(program.results)}:]"
            lines.append(f"{code.constant(self.state.write)}({bound}, values[{count}:], inputs)")
        if isinstance(self.outputs, Returned):
            paths = [effect.path for effect in self.outputs.effects]
            objects = f"[inputs.objects[path] for path in {code.constant(paths)}]"
            lines += [f"{code.constant(apply_effects)}(out.effects, {objects})", "out = out.result"]
        return [*lines, "return out"]

    def number(self, inputs: Sequence[Any]) -> Callable[[Any], Any]:
        """A function from a symbolic size to its value in a call with these inputs."""
        rules, count = self.tape.sizes, len(self.tape.inputs)
        return (lambda n: n) if rules is None else rules.values(inputs[:count], inputs[count:])


@dataclasses.dataclass(slots=True)
class _Bound:
    """A tensor of the model."""

    place: tuple[torch.nn.Module, str] | None
    """Where the GraphModule has it; None where only ops without effect take it, as where Python asks for its number."""
    owner: tuple[torch.nn.Module, str]
    last: torch.Tensor  # the one that the model had last, and gave to the GraphModule
    traced: tuple[torch.dtype, torch.Size]  # in the trace


class LiveState:
    """The model's tensors as they are now: a parameter or buffer may have been assigned anew since the trace."""

    def __init__(self, tape: ProgramTape, graph_module: torch.nn.Module) -> None:
        self._tape = tape
        self._owners = _owners(tape)
        self._bound: dict[str, _Bound] = {}
        self._last: list[torch.Tensor] = []  # those of `_bound`, for the code that looks whether the model has them
        fakes = {name: value.fake for name, value in tape.attribute_reads()}
        targets = {n.target for n in graph_module.graph.nodes if n.op == "get_attr"}  # type: ignore[union-attr]
        self._places = {name: holder_of(graph_module, name) for name in targets & tape.attributes.keys()}
        for name, owner in self._owners.items():
            last = tape.attributes[name]
            if name in self._places or (name in fakes and not tape.edited):
                self._bound[name] = _Bound(self._places.get(name), owner, last, _kind(fakes.get(name, last)))

    def terms(self, code: CallCode) -> list[str]:
        """What holds where the model has the tensors that it had last, or such as could be bound: loops in C."""
        bound = self._bound.values()
        held = code.constant([table_of(*b.owner) or {} for b in bound]), code.constant([b.owner[1] for b in bound])
        last, same, get = map(code.constant, (self._last, operator.is_, operator.getitem))
        kind, kinds = code.constant(_kind), code.constant([b.traced for b in bound])
        refresh = code.constant(self.refresh)  # which raises one of MISMATCHES
        is_as_last = f"(all(map({same}, map({get}, {', '.join(held)}), {last})) or {refresh}() is None)"
        return [is_as_last, f"[*map({kind}, {last})] == {kinds}"] if bound else []

    def refresh(self) -> None:
        """Bind the tensors that the model has now to the GraphModule, but for those that somebody replaced there.

        Raises StateMismatchError for one that is gone, or of another dtype or shape than in the trace.
        """
        for name, bound in self._bound.items():
            t = tensor_in(*bound.owner)
            if t is None:
                raise not_as_traced(self._tape, name, bound.traced, None)
            if t is not bound.last and (bound.place is None or tensor_in(*bound.place) is bound.last):
                if bound.place is not None:
                    put_tensor(*bound.place, t)
                bound.last = t
            current = _kind(t)
            if current != bound.traced and (bound.place is not None or current != self._tape.settled.get(name)):
                raise not_as_traced(self._tape, name, bound.traced, current)
        self._last[:] = [bound.last for bound in self._bound.values()]

    @property
    def places(self) -> list[tuple[torch.nn.Module, str, torch.nn.Module, str]]:
        """Where the model, and where the GraphModule has each tensor of the model: module and name."""
        return [(*bound.owner, *bound.place) for bound in self._bound.values() if bound.place]

    @property
    def bound(self) -> dict[str, torch.Tensor]:
        """By name, the tensor that was last bound to the GraphModule."""
        return {name: bound.last for name, bound in self._bound.items()}

    def held(self, name: str) -> torch.Tensor:
        """The present tensor behind a `get_attr` target: that of the GraphModule, or of the model if none reads it."""
        place = self._places.get(name) or self._owners.get(name)
        t = None if place is None else tensor_in(*place)
        return self._tape.attributes[name] if t is None else t

    def table_of(self, name: str) -> tuple[dict[str, Any], str] | None:
        """Where the GraphModule has the tensor behind a `get_attr` target: a table and a key; else None."""
        place = self._places.get(name)
        table = None if place is None else table_of(*place)
        return None if place is None or table is None else (table, place[1])

    def write(self, bound: Sequence[Any], values: Sequence[Any], inputs: Sequence[torch.Tensor]) -> None:
        """Assign the tensors that forward assigned to attributes of the model's modules, and the gradients.

        `bound` has what shares memory with other results, None in the place of the rest, which `values` has.
        """

        def outside(of: GraphInput | StateRef) -> torch.Tensor:
            return inputs[of.index] if isinstance(of, GraphInput) else self.held(of.name)

        for of in self._tape.cleared:
            outside(of).grad = None
        for write, shared, value in itertools.zip_longest(self._tape.attribute_writes, bound, values):
            module: Any = write.module
            tensor = value if shared is None else shared
            if write.is_cache and tensor_in(module, write.name) is not None:
                continue
            if write.place is not None:
                write.place.put(tensor.item())
                self._tape.attributes[write.path].copy_(tensor)  # from which a loaded trace goes on
            elif write.of is not None:
                t = outside(write.of)
                if write.adds:
                    Leaf.grad(t, tensor)  # as autograd does
                else:
                    t.grad = tensor
            elif write.buffer is None:
                put_tensor(module, write.name, tensor)
            else:  # it may be new: the forward registered it
                buffers_of(module)[write.name] = tensor
                unsaved = unsaved_buffers_of(module)
                (unsaved.discard if write.buffer else unsaved.add)(write.name)


def current_tensors(tape: ProgramTape) -> dict[str, torch.Tensor]:
    """By name on the tape, the tensors that the model has now."""
    current = {name: tensor_in(module, attribute) for name, (module, attribute) in _owners(tape).items()}
    return {name: t for name, t in current.items() if t is not None}


def _owners(tape: ProgramTape) -> dict[str, tuple[torch.nn.Module, str]]:
    """By name on the tape, module and attribute; without script modules, which keep their tensors in C++."""
    owners = {n: (module, at) for n, (module, at) in tape.owners.items() if module is not None}
    return {n: owner for n, owner in owners.items() if not isinstance(owner[0], torch.jit.ScriptModule)}


def without_autocast() -> contextlib.AbstractContextManager[Any, Any]:
    """Turn autocast off: the graph contains the casts of the trace, and autocast would add others."""
    stack = contextlib.ExitStack()
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    for device in devices:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack if devices else contextlib.nullcontext()


def _may_overlap(t: torch.Tensor) -> bool:
    """Whether several of its elements may be one in memory: most ops refuse to write it, or write it in some order."""
    return t.layout is torch.strided and not is_symbolic(t) and Geometry.of(t, 0).overlaps_itself()
