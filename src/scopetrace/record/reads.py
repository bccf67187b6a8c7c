"""What the forward asks of torch and of the process, while it runs.

Data flow:
    facts of tensors, flags of torch, environment variables -> `_compat.questions` -> Read, once for each
    ops whose result autocast or the default dtype decides, blocks that switch autograd -> a Read of that state

What it reads of Python objects is in `record.attributes`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from scopetrace._compat import questions
from scopetrace._compat.tensors import requires_grad_of
from scopetrace.ir.reads import MISSING, Flag, OfEnvironment, OfInput, OfTensor, Place, Read
from scopetrace.ir.scopes import Frames
from scopetrace.ir.tape import Op, Value
from scopetrace.record.builder import TapeBuilder, ValueTable
from scopetrace.record.layouts import inputs_of_layouts
from scopetrace.record.model import Model


class ReadRecorder:
    """Puts what the forward reads on the tape; the `Listener` of `_compat.questions`."""

    def __init__(self, builder: TapeBuilder, values: ValueTable, model: Model) -> None:
        self._builder = builder
        self._values = values
        self._model = model
        self._reads = builder.tape.reads
        self._known: set[Place] = set()
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

            questions.report_questions(replace, self, mine)
            yield
            self._note_hidden_blocks()
            for i, frames in sorted(inputs_of_layouts(self._builder.tape, self._contiguous).items()):
                self._layout(i, frames)

    def _note_once(self, name: str, value: Any, place: Place, frames: Frames | None = None) -> None:
        if place not in self._known:
            self._known.add(place)
            frames = self._builder.frames() if frames is None else frames
            self._reads.append(Read(name, value, place, frames, self._builder.state.current_scope.path))

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


def _put_back(owner: Any, name: str, replacement: Any, own: Any) -> None:
    """Give a class or Python module back what it had, unless the forward has set the name itself."""
    if vars(owner).get(name) is not replacement:
        return
    if own is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, own)
