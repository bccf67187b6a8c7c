"""`compare_with_model` runs a program and its model on the same inputs and compares; `lint` checks a program alone.

Data flow:
    copies of the inputs, one random seed, the model's state saved -> model -> `Outcome`: results, inputs, state, and
    what tensors of the result share memory with -> state restored
    the same with the program -> differences in words -> CheckError; or what was compared
    tape, graph, scopes and module calls -> a line of text for each disagreement -> LintError
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.fx
from torch.utils._pytree import tree_map_only

from scopetrace._compat.tensors import buffers_of, default_tolerances, storage_id
from scopetrace.containers.contents import Contents
from scopetrace.containers.structure import STATEFUL, leaves, leaves_with_path, match, tensor_holders
from scopetrace.errors import CheckError, InputMismatchError, InvalidTapeError, LintError, ScopetraceError
from scopetrace.ir.registered import tensor_in
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import ProgramTape, Value
from scopetrace.ir.verify import verify
from scopetrace.program.graph import FxLowering, call_position, node_value, scope_path
from scopetrace.program.traced import ModuleCall, TracedProgram
from scopetrace.record.model import ModuleSnapshot

_PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, range, torch.dtype, torch.device, torch.layout)
"""Classes whose values are compared. Objects of others are copies in each run, which may be equal to nothing."""


@dataclasses.dataclass
class Outcome:
    """What a run of a model or a trace gave."""

    result: Any
    arguments: Any  # (args, kwargs) after the run
    state: Mapping[str, torch.Tensor | None]
    """Copies of the tensors of the model, and of gradients, after the run."""
    memory: dict[str, list[str]]
    """By the path of a tensor in the result, the arguments, tensors of the model and other results that share memory
    with it, and where."""


def compare_with_model(program: TracedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Run the program and its model on copies of the inputs, from one random state and one model state.

    Returns what was compared, in words.

    Raises CheckError with all differences, ScopetraceError for a loaded program, which has no model.
    """
    model = program.model
    if model is None:
        raise ScopetraceError("a loaded trace has no model to check against; trace the model again")
    state = _State(program.tape, model)
    expected = _run(model, args, kwargs, state)
    try:
        actual = _run(functools.partial(program.run_uncounted, program.graph_module), args, kwargs, state)
    except InputMismatchError as error:
        differs = [s for s in program.tape.specializations if s.message in str(error)]
        if not differs:
            raise
        raise CheckError(f"on these inputs the model goes another way:\n  {differs[0]}") from error
    if any(effect.name.endswith(".requires_grad") for effect in program.tape.side_effects):
        # `x.requires_grad_()` of an argument, which a call does not do: see `Trace.side_effects`
        for run in (expected, actual):
            run.arguments = tree_map_only(torch.Tensor, lambda t: t.detach() if t.is_leaf else t, run.arguments)
    problems = list(differences(expected, actual))
    if problems:
        raise CheckError("the trace differs from the model:\n  " + "\n  ".join(problems))
    return compared(expected)


