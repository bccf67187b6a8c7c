"""What a call of a trace does before and after its graph.

Data flow:
    arguments -> compared with the example inputs -> tensors and dynamic numbers, in the order of the placeholders
    reads of the tape, asked again -> an answer other than that of the trace is an error that names the read
    submodules and hooks of the modules -> compared at once -> an error for those of modules that the trace has
    the model's present parameters and buffers -> bound to the GraphModule
    values of the graph -> write-back: inputs, buffers and attributes get their new values -> the result's structure
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from scopetrace._compat.ops import in_transform
from scopetrace._compat.questions import fact_of
from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import (
    buffers_of,
    is_symbolic,
    parameters_of,
    passes_its_class,
    storage_id,
    unsaved_buffers_of,
)
from scopetrace.containers.contents import difference, same, short
from scopetrace.containers.structure import (
    Effect,
    Given,
    GivenPart,
    Returned,
    apply_effects,
    effect_targets,
    instantiate,
    leaves,
    map_structure,
    match,
    with_given,
)
from scopetrace.errors import EditError, InputMismatchError, StateMismatchError
from scopetrace.ir.reads import (
    MISSING,
    Asked,
    CallInputs,
    Flag,
    InTable,
    OfFunctions,
    OfInput,
    OfTensor,
    Read,
    check,
    check_numbers,
    is_same,
    unchanged,
)
from scopetrace.ir.tape import ProgramTape, Value, bind, forward_of
from scopetrace.ir.write_back import GraphInput, StateRef
from scopetrace.ops.history import History
from scopetrace.ops.view_inverses import Geometry
from scopetrace.program.sharing import InputSharing, StateSharing
from scopetrace.record.uses import takes_by_key
from scopetrace.session import argument_names, more_keywords

Forward = Callable[..., Any] | None
"""The function whose signature the arguments have; None where it is not known, as in a loaded trace."""


class ATensor:
    """Stands for a tensor in a template of arguments or results."""


class ANumber(int):
    """Stands for a dynamic number in a template of arguments or results; an int, as the items of a `torch.Size` are."""


def without_values(x: Any) -> Any:
    """A template with an ATensor for each value of the tape, and an ANumber for each symbolic number."""
    return map_structure(lambda v: ATensor() if isinstance(v, Value) else ANumber(), x, (Value, *Symbolic))


@dataclasses.dataclass(frozen=True)
class ExpectedTensor:
    """What a call is compared with for an input tensor."""

    path: str
    shape: tuple[int | None, ...]
    """None for a dynamic size."""
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    def check(self, tensor: torch.Tensor) -> None:
        """Raise InputMismatchError for a tensor of another kind."""
        shape = tensor.shape
        if len(shape) != len(self.shape):
            traced = ["any" if n is None else n for n in self.shape]
            raise InputMismatchError(f"{self.path}: traced with shape {traced}, called with {list(shape)}")
        if shape != self.shape:
            for dim, (old, new) in enumerate(zip(self.shape, shape, strict=True)):
                if old is not None and old != new:
                    raise InputMismatchError(
                        f"{self.path}: dimension {dim} was {old} when traced and is {new} now; "
                        "trace again for this size, or with dynamic_shapes= for sizes that differ from call to call"
                    )
        if type(tensor) is not torch.Tensor and passes_its_class(tensor):
            raise InputMismatchError(
                f"{self.path} is a {type(tensor).__name__} now, and results of a trace are plain tensors; "
                "pass x.as_subclass(torch.Tensor)"
            )
        if (tensor.dtype, tensor.device, tensor.layout) != (self.dtype, self.device, self.layout):
            for what in ("dtype", "device", "layout"):
                old, new = getattr(self, what), getattr(tensor, what)
                if old != new:
                    raise InputMismatchError(
                        f"{self.path}: {what} was {old} when traced and is {new} now; convert it, or trace again"
                    )


class ExpectedArguments:
    """The structure, Python values and tensors that the arguments of a call must have. It is plain data."""

    def __init__(self, tape: ProgramTape) -> None:
        args, kwargs = tape.args
        self.args: list[Any] = [without_values(x) for x in args]
        self.kwargs: dict[str, Any] = {name: without_values(x) for name, x in kwargs.items()}
        self.tensors = [
            ExpectedTensor(path, tuple([n if type(n) is int else None for n in t.shape]), t.dtype, t.device, t.layout)
            for path, t in zip(tape.input_paths, [v.fake for v in tape.inputs], strict=True)
        ]

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """The tensors among the arguments, and the dynamic numbers.

        Raises InputMismatchError where structure, Python values, shapes, dtypes, devices or layouts differ.
        """
        if len(args) != len(self.args) or set(kwargs) != set(self.kwargs):
            raise InputMismatchError(
                f"traced with {_count(self.args, self.kwargs)}, called with {_count(args, kwargs)}: "
                "pass the same arguments in the same way"
            )
        found: list[tuple[str, Any]] = []
        for i, (old, new) in enumerate(zip(self.args, args, strict=True)):
            match(old, new, ATensor, found, f"argument {i}", ANumber)
        for name, old in self.kwargs.items():
            match(old, kwargs[name], ATensor, found, name, ANumber)
        tensors = [x for _, x in found if isinstance(x, torch.Tensor)]
        for expected, tensor in zip(self.tensors, tensors, strict=True):
            expected.check(tensor)
        return tensors, [x for _, x in found if not isinstance(x, torch.Tensor)]


def _count(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    names = f" and {', '.join(sorted(kwargs))}" if kwargs else ""
    return f"{len(args)} positional{names}"


def other_strides(tape: ProgramTape, inputs: Sequence[Any], number: Number) -> str | None:
    """The first input whose strides are not those of the trace, in words; None where all are."""
    for path, value, tensor in zip(tape.input_paths, tape.inputs, inputs, strict=False):
        if value.fake.layout is torch.strided:
            old = _layout_for(tensor, fact_of(value.fake, "layout", ()), number)
            new = fact_of(tensor, "layout", ())
            if old != new:
                return f"{path} had strides {old} when traced and has {new} now"
    return None


def _layout_for(tensor: torch.Tensor, layout: Sequence[Any], number: Number) -> tuple[int, ...]:
    """The strides of an input in the trace, in numbers, for the sizes that it has in a call."""
    sizes = zip(tensor.shape, _in_numbers(layout, number), strict=True)
    return tuple([0 if n == 1 else stride for n, stride in sizes])


def _with_given(outputs: Any, given: list[GivenPart]) -> Any:
    """The template of what a call gives, with a Given for each object among its arguments."""
    if not isinstance(outputs, Returned):
        return with_given(outputs, given, (ATensor, ANumber))
    effects = [Effect(e.path, with_given(e.content, e.given, (ATensor, ANumber))) for e in outputs.effects]
    return Returned(with_given(outputs.result, given, (ATensor, ANumber)), effects)


_DICTS = frozenset({dict, collections.OrderedDict})


class Entered(list[Any]):
    """The tensors and numbers of a call, and the containers among its arguments that forward changes."""

    containers: list[Any]
    given: dict[tuple[str, ...], Any]
    """The objects among its arguments that are in the result or in what forward changes, by path."""


class CallBoundary:
    """`enter` runs before the graph, `leave` after it.

    `enter` raises InputMismatchError for arguments unlike those of the trace; `leave` passes on what torch raises where
    a value cannot be written back.
    """

    def __init__(self, tape: ProgramTape, graph_module: torch.nn.Module, forward: Forward = None) -> None:
        self.tape = tape
        self.forward = forward
        self._signed = forward_of(tape.calls[0], forward)
        """What has the signature of `forward`: of a loaded trace, that is all that is known of it."""
        self.expected = ExpectedArguments(tape)
        self.more_keywords = more_keywords(self._signed, self.expected.kwargs)
        self._takes_dicts = not _DICTS.isdisjoint(map(type, (*self.expected.args, *self.expected.kwargs.values())))
        self._count = len(tape.graph_outputs())
        self.outputs = _with_given(without_values(tape.outputs), tape.given)
        self._given: list[Given] = leaves(self.outputs, Given)
        self.state = LiveState(tape, graph_module)
        self.check = StateCheck(tape)
        written = tape.written_storages()
        self._written = [i for i, v in enumerate(tape.inputs) if v.storage in written]
        self._overlapping = {i for i in self._written if _may_overlap(tape.inputs[i].fake)}
        self._left_behind = set() if tape.write_back is None else tape.write_back.inputs_left_behind()
        self._enables_grad = not tape.grad and any(op.grad for op in tape.ops if op.kind == "call_function")
        """Whether a block of the forward switches autograd on, and around it was off."""
        self._input_sharing = InputSharing(tape) if len(tape.inputs) > 1 else None
        self._state_sharing = StateSharing(tape) if tape.attributes else None
        outside = [*tape.inputs, *(v for _, v in tape.attribute_reads())]
        self._writes = [v.storage in written for v in outside] if tape.write_back is not None else []
        """Whether the write-back may write to each tensor from outside, where the graph does not."""
        self._followed = [tape.grad and v.requires_grad for v in outside]
        """Whether autograd followed each of them in the trace."""

    def written_unseen(self, inputs: Sequence[Any]) -> set[int]:
        """The storages that the write-back writes, where autograd follows a tensor that it did not in the trace.

        Backward may read there, and the graph makes copies only of what it read in the trace.
        """
        if not any(self._writes) or not (self._enables_grad or torch.is_grad_enabled()) or in_transform():
            return set()  # torch has no such copies in a transform
        names = [name for name, _ in self.tape.attribute_reads()]
        now = [*inputs[: len(self.tape.inputs)], *map(self.state.held, names)]
        if not any(t.requires_grad and not followed for t, followed in zip(now, self._followed, strict=True)):
            return set()
        return {storage_id(t) for t, writes in zip(now, self._writes, strict=True) if writes}

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The graph's inputs. Binds the parameters and buffers that the model has now to the GraphModule."""
        if self.more_keywords:
            now = [name for name in kwargs if name in self.more_keywords]
            is_other = now != self.more_keywords and len(now) == len(self.more_keywords)
            if is_other and not takes_by_key(self.forward, None):
                order = f"{self.more_keywords} when traced and {now} now"
                raise InputMismatchError(f"the order of **kwargs was {order}; pass them in that of the trace")
        args, kwargs = self.in_traced_form(args, kwargs)
        if self._takes_dicts:
            args, kwargs = self._in_order(args, kwargs)
        inputs = Entered(self._match(args, kwargs))
        if self.check.facts:
            self.check.run_facts(CallInputs(args, kwargs, inputs), self.number(inputs))
        self.check.run_state()
        if self._written and (self._enables_grad or torch.is_grad_enabled()):
            self._check_gradients(inputs)
        if isinstance(self.tape.outputs, Returned):
            inputs.containers = effect_targets(self.tape.outputs.effects, self.tape.args, (args, kwargs))
        if self._given:
            objects = effect_targets(self._given, self.tape.args, (args, kwargs))
            inputs.given = dict(zip([part.path for part in self._given], objects, strict=True))
        self.state.refresh()
        if self._state_sharing is not None:
            self._state_sharing.check(self.state.current, inputs)
        return inputs

    def in_traced_form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments split into positional and keyword ones as in the trace; unchanged where they do not fit.

        They may be passed by name or by position, and defaults passed or left out, as to the model, if the signature of
        `forward` is known.
        """
        expected = self.expected
        if self._signed is None or (len(args) == len(expected.args) and set(kwargs) == set(expected.kwargs)):
            return args, kwargs
        more = expected.kwargs.keys() & set(self.more_keywords)
        given = bind(self._signed, args, kwargs) | {name: kwargs[name] for name in more & kwargs.keys()}
        traced = bind(self._signed, tuple(expected.args), expected.kwargs) | {n: expected.kwargs[n] for n in more}
        names = argument_names(self._signed, len(expected.args))
        if given.keys() != traced.keys() or not {*names, *expected.kwargs} <= given.keys():
            return args, kwargs
        for name in given.keys() - {*names, *expected.kwargs}:
            match(traced[name], given[name], ATensor, [], name, ANumber)
        return tuple([given[name] for name in names]), {name: given[name] for name in expected.kwargs}

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with dicts in the order and of the class of the trace, where forward takes entries by key."""
        expected = self.expected
        if len(args) != len(expected.args) or kwargs.keys() != expected.kwargs.keys():
            return args, kwargs
        positional = enumerate(zip(expected.args, args, strict=True))
        by_name = {name: self._ordered(name, old, kwargs[name]) for name, old in expected.kwargs.items()}
        return tuple([self._ordered(i, old, new) for i, (old, new) in positional]), by_name

    def _ordered(self, place: int | str, old: Any, new: Any) -> Any:
        if type(old) not in _DICTS or type(new) not in _DICTS or old.keys() != new.keys():
            return new
        if type(old) is type(new) and list(old) == list(new):
            return new
        name = argument_names(self.forward, len(self.expected.args))[place] if isinstance(place, int) else place
        return type(old)((key, new[key]) for key in old) if takes_by_key(self.forward, name) else new

    def _match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The tensors among the arguments, then the dynamic numbers: one value for each placeholder, in order."""
        tensors, numbers = self.expected.match(args, kwargs)
        tape = self.tape
        for path, value, tensor in zip(tape.input_paths, tape.inputs, tensors, strict=True):
            if value.storage in tape.uses_absolute_offset and tensor.storage_offset() != value.offset:
                raise InputMismatchError(
                    f"{path}: began at element {value.offset} of its memory when traced and begins at "
                    f"{tensor.storage_offset()} now, and as_strided counts from the start; clone() it"
                )
        if tape.sizes is not None:
            tape.sizes.check(tensors, numbers)
        if self._input_sharing is not None:
            self._input_sharing.check(tensors)
        self._check_overlaps(tensors)
        if tape.argument_numbers:
            check_numbers(tape.argument_numbers, tape.args, (args, kwargs))
        return [*tensors, *numbers]

    def _check_overlaps(self, tensors: Sequence[torch.Tensor]) -> None:
        for i in self._written:
            if i not in self._overlapping and _may_overlap(tensors[i]):
                raise InputMismatchError(
                    f"{self.tape.input_paths[i]}, which the model writes, has elements that share memory, as after "
                    "expand(), and had none when traced; pass x.clone()"
                )

    def _check_gradients(self, inputs: Sequence[Any]) -> None:
        """Autograd would see the writes to inputs where an input brings a gradient, which it did not in the trace."""
        is_as_traced = torch.is_grad_enabled() == self.tape.grad
        for path, value, tensor in zip(self.tape.input_paths, self.tape.inputs, inputs, strict=False):
            if tensor.requires_grad and not (value.requires_grad and is_as_traced):
                then = "did not" if is_as_traced else "autograd was off"
                raise InputMismatchError(
                    f"{path} requires grad now, and when traced {then}: the model writes to its inputs, and the "
                    "gradient would be lost; trace again with inputs like these, or call under torch.no_grad()"
                )

    def leaves_behind(self, inputs: Sequence[Any]) -> bool:
        """Whether autograd would see an input of the call change, and not that results come from what it becomes.

        It is so where the input was computed by other ops: `x.mul_(2)`, and a result `x + 1`.
        """
        if not self._left_behind or not torch.is_grad_enabled():
            return False
        computed = [i for i in self._left_behind if inputs[i].requires_grad and not inputs[i].is_leaf]
        return bool(computed) and not self._comes_from_before.issuperset(computed)

    def refuse_left_behind(self, inputs: Sequence[Any]) -> None:
        """Raise InputMismatchError where a gradient of such an input is asked for in the call itself.

        So it is where it retains its gradient, or where it or a view of it is a result beside what comes from it.
        """
        write_back = self.tape.write_back
        returned = set() if write_back is None else write_back.returned_inputs()
        for i in sorted(self._left_behind - self._comes_from_before):
            path, tensor = self.tape.input_paths[i], inputs[i]
            if tensor.requires_grad and not tensor.is_leaf and (tensor.retains_grad or i in returned):
                raise InputMismatchError(
                    f"{path} was computed by other ops, and the model changes it: gradients with respect to what it is "
                    "after the call would lack a part, since what runs here writes to nothing; call a trace made with "
                    "functional=False, or write out of place"
                )

    @functools.cached_property
    def _comes_from_before(self) -> set[int]:
        """Those of `_left_behind` from whose new values no result of the graph comes."""
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

    def leave(self, inputs: Sequence[Any], values: Sequence[Any]) -> Any:
        """Write back the new values among the graph's outputs, and return what the model would return."""
        count = self._count
        if len(values) != count + len(self.tape.attribute_writes):
            raise EditError(
                f"node output: the edited graph returns {len(values)} values, and that of the trace "
                f"{count + len(self.tape.attribute_writes)}",
                module=self.tape.root.path,
                hint="keep the outputs in number and order; trace a model that returns something else",
            )
        program = self.tape.write_back
        found = values[:count]
        results = iter(found if program is None else program.run(inputs, self.state.held, found, self.number(inputs)))

        def part(x: Any) -> Any:
            if type(x) is not Given:
                return next(results)
            collections.deque(itertools.islice(results, x.leaves), maxlen=0)
            return inputs.given[x.path]  # type: ignore[attr-defined]

        out = instantiate(part, self.outputs, (ATensor, ANumber, Given))
        bound = itertools.zip_longest(results, values[count:])
        self.state.write((value if own is None else own for own, value in bound), inputs)
        if not isinstance(out, Returned):
            return out
        apply_effects(out.effects, getattr(inputs, "containers", []))
        return out.result

    def number(self, inputs: Sequence[Any]) -> Callable[[Any], Any]:
        """A function from a symbolic size to its value in a call with these inputs."""
        rules, count = self.tape.sizes, len(self.tape.inputs)
        return (lambda n: n) if rules is None else rules.values(inputs[:count], inputs[count:])


