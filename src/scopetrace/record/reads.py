"""What the forward reads from outside of the program, while it runs.

Data flow:
    attributes of modules and of objects in them -> a descriptor on their class -> Read, unless the forward wrote them
    globals and variables of enclosing functions -> the names in the code of each function that may run -> Read
    facts of tensors, flags of torch, environment -> `_compat.questions` -> Read

A value is taken before the forward can change it. Tensors are inputs of the program, so reading one is no Read.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import torch

from scopetrace._compat import questions
from scopetrace._compat.patches import forward_of_class
from scopetrace._compat.tensors import requires_grad_of
from scopetrace.ir.reads import (
    MISSING,
    Flag,
    InClosure,
    InTable,
    Missing,
    OfContents,
    OfEnvironment,
    OfInput,
    OfTensor,
    Place,
    Read,
    same,
    snapshot,
)
from scopetrace.ir.scopes import Frames
from scopetrace.ir.tape import Op, Value
from scopetrace.record.builder import TapeBuilder, ValueTable
from scopetrace.record.layouts import inputs_of_layouts
from scopetrace.record.model import Model, attribute_tables
from scopetrace.record.variables import Variables, class_attribute, is_of_model

_BOOKKEEPING = frozenset(torch.nn.Module().__dict__) - {"training"} | {"_compiled_call_impl", "forward"}
_HEAP_TYPE = 1 << 9  # classes made by a class statement, whose attributes can be set
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype})
_PLAIN_OR_CONTAINER = frozenset({*_PLAIN, tuple, list, dict, set})
_WITHOUT_ATTRIBUTES = frozenset(
    {*_PLAIN, Missing, tuple, list, dict, set, types.FunctionType, types.BuiltinFunctionType}
)
_AS_THEY_ARE = (torch.Tensor, torch.nn.Module, Value, types.ModuleType)


class ReadRecorder:
    """Puts what the forward reads on the tape; the `Listener` of `_compat.questions`."""

    def __init__(self, builder: TapeBuilder, values: ValueTable, model: Model) -> None:
        self._builder = builder
        self._values = values
        self._model = model
        self._reads = builder.tape.reads
        self._known: set[Any] = set()
        """What was read or written, by the key that stands for its place."""
        self._names = {id(m.__dict__): model.names[id(m)][0] for m in model.modules}
        """By the id of a `__dict__`, what its owner is called."""
        self._of_modules = set(self._names)
        self._called: set[type] = set()
        self._bases: dict[type, list[str]] = {}
        """By class, the plain attributes that it has itself."""
        self._watched: dict[type, set[str]] = {}
        self._replace: questions.Replace = setattr
        self._keep: list[Any] = []  # ids must not be used again while the trace runs
        self._variables = Variables(self._read_global, self._read_cell, self._watch_object)
        self._grad = questions.grad_enabled()
        self._contiguous: list[tuple[Value, int, Frames]] = []
        """What `contiguous()` gave back as it was, the number of ops then, and the frames."""
        self._blocks: list[int | None] = []
        """Of each open block that switches autograd, its first op where it sets what is set anyway; else None."""
        self._hidden: list[range] = []
        """The ops of such blocks that have ended."""
        self._autocast = questions.autocast_state()
        self._autocast_depth = 0
        self.awaits_cast = True
        """Whether an op that autocast may change is to be told by `on_cast_op`."""
        self.awaits_default_dtype = True
        """Whether a tensor of the default dtype is to be told by `on_default_dtype`."""

    @contextlib.contextmanager
    def watching(self, mine: questions.Mine) -> Iterator[None]:
        """Inside, all that this thread reads is noted."""
        with contextlib.ExitStack() as stack:

            def replace(owner: Any, name: str, value: Any) -> None:
                stack.callback(_put_back, owner, name, value, vars(owner).get(name, MISSING))
                setattr(owner, name, value)

            self._replace = replace
            for module in self._model.modules:
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # its attributes are in C++
                self._watch(type(module), module.__dict__.keys())
            replace(torch.nn.Module, "__getattr__", self._reporting_getattr(mine))
            questions.report_questions(replace, self, mine)
            yield
            self._note_hidden_blocks()
            for i, frames in sorted(inputs_of_layouts(self._builder.tape, self._contiguous).items()):
                self._layout(i, frames)
        self._reads[:] = [r for r in self._reads if not _is_changed(r)]

    # ---------------------------------------------------------------- attributes

    def _watch(self, cls: type, names: Set[str]) -> None:
        """Put descriptors on a class for attributes that its instances have in their `__dict__`."""
        if type(cls).__setattr__ is not type.__setattr__:
            return  # an Enum, which nobody changes
        known = self._watched.get(cls)
        if known is None:
            known = self._watched[cls] = set(_BOOKKEEPING)
        if names <= known:
            return
        new = {*names, *self._class_level(cls)} - known
        known |= new
        for name in new:
            if name[:2] == "__":
                continue
            below = class_attribute(cls, name)
            if not hasattr(type(below[1]), "__set__"):
                self._replace(cls, name, _Watched(self, name, *below))

    def _class_level(self, cls: type) -> Iterator[str]:
        for base in cls.__mro__:
            found = self._bases.get(base)
            if found is None:
                found = self._bases[base] = _class_level(base)
            yield from found

    def _reporting_getattr(self, mine: questions.Mine) -> Callable[[torch.nn.Module, str], Any]:
        """`nn.Module.__getattr__`, which tells of names that are missing or stand for no tensor or module."""
        ask = torch.nn.Module.__getattr__

        def __getattr__(module: torch.nn.Module, name: str) -> Any:
            found: Any = MISSING
            try:
                found = ask(module, name)
                return found
            finally:
                if (found is None or found is MISSING) and name not in _BOOKKEEPING and name[:2] != "__" and mine():
                    own = module.__dict__
                    table = next((t for t in attribute_tables(module) if name in t), own)
                    self.read_attribute(table, name, found, own)

        return __getattr__

    def read_attribute(self, table: Any, key: str, value: Any, own: Any = None) -> None:
        """`table[key]`, the attribute of an object, is read. `own` is its `__dict__`, if `table` is not."""
        known = self._known
        place = id(table), key
        if place in known:
            return
        known.add(place)
        owner = self._names.get(id(table if own is None else own))
        if isinstance(value, torch.Tensor) and id(table) in self._of_modules:
            return  # an input of the program, as parameters are
        name, frame = f"{owner}.{key}" if owner else key, sys._getframe(2)
        self._note(name, value, InTable(table, key), frame)
        if type(value) not in _WITHOUT_ATTRIBUTES:
            self._watch_object(value, name)
            self._variables.of_methods(type(value), {*frame.f_code.co_names, "__call__"})
        elif type(value) is types.FunctionType:
            self._variables.of_callable(value)

    def wrote_attribute(self, table: Any, key: str) -> None:
        """The forward sets an attribute: what it reads there later is its own."""
        self._known.add((id(table), key))

    def _watch_object(self, value: Any, name: str) -> None:
        """See what is read of an object, such as a config, that the forward has got at."""
        cls = type(value)
        table = getattr(value, "__dict__", None)
        if type(table) is not dict or id(table) in self._names or isinstance(value, (type, *_AS_THEY_ARE)):
            return
        self._keep.append(table)
        self._names[id(table)] = name
        if cls.__flags__ & _HEAP_TYPE and (is_of_model(_file_of(cls)) or cls is argparse.Namespace):
            self._watch(cls, table.keys())
        elif not cls.__flags__ & _HEAP_TYPE and type(table) is dict and not callable(value):
            self._note(f"vars({name})", table, OfContents(value), None)

    def _note(self, name: str, value: Any, place: Place, frame: types.FrameType | None) -> None:
        call = self._builder.call
        outer = call.frames if call is not None else ()
        frames = (outer, ((frame.f_code, frame.f_lineno),)) if frame is not None else outer
        value = value if type(value) in _PLAIN else snapshot(value)
        self._reads.append(Read(name, value, place, frames, self._builder.state.current_scope.path))

    def _note_once(self, name: str, value: Any, place: Place, frames: Frames | None = None) -> None:
        if place not in self._known:
            self._known.add(place)
            frames = self._builder.frames() if frames is None else frames
            self._reads.append(Read(name, value, place, frames, self._builder.state.current_scope.path))

    # ---------------------------------------------------------------- variables

    def on_start(self, fn: Any, arguments: Iterable[tuple[str, Any]]) -> None:
        """The traced callable is about to run, with these arguments and objects among them, by name."""
        for name, x in arguments:
            self._watch_object(x, name)
        while isinstance(fn, functools.partial):
            for name, x in fn.keywords.items():
                self._read_variable((id(fn.keywords), name), name, x, InTable(fn.keywords, name))
            for name, x in [*fn.keywords.items(), *((f"argument {i}", x) for i, x in enumerate(fn.args))]:
                self._watch_object(x, name)
            fn = fn.func
        if isinstance(fn, torch.nn.Module):
            self.on_forward(fn)
            return
        if not isinstance(fn, types.FunctionType | types.MethodType):
            fn = getattr(fn, "__call__", fn)  # noqa: B004  # the method of an object that is callable
        self._watch_object(getattr(fn, "__self__", None), "self")
        self._variables.of_callable(fn)

    def on_forward(self, module: torch.nn.Module) -> None:
        """A module is called."""
        cls = type(module)
        if cls not in self._called:
            self._called.add(cls)
            self._variables.of_callable(module.__dict__.get("forward") or forward_of_class(cls), cls)

    def _read_global(self, table: Any, key: str, value: Any, name: str) -> None:
        self._read_variable((id(table), key), name, value, InTable(table, key))

    def _read_cell(self, cell: types.CellType, value: Any, name: str) -> None:
        self._read_variable(id(cell), name, value, InClosure(cell))

    def _read_variable(self, key: Any, name: str, value: Any, place: Place) -> None:
        if key not in self._known and not isinstance(value, types.ModuleType) and not _is_of_others(value):
            self._known.add(key)
            self._note(name, value, place, None)

    # ---------------------------------------------------------------- questions to torch

    def on_flag(self, name: str, args: tuple[Any, ...], answer: Any) -> None:
        """As `Listener.on_flag`."""
        self._note_once(f"{name}({', '.join(map(repr, args))})", answer, Flag(name, args))

    def on_environment(self, key: str, answer: str | None) -> None:
        """As `Listener.on_environment`."""
        self._note_once(f"os.environ[{key!r}]", MISSING if answer is None else answer, OfEnvironment(key))

    def on_grad_mode(self, enabled: bool) -> None:
        """As `Listener.on_grad_mode`. A block that sets what is set anyway leaves no trace in the ops."""
        self._blocks.append(len(self._builder.tape.ops) if enabled == self._grad else None)

    def on_grad_block_end(self) -> None:
        """As `Listener.on_grad_block_end`."""
        start = self._blocks.pop() if self._blocks else None
        if start is not None:
            self._hidden.append(range(start, len(self._builder.tape.ops)))

    def _note_hidden_blocks(self) -> None:
        """Autograd matters in a block where an op takes what a parameter or an input may give a gradient."""
        ops = self._builder.tape.ops
        self._hidden += [range(start, len(ops)) for start in self._blocks if start is not None]
        carriers: set[Value] = set()
        for i, op in enumerate(ops if self._hidden else ()):
            if op.kind == "placeholder":
                carries = True
            elif op.kind == "get_attr":
                carries = any(v.real is not None and v.real.requires_grad for v in op.values())
            else:
                carries = any(v in carriers for v in op.inputs())
                if carries and any(i in hidden for hidden in self._hidden):
                    self._note_once("torch.is_grad_enabled()", self._grad, Flag("torch.is_grad_enabled", ()))
                    return
            carriers.update(v for v in op.values() if carries and v.fake.dtype.is_floating_point)

    def on_autocast(self, entered: bool) -> None:
        """As `Listener.on_autocast`."""
        self._autocast_depth += 1 if entered else -1
        self.awaits_cast = not self._autocast_depth

    def on_cast_op(self) -> None:
        """An op runs that autocast may give other dtypes."""
        self.awaits_cast = False
        self._note_once("torch.autocast", self._autocast, Flag("torch.autocast", ()))

    def on_default_dtype(self) -> None:
        """The dtype of a new tensor is the default one."""
        self.awaits_default_dtype = False
        self._note_once("torch.get_default_dtype()", questions.default_dtype(), Flag("torch.get_default_dtype", ()))

    # ---------------------------------------------------------------- facts of tensors

    def on_fact(self, t: torch.Tensor, name: str, args: tuple[Any, ...], answer: Any) -> None:
        """As `Listener.on_fact`. The facts of a tensor made in the forward follow from those of the inputs."""
        value = self._values.by_id.get(id(t))
        inputs = self._builder.tape.inputs
        if name == "contiguous":
            if value is not None and answer is t:
                self._contiguous.append((value, len(self._builder.tape.ops), self._builder.frames()))
        elif value is not None and value in inputs:
            self._fact(inputs.index(value), name, args, answer)
        elif name in ("stride", "is_contiguous", "storage_offset"):
            self.on_layout(offset=name == "storage_offset")
        elif name in ("requires_grad", "is_leaf", "grad_fn"):
            self._note_once("torch.is_grad_enabled()", self._grad, Flag("torch.is_grad_enabled", ()))
            self._requires_grad(t)

    def on_gradient(self, t: torch.Tensor) -> None:
        """It matters whether autograd records what is done to a tensor."""
        self.on_flag("torch.is_grad_enabled", (), questions.grad_enabled())
        self.on_fact(t, "requires_grad", (), requires_grad_of(t))

    def on_layout(self, *, offset: bool = False) -> None:
        """Something depends on the strides of a tensor made in the forward: all inputs must be laid out as here."""
        for i, value in enumerate(self._builder.tape.inputs):
            self._layout(i)
            if offset and value.fake.layout is torch.strided:
                self._fact(i, "storage_offset", (), value.offset)

    def _layout(self, index: int, frames: Frames | None = None) -> None:
        fake = self._builder.tape.inputs[index].fake
        if fake.layout is torch.strided:
            name, answer = f"{self._builder.tape.input_paths[index]}'s strides", questions.fact_of(fake, "layout", ())
            self._note_once(name, answer, OfInput(index, "layout"), frames)

    def _fact(self, index: int, name: str, args: tuple[Any, ...], answer: Any) -> None:
        path = self._builder.tape.input_paths[index]
        text = f"{path}.{name}" + (f"({', '.join(map(repr, args))})" if name in questions.METHODS else "")
        self._note_once(text, answer, OfInput(index, name, args))

    def on_hidden_write(self, value: Value, op: Op) -> None:
        """With gradients to an input or attribute, a write that autograd does not see would be another program."""
        if not self._grad:
            self.on_flag("torch.is_grad_enabled", (), False)
            return
        inputs, path = self._builder.tape.inputs, op.scope.path
        place: Place | None = None
        if value in inputs:
            index = inputs.index(value)
            name, place = self._builder.tape.input_paths[index], OfInput(index, "requires_grad")
        elif value.op.name in self._builder.tape.owners:
            name = value.op.name
            module, attribute = self._builder.tape.owners[name]
            place = None if module is None else OfTensor(module, attribute, "requires_grad")
        if place is not None and place not in self._known:
            self._known.add(place)
            self._reads.append(Read(f"{name}.requires_grad", False, place, op.frames, path))

    def _requires_grad(self, t: torch.Tensor) -> None:
        owner = self._model.owner(t)
        if owner is not None:
            self._of_model(*owner)
            return
        tape = self._builder.tape
        for i, value in enumerate(tape.inputs):
            self._fact(i, "requires_grad", (), value.requires_grad)
        for fqn, (module, name) in tape.owners.items():
            if module is not None:
                self._of_model(fqn, module, name)

    def _of_model(self, fqn: str, module: torch.nn.Module, name: str) -> None:
        tensor = self._builder.tape.attributes.get(fqn)
        tensor = getattr(module, name) if tensor is None else tensor
        answer = questions.fact_of(tensor, "requires_grad", ())
        self._note_once(f"{fqn}.requires_grad", answer, OfTensor(module, name, "requires_grad"))


def _dict_of(owner: Any) -> dict[str, Any]:
    """The `__dict__` of an object, past a `__getattribute__` of its class."""
    found: dict[str, Any] = object.__getattribute__(owner, "__dict__")
    return found


class _Watched:
    """Stands for an attribute of a class while the forward runs, and tells who reads it.

    `value` is what the class itself has under that name, in `table`; MISSING if it has nothing.
    """

    __slots__ = ("key", "reads", "table", "value")

    def __init__(self, reads: ReadRecorder, key: str, table: Any, value: Any) -> None:
        self.reads, self.key, self.table, self.value = reads, key, table, value

    def __get__(self, owner: Any, cls: type) -> Any:
        table = {} if owner is None else _dict_of(owner)
        value = table.get(self.key, MISSING)
        if value is not MISSING:
            self.reads.read_attribute(table, self.key, value)
            return value
        if self.value is MISSING:
            raise AttributeError(f"{cls.__name__!r} object has no attribute {self.key!r}")
        if hasattr(type(self.value), "__get__"):
            return self.value.__get__(owner, cls)
        self.reads.read_attribute(table, self.key, MISSING)
        self.reads.read_attribute(self.table, self.key, self.value)
        return self.value

    def __set__(self, owner: Any, value: Any) -> None:
        self.reads.wrote_attribute(_dict_of(owner), self.key)
        _dict_of(owner)[self.key] = value

    def __delete__(self, owner: Any) -> None:
        self.reads.wrote_attribute(_dict_of(owner), self.key)
        try:
            del _dict_of(owner)[self.key]
        except KeyError:
            raise AttributeError(self.key) from None


def _put_back(owner: Any, name: str, replacement: Any, own: Any) -> None:
    """Give a class or Python module back what it had, unless the forward has set the name itself."""
    if vars(owner).get(name) is not replacement:
        return
    if own is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, own)


def _is_changed(read: Read) -> bool:
    """Whether the forward itself has changed the list, dict or set that it read."""
    if not isinstance(read.value, list | dict | set) or not isinstance(read.place, InTable):
        return False
    return not same(read.value, snapshot(read.place.table.get(read.place.key)))


def _is_of_others(value: Any) -> bool:
    """Whether it is a function of torch, Python or NumPy, which nobody replaces but for a while."""
    if isinstance(value, types.FunctionType):
        return not is_of_model(value.__code__.co_filename)
    return callable(value) and not isinstance(value, type) and not is_of_model(_file_of(type(value)))


def _class_level(base: type) -> list[str]:
    """The plain attributes that a class of the model gives to all its instances."""
    if base is object or not is_of_model(_file_of(base)):
        return []
    return [k for k, v in base.__dict__.items() if type(v) in _PLAIN_OR_CONTAINER and k[:2] != "__"]


def _file_of(cls: type) -> str:
    """The file that defines a class; `<frozen` for a class of a module without one, as Python's own."""
    module = sys.modules.get(cls.__module__)
    path: str | None = getattr(module, "__file__", None)
    return path or ("" if module is None or cls.__module__ == "__main__" else "<frozen")