class _State:
    """What a run may change: attributes and buffers of the model's modules, tensors that are written, and gradients."""

    def __init__(self, tape: ProgramTape, model: Callable[..., Any]) -> None:
        held = [call.module for call in tape.calls] + [module for module, _ in tape.owners.values()]
        held += [write.module for write in tape.attribute_writes]
        others = dict.fromkeys(module for module in held if module is not None)
        modules = model.modules() if isinstance(model, torch.nn.Module) else others
        self._objects = Contents()
        self._modules = [ModuleSnapshot("", module, self._objects) for module in modules]
        self._writes, written = tape.attribute_writes, tape.written_storages()
        read = [name for name, value in tape.attribute_reads() if value.storage in written]
        tensors = self._buffers() | {f"attribute {name}": tape.attributes[name] for name in read}
        self._tensors = {name: t for name, t in tensors.items() if t is not None}
        self._before = {name: (t.detach(), t.detach().clone()) for name, t in self._tensors.items()}
        self.tensors = {f"attribute {name}": t for name, t in tape.attributes.items()} | self._tensors
        self._counts = [(w.path, w.place, w.place.current()) for w in self._writes if w.place is not None]
        self._leaves = {name: t for name, t in tape.attributes.items() if t.is_leaf and t.requires_grad}
        self._gradients = {name: (t.grad, _copy(t.grad)) for name, t in self._leaves.items()}

    def _buffers(self) -> dict[str, torch.Tensor | None]:
        return {
            f"buffer {name} of module {i}": buffer
            for i, saved in enumerate(self._modules)
            for name, buffer in buffers_of(saved.module).items()
        }

    def values(self) -> dict[str, Any]:
        """Copies of the values after a run: of tensors saved before it, gradients, and the buffers bound now."""
        bound = {f"bound {name}": t for name, t in self._buffers().items()}
        bound |= {f"{w.path} after it": tensor_in(w.module, w.name) for w in self._writes if w.module is not None}
        gradients = {f"gradient of {name}": t.grad for name, t in self._leaves.items()}
        counts = {f"{path} after it": place.current() for path, place, _ in self._counts}
        return {name: _copy(t) for name, t in {**self._tensors, **bound, **gradients}.items()} | counts

    def restore(self) -> None:
        """Restore attributes, the storages of tensors, their values, and gradients."""
        self._objects.restore()
        for _, place, n in self._counts:
            place.put(n)
        for saved in self._modules:
            saved.restore()
        with torch.no_grad():
            for name, t in self._tensors.items():
                memory, value = self._before[name]
                if t.device.type == "meta":
                    continue
                if t.layout is torch.strided and not t.is_set_to(memory):
                    t.data = memory
                t.copy_(value)
            for name, (gradient, content) in self._gradients.items():
                self._leaves[name].grad = gradient
                if gradient is not None and content is not None and gradient.device.type != "meta":
                    gradient.copy_(content)