@dataclasses.dataclass(slots=True)
class _Bound:
    """A tensor of the model that the GraphModule holds."""

    name: str
    holder: torch.nn.Module
    leaf: str
    """Its name in the holder, a submodule of the GraphModule."""
    module: torch.nn.Module
    attribute: str
    """Its name in the module, a part of the model."""
    table: dict[str, Any]
    """Where the module had it last: its parameters, buffers or other attributes."""
    last: torch.Tensor
    """The one that the GraphModule got last from the model."""
    dtype: torch.dtype
    shape: torch.Size
    """As they were in the trace."""


class LiveState:
    """The model's tensors as they are now: a parameter or buffer may have been assigned anew since the trace."""

    def __init__(self, tape: ProgramTape, graph_module: torch.nn.Module) -> None:
        self._writes = [
            (w, w.module or _submodule(graph_module, w.fqn if w.of is None else "")) for w in tape.attribute_writes
        ]
        self._tape, self._cleared, self._settled = tape, tape.cleared, tape.settled
        self._owners = _owners(tape)
        self._attributes = tape.attributes
        self._held: list[_Bound] = []
        self._places: dict[str, tuple[torch.nn.Module, str]] = {}
        fakes = {name: value.fake for name, value in tape.attribute_reads()}
        targets = {n.target for n in graph_module.graph.nodes if n.op == "get_attr"}  # type: ignore[union-attr]
        for name in targets & tape.attributes.keys():
            path, _, leaf = name.rpartition(".")
            holder = graph_module.get_submodule(path)
            self._places[name] = holder, leaf
            if name in self._owners:
                module, attribute = self._owners[name]
                table = _table_of(module, attribute) or {}
                last = tape.attributes[name]
                fake = fakes.get(name, last)
                bound = _Bound(name, holder, leaf, module, attribute, table, last, fake.dtype, fake.shape)
                self._held.append(bound)
        self._unread = [
            (name, self._owners[name], (fake.dtype, fake.shape))
            for name, fake in fakes.items()
            if name in self._owners and name not in targets and not tape.edited
        ]
        """Tensors that only ops without effect take, as where Python asks them for their number."""

    def refresh(self) -> None:
        """Bind the tensors that the model has now to the GraphModule, but for those that somebody replaced there.

        Raises StateMismatchError for one that is gone, or of another dtype or shape than in the trace.
        """
        for bound in self._held:
            now = bound.table.get(bound.attribute)
            if now is not bound.last:
                now = self._follow(bound)
            if now.dtype is not bound.dtype or now.shape != bound.shape:
                raise _not_as_traced(self._tape, bound.name, (bound.dtype, bound.shape), (now.dtype, now.shape))
        for name, place, then in self._unread:
            found = _look_up(*place)
            now = None if found is None else (found.dtype, found.shape)
            if now is None or now not in (then, self._settled.get(name)):
                raise _not_as_traced(self._tape, name, then, now)

    def _follow(self, bound: _Bound) -> torch.Tensor:
        """The tensor that the model has now in place of the one that the GraphModule got last."""
        table = _table_of(bound.module, bound.attribute)
        if table is None:
            raise _not_as_traced(self._tape, bound.name, (bound.dtype, bound.shape), None)
        now: torch.Tensor = table[bound.attribute]
        bound.table = table
        if now is not bound.last and _look_up(bound.holder, bound.leaf) is bound.last:
            _bind(bound.holder, bound.leaf, now)
            bound.last = now
        return now

    @property
    def places(self) -> list[tuple[torch.nn.Module, str, torch.nn.Module, str]]:
        """Where the model, and where the GraphModule has each tensor of the model: module and name."""
        return [(bound.module, bound.attribute, bound.holder, bound.leaf) for bound in self._held]

    @property
    def bound(self) -> dict[str, torch.Tensor]:
        """By name, the tensor that was last bound to the GraphModule."""
        return {bound.name: bound.last for bound in self._held}

    def current(self, names: Iterable[str]) -> list[torch.Tensor]:
        """The present tensors behind `get_attr` targets, as they were last bound to the GraphModule."""
        bound = self.bound
        return [bound[name] if name in bound else self.held(name) for name in names]

    def held(self, name: str) -> torch.Tensor:
        """The present tensor behind a `get_attr` target: that of the GraphModule, or of the model if none reads it."""
        place = self._places.get(name) or self._owners.get(name)
        found = None if place is None else _look_up(*place)
        return self._attributes[name] if found is None else found

    def table_of(self, name: str) -> tuple[dict[str, Any], str] | None:
        """Where the GraphModule has the tensor behind a `get_attr` target: a table and a key; else None."""
        place = self._places.get(name)
        table = None if place is None else _table_of(*place)
        return None if place is None or table is None else (table, place[1])

    def write(self, results: Iterator[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Assign the tensors that forward assigned to attributes of the model's modules, and the gradients."""

        def outside(of: GraphInput | StateRef) -> torch.Tensor:
            return inputs[of.index] if isinstance(of, GraphInput) else self.held(of.name)

        for of in self._cleared:
            outside(of).grad = None
        for (write, module), tensor in zip(self._writes, results, strict=True):
            if write.is_cache and _look_up(module, write.name) is not None:
                continue
            if write.buffer is not None:
                _bind_buffer(module, write.name, tensor, in_state_dict=write.buffer)
            elif write.of is None:
                _bind(module, write.name, tensor)
            else:
                _give_gradient(outside(write.of), tensor, adds=write.adds)


def held_now(tape: ProgramTape) -> dict[str, torch.Tensor]:
    """By name on the tape, the tensors that the model has now."""
    found = {name: _look_up(module, attribute) for name, (module, attribute) in _owners(tape).items()}
    return {name: t for name, t in found.items() if t is not None}


def _owners(tape: ProgramTape) -> dict[str, tuple[torch.nn.Module, str]]:
    """By name on the tape, module and attribute; without script modules, which keep their tensors in C++."""
    found = {n: (module, at) for n, (module, at) in tape.owners.items() if module is not None}
    return {n: owner for n, owner in found.items() if not isinstance(owner[0], torch.jit.ScriptModule)}


def _submodule(module: torch.nn.Module, path: str) -> torch.nn.Module:
    """A submodule of a loaded trace, which has no model; an empty one for attributes that the graph does not read."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return torch.nn.Module()


def _not_as_traced(tape: ProgramTape, name: str, then: Any, now: Any) -> StateMismatchError:
    """The error for another tensor of the model: `then` and `now` are dtype, shape, and device where that was asked."""
    count = 3 if now is not None and now[:2] == then[:2] else 2
    text = "no tensor" if now is None else _metadata(*now[:count])
    hint = "trace again, or put it back"
    if any(write.path == name for write in tape.attribute_writes):
        hint += "; the forward puts another tensor there: run the model once before st.trace if that one stays"
    return StateMismatchError(f"{name} was {_metadata(*then[:count])} when traced and is {text} now; {hint}")


def _metadata(dtype: torch.dtype, shape: torch.Size, device: torch.device | None = None) -> str:
    on = "" if device is None else f" on {device}"
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}{on}"


def _give_gradient(t: torch.Tensor, gradient: torch.Tensor, *, adds: bool) -> None:
    """Bind the `grad` of a tensor, or add to it as autograd does: in place, but where gradients flow through it."""
    if not adds or t.grad is None:
        t.grad = gradient
    elif gradient.requires_grad:
        t.grad = t.grad + gradient
    else:
        with torch.no_grad():
            t.grad += gradient


class _Gradients(dict[str, Any]):
    """The `grad` of the tensors of a module, by their names: `weight.grad`."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module = module

    def get(self, name: str, default: Any = None) -> Any:
        """The `grad` of this name."""
        t = getattr(self._module, name.removesuffix(".grad"), None)
        return default if t is None else t.grad

    __getitem__ = get


def _table_of(module: torch.nn.Module, name: str) -> dict[str, Any] | None:
    """Where a module has a tensor of this name; None where it has none."""
    tables: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module), module.__dict__)
    if name.endswith(".grad"):
        tables = (_Gradients(module),)
    return next((table for table in tables if isinstance(table.get(name), torch.Tensor)), None)