def _copy(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.detach().clone()


def _run(fn: Callable[..., Any], args: Any, kwargs: Any, state: _State) -> Outcome:
    with _on_copies(state, args, kwargs, 0) as arguments:
        known = {**dict(named_tensors("arguments", arguments)), **state.tensors}
        result = fn(*arguments[0], **arguments[1])
        return Outcome(result, arguments, state.values(), memory_of(result, known))


@contextlib.contextmanager
def _on_copies(state: _State, args: Any, kwargs: Any, seed: int) -> Iterator[Any]:
    """Gives copies of the arguments. What runs inside starts from `seed`; the model's state is restored afterwards."""
    arguments = copy_inputs((args, kwargs))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            yield arguments
        finally:
            state.restore()


def run_once(
    model: Callable[..., Any], tape: ProgramTape, args: Any, kwargs: Any, read: Callable[..., Any], seed: int = 0
) -> Any:
    """`read(result, tensors)` of a run on copies of the inputs; the model's state is restored afterwards.

    `tensors` are those among the arguments, as they are after the run.
    """
    matches: list[tuple[str, Any]] = []
    with _on_copies(_State(tape, model), args, kwargs, seed) as arguments:
        match(tape.args, arguments, Value, matches, "")  # before the run, which may replace tensors in containers
        result = model(*arguments[0], **arguments[1])
        return read(result, [x for _, x in matches if isinstance(x, torch.Tensor)])


def copy_inputs(x: Any) -> Any:
    """A deep copy that keeps shared memory, strides, `requires_grad` and whether a tensor is a leaf.

    Modules and optimizers stay the same objects.
    """
    memo: dict[int, Any] = {}
    for _, leaf in leaves_with_path(x, "", tensor_holders(x)):
        if isinstance(leaf, STATEFUL):
            memo[id(leaf)] = leaf
        elif isinstance(leaf, torch.Tensor) and id(leaf) not in memo:
            with torch.no_grad():
                new = copy.deepcopy(leaf.detach(), memo)
            memo[id(leaf)] = tracked_as(leaf, new)
    return copy.deepcopy(x, memo)


def tracked_as(x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new`, which requires grad if `x` does, and is no leaf, so that the model may write it, if `x` is none."""
    new.requires_grad_(x.requires_grad)
    if x.is_leaf:
        return new
    with torch.enable_grad():
        result = new.clone()
    result.data = new  # with the memory of `new`, which it may share with others
    return result


# Two outcomes compared -----------------------------------------------------------------------------------------------


def memory_of(result: Any, known: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """See `Outcome.memory`. `known` are tensors of before the run."""
    outputs = dict(named_tensors("result", result))
    others = [*known.items(), *outputs.items()]
    return {
        path: [word for name, other in others if name != path for word in _relation(t, name, other)]
        for path, t in outputs.items()
    }


def named_tensors(name: str, x: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a structure, with their paths."""
    for path, leaf in leaves_with_path(x, "", tensor_holders(x)):
        if isinstance(leaf, torch.Tensor):
            yield name + path, leaf


def _relation(t: torch.Tensor, name: str, other: torch.Tensor) -> Iterator[str]:
    if t is other:
        yield f"is {name}"
    elif storage_id(t) == storage_id(other):
        start = t.storage_offset() * t.element_size() - other.storage_offset() * other.element_size()
        after = f", from {start} bytes after its start" if start else ""
        yield f"shares memory with {name}{after}"


def differences(expected: Outcome, actual: Outcome) -> Iterator[str]:
    """How another run differs from the expected one."""
    yield from _differences("result", expected.result, actual.result)
    yield from _differences("arguments", expected.arguments, actual.arguments)
    yield from _differences("the model", expected.state, actual.state)
    for path, words in expected.memory.items():
        others = actual.memory.get(path, words)  # of another structure, which is said above
        yield from (f"{path}: it {word} no longer" for word in words if word not in others)
        yield from (f"{path}: it {word}, and did not" for word in others if word not in words)


def compared(outcome: Outcome) -> str:
    """What was compared, in words: `equal in result: 2 tensors, 1 value; arguments: 1 tensor; ...`."""
    texts = [f"{name}: {_counted(x)}" for name, x in (("result", outcome.result), ("arguments", outcome.arguments))]
    of_model = collections.Counter(name.partition(" ")[0] for name, t in outcome.state.items() if t is not None)
    kinds = {"buffer": of_model["bound"], "gradient": of_model["gradient"]}
    texts.append(f"the model: {_listed(kinds)}")
    return f"equal in {'; '.join(texts)}; memory that results share: {sum(map(len, outcome.memory.values())) or 'none'}"


def _counted(x: Any) -> str:
    counts = collections.Counter(_kind(leaf) for _, leaf in leaves_with_path(x, "", tensor_holders(x)))
    types = f", and the types of {_listed({'other object': n})}" if (n := counts["type"]) else ""
    return _listed({kind: counts[kind] for kind in ("tensor", "value")}) + types


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}{'s' * (n != 1)}" for kind, n in counts.items() if n) or "nothing"


def _kind(leaf: Any) -> str:
    return "tensor" if isinstance(leaf, torch.Tensor) else "value" if isinstance(leaf, _PLAIN) else "type"


def _differences(path: str, expected: Any, actual: Any) -> Iterator[str]:
    if type(expected) is not type(actual):
        yield f"{path}: {type(expected).__name__} became {type(actual).__name__}"
        return
    object_types = tensor_holders((expected, actual))
    old, new = (dict(leaves_with_path(x, "", object_types)) for x in (expected, actual))
    if old.keys() != new.keys():
        yield f"{path}: structure {list(old)} became {list(new)}"
        return
    for key, a in old.items():
        b = new[key]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            yield from (f"{path}{key}: {text}" for text in _of_tensors(a, b))
        elif type(a) is not type(b):
            yield f"{path}{key}: {type(a).__name__} became {type(b).__name__}"
        elif isinstance(a, _PLAIN) and a != b and (a == a or b == b):
            yield f"{path}{key}: {a!r} became {b!r}"


def _of_tensors(a: torch.Tensor, b: torch.Tensor) -> Iterator[str]:
    try:
        rtol, atol = _tolerances(a, b)
        torch.testing.assert_close(b, a, equal_nan=True, rtol=rtol, atol=atol)
    except AssertionError as error:
        yield " ".join(str(error).split())
    if a.requires_grad != b.requires_grad:
        yield f"requires_grad {a.requires_grad} became {b.requires_grad}"
    strides = [_strides(t) for t in (a, b)]
    if a.shape == b.shape and strides[0] != strides[1]:
        yield f"strides {strides[0]} became {strides[1]}"


def _tolerances(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """torch's for the dtype, with the absolute one for the scale of the tensor where all of it is smaller than 1."""
    rtol, atol = default_tolerances(a, b)
    if not (a.is_floating_point() or a.is_complex()) or a.layout is not torch.strided or a.device.type == "meta":
        return rtol, atol
    sizes = (a.detach() if a.is_complex() else a.detach().double()).abs()
    sizes = sizes[sizes.isfinite()]
    return rtol, atol * (min(1.0, float(sizes.max())) if sizes.numel() else 1.0)


def _strides(t: torch.Tensor) -> list[int] | None:
    """The strides that say where elements are: not those of dimensions of one element, and none of an empty tensor."""
    if t.layout is not torch.strided or not t.numel():
        return None
    return [stride for size, stride in zip(t.size(), t.stride(), strict=True) if size != 1]


# Tape, graph, scopes and calls ----------------------------------------------------------------------------------------


def lint(program: TracedProgram) -> None:
    """Raise LintError that lists every disagreement between the tape, the graph, the scopes and the calls."""
    calls, problems = program.all_calls, list[str]()
    try:
        verify(program.tape, "tracing")
    except InvalidTapeError as error:
        problems.append(str(error))
    try:
        program.graph_module.graph.lint()
    except RuntimeError as error:
        problems.append(f"graph: {str(error).splitlines()[0]}")
    for inner in program.lowering.walk():
        problems += _node_problems(inner, calls, program.scopes)
        problems += _call_problems(inner.graph, [call for call in calls if call.lowering is inner])
    if problems:
        raise LintError("\n".join(problems))


def _node_problems(program: FxLowering, calls: list[ModuleCall], scopes: dict[str, Scope]) -> Iterator[str]:
    table = {call.record.position: call for call in calls}
    for node in program.graph.nodes:
        path, position = scope_path(node), call_position(node)
        if path is None and position is None:
            continue  # made by a user's pass
        if path not in scopes:
            yield f"{node.name}: its scope {path!r} is not in the trace"
        elif position not in table:
            yield f"{node.name}: its call {position} is not in the trace"
        elif table[position].scope not in scopes[path].ancestors():
            yield f"{node.name}: its scope {path} is not inside its call's, {table[position].scope}"
        if node.op in ("placeholder", "get_attr") and node_value(node) is None and node.target not in program.bodies:
            yield f"{node.name}: it has no meta['val']"


def _call_problems(graph: torch.fx.Graph, calls: list[ModuleCall]) -> Iterator[str]:
    order = {node: i for i, node in enumerate(graph.nodes)}
    for call in calls:
        for kind, structure in (("argument", call.argument_templates), ("output", call.output_template)):
            for node in leaves(structure, torch.fx.Node):
                if node not in order:
                    yield f"{call}: its {kind} {node.name} is not in the graph"
        first = min((order[n] for n in call.nodes if n.op != "get_attr" and n in order), default=None)
        for node in leaves(call.argument_templates, torch.fx.Node):
            if first is not None and order.get(node, -1) > first:
                yield f"{call}: its argument {node.name} is made after its first op"