def _look_up(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    table = _table_of(module, name)
    return None if table is None else table[name]


def _bind(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    for table in (parameters_of(module), buffers_of(module)):
        if name in table:
            table[name] = tensor  # type: ignore[assignment]
            return
    module.__dict__[name] = tensor


def _bind_buffer(module: torch.nn.Module, name: str, tensor: torch.Tensor, *, in_state_dict: bool) -> None:
    """Bind a buffer, which may be new: the forward registered it."""
    buffers_of(module)[name] = tensor
    unsaved = unsaved_buffers_of(module)
    (unsaved.discard if in_state_dict else unsaved.add)(name)


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Turn autocast off: the graph contains the casts of the trace, and autocast would add others."""
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return _without_autocast_on(on) if on else contextlib.nullcontext()


@contextlib.contextmanager
def _without_autocast_on(devices: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


# Reads, asked again --------------------------------------------------------------------------------------------------


Number = Callable[[Any], Any]
"""From a symbolic size to its value in a call."""

_NUMBERS = (bool, int, float, str, type(None))


def _may_overlap(t: torch.Tensor) -> bool:
    """Whether several of its elements may be one in memory: most ops refuse to write it, or write it in some order."""
    return t.layout is torch.strided and not is_symbolic(t) and Geometry.of(t, 0).overlaps_itself()


class StateCheck:
    """Compares the state at a call with that of the trace."""

    def __init__(self, tape: ProgramTape) -> None:
        self._tape = tape
        self._reads = [read for read in tape.reads if read.place.kind != "input"]
        self.facts = [(read.place, read) for read in tape.reads if read.place.kind == "input"]
        """What was read of inputs."""
        known = set[int]()
        conditions = [condition for read in self._reads for condition in unchanged(read, known)]
        self.run_state = check(conditions, self._compare_all)
        """Raise StateMismatchError for what is not as it was, beside the inputs."""

    def run_facts(self, call: CallInputs, number: Number) -> None:
        """Raise InputMismatchError for a fact of an input that differs."""
        for place, read in self.facts:
            value, now = _in_numbers(read.value, number), place.current(call)
            if isinstance(place, OfInput) and place.fact == "layout":
                value = _layout_for(call.tensors[place.index], value, number)
            if not same(value, now):
                raise _mismatch(read, value, now)

    def run_numbers(self) -> None:
        """The part of `run_state` that torch.compile can trace: numbers and text in attributes and globals."""
        for read in self._reads:
            place, value = read.place, read.value
            if not isinstance(place, InTable) or type(value) not in _NUMBERS or read.others:
                continue
            now = place.table.get(place.key, MISSING)
            if now != value:
                raise StateMismatchError(f"{read.name}: {value} when traced and {now} now; trace again, or put it back")

    def _compare_all(self) -> None:
        """Compare each thing by itself, where the quick check fails: an equal one may be there."""
        for read in self._reads:
            if not is_same(read):
                value, now = read.value, read.current()
                if isinstance(read.place, OfTensor) and read.place.fact == "metadata":
                    raise _not_as_traced(self._tape, read.name, value, None if now is MISSING else now)
                raise _mismatch(read, value, now)


def _in_numbers(value: Any, number: Number) -> Any:
    if isinstance(value, tuple):
        return tuple([_in_numbers(item, number) for item in value])
    return number(value) if isinstance(value, Symbolic) else value


def _mismatch(read: Read, value: Any, now: Any) -> InputMismatchError:
    words = getattr(read.place, "words", None)
    name = read.name
    if words is not None:
        name, value, now = words(value, now)
    elif read.place.kind != "input" and not (isinstance(read.place, Asked) and read.place.text):
        name, value, now = difference(value, now, name)
    at = f", which the model reads at {read.source.removesuffix(':')}" if read.source else ""
    text = str if words is not None else (isinstance(read.place, Asked) and read.place.text) or _text
    then, present = text(value), text(now)
    problem = f"{name}{at}: {then} when traced and {'another one' if then == present else present} now"
    if read.place.kind == "input":
        return InputMismatchError(f"{problem}; trace again with inputs like these, or pass them as they were")
    if isinstance(read.place, OfFunctions):
        problem = "the code or the default arguments of a function are not those of the trace"
        for function, old, new in zip(read.place.functions, read.value, read.current(), strict=True):
            if not same(old, new):
                problem = f"the code or the default arguments of {function.__qualname__} are not those of the trace"
    if isinstance(read.place, Flag):
        return StateMismatchError(f"{problem}; trace again in this state, or call in that of the trace")
    hint = (isinstance(read.place, Asked) and read.place.hint) or "or pass it as an argument, if calls differ in it"
    return StateMismatchError(f"{problem}; trace again, or put it back; {hint}")


def _text(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        return type(value).__name__
    text = short(value) if isinstance(value, torch.Tensor) else " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:76]} ..."
