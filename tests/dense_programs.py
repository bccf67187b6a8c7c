"""Small dense programs of views and writes, run as traces and in eager.

    inputs (maybe aliases) -> up to three views, three writes and two reads, in any order -> all of them returned

Faults in the order of writes to aliases need few ops, close together, with nothing read in between. Long random
programs (tests/test_fuzz.py) seldom have that, so here all short ones are enumerated, and longer ones drawn.

    python -m tests.dense_programs                                       # all of two views and two writes
    python -m tests.dense_programs --draw 20000 --seed 1 --jobs 2        # random ones
    python -m tests.dense_programs --draw 2000 --seed 1 --grad leaf --dynamic

A program is a list of lines of Python. `Program.source` is a script that shows what it does in eager and as a trace;
`minimal` takes out the lines that a failure does not need.
"""

import argparse
import collections
import dataclasses
import itertools
import logging
import multiprocessing
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch

import scopetrace as st

# What a view is made with: for each kind some forms, of which the first that fits the tensor {t} is taken.
VIEWS = {
    "slice": ["{t}[1:]", "{t}[::2]", "{t}[..., 1:]", "{t}[1::2]", "{t}[..., :-1]", "{t}[..., ::2]", "{t}[:2]"],
    "select": ["{t}[0]", "{t}.select(-1, 1)", "{t}[-1]", "{t}[..., 0]", "{t}[:, 1]"],
    "permute": ["{t}.t()", "{t}.transpose(0, -1)", "{t}.permute(1, 0)", "{t}.mT", "{t}.movedim(0, -1)"],
    "view": ["{t}.view(-1)", "{t}.view(2, -1)", "{t}.view(-1, 2)"],
    "unflatten": ["{t}.unflatten(0, (2, -1))", "{t}.unflatten(-1, (-1, 2))"],
    "reshape": ["{t}.flatten()", "{t}.reshape(2, -1)", "{t}.reshape(-1)", "{t}.contiguous()", "{t}.to({t}.dtype)"],
    "diagonal": ["{t}.diagonal()", "{t}.diagonal(1)", "{t}.diagonal(-1)", "{t}.diagonal(0, -1, -2)"],
    "unfold": ["{t}.unfold(0, 2, 2)", "{t}.unfold(-1, 2, 1)", "{t}.unfold(0, 2, 1)", "{t}.unfold(-1, 2, 2)"],
    "expand": ["{t}.expand(2, *{t}.shape)", "{t}[:1].expand_as({t})", "{t}.expand_as({t})"],
    "detach": ["{t}.detach()", "{t}.data", "{t}.view_as({t})", "{t}[...]"],
    "complex": [
        *("torch.view_as_real({t})", "torch.view_as_complex({t}.unflatten(-1, (-1, 2)))", "{t}.imag"),
        *("torch.view_as_complex({t}.view(-1, 2)).imag", "torch.view_as_complex({t})", "{t}.real"),
    ],
    "bits": ["{t}.view(torch.int32)", "{t}.view(torch.int16)", "{t}.view(torch.float64)", "{t}.view(torch.uint8)"],
    "narrow": ["{t}.narrow(0, 1, 1)", "{t}.narrow(-1, 1, 2)", "{t}.narrow(0, 0, 2)"],
    "chunk": ["{t}.chunk(2)[1]", "{t}.split(2)[0]", "{t}.unbind()[1]", "{t}.chunk(2, -1)[0]", "{t}.unbind(-1)[0]"],
    "unsqueeze": ["{t}.unsqueeze(0)", "{t}.unsqueeze(-1)", "{t}[:1].squeeze(0)", "{t}[:, None]", "{t}.squeeze()"],
    "as_strided": ["{t}.as_strided((2, 2), (2, 1))", "{t}.as_strided((2, 2), (1, 2), 1)", "{t}.as_strided((3,), (2,))"],
}

# Writes to {t}; {u} is another tensor of its shape and `like` one of its shape that shares no memory.
LIKE = "torch.arange({t}.numel()).view({t}.shape)"
WRITES = {
    "whole": ["{t}.add_(1)", "{t}.mul_(2)", "{t} -= 3", "{t}.add_({u})", "{t}.mul_({u})", "{t}.neg_()", "{t} += {u}"],
    "part": ["{t}[::2] *= 2", "{t}[0] += 1", "{t}[..., 1:] -= 1", "{t}[1:] *= {u}[1:]", "{t}[..., 0].neg_()"],
    "set": [
        *("{t}[...] = {u}", "{t}[0] = 3", "{t}[..., 1] = {u}[..., 0]", "{t}[:] = {t}.flip(0)", "{t}[{t} > 0] = 2"),
        *("{t}[torch.tensor([0, 1])] = 2", "{t}[1:] = {t}[:-1].clone()", "{t}[::2] = 5"),
    ],
    "out": [
        *("torch.add({t}, 1, out={t})", "torch.mul({u}, 2, out={t})", "torch.neg({u}, out={t})"),
        "torch.neg({t}[0], out={t}[0])",
    ],
    "copy": ["{t}.copy_({u})", "{t}.copy_({t}.flip(0))", "{t}.copy_({t}[:1].clone())", "{t}[1:].copy_({u}[1:])"],
    "fill": ["{t}.fill_(3)", "{t}.zero_()", "{t}[1:].zero_()", "{t}[..., 0].fill_(7)"],
    "index": [
        "{t}.index_put_((torch.tensor([0, 1]),), torch.tensor(5).to({t}.dtype))",
        "{t}.index_add_(0, torch.tensor([1, 1]), {t}[:2].clone())",
        "{t}.index_copy_(-1, torch.tensor([0]), {u}[..., 1:2].clone())",
        "{t}.index_fill_(0, torch.tensor([1]), 4)",
        "{t}.index_put_((torch.tensor([1, 1]),), torch.tensor(2).to({t}.dtype), accumulate=True)",
    ],
    "masked": ["{t}.masked_fill_({t} > 0, -1)", "{t}.masked_fill_({u} == 1, 6)", "{t}.masked_fill_({t} == 2, 0)"],
    "scatter": [
        "{t}.scatter_(0, torch.zeros_like({t}, dtype=torch.long)[:1], 5)",
        "{t}.scatter_add_(0, torch.zeros_like({t}, dtype=torch.long)[:2], {t}.clone())",
    ],
    "foreach": ["torch._foreach_add_([{t}], 1)", "torch._foreach_mul_([{t}], 2)", "torch._foreach_neg_([{t}])"],
    "no_grad": ["with torch.no_grad(): {t}.mul_(2)", "with torch.no_grad(): {t}[0] = 1"],
    "detached": ["{t}.detach().add_(1)", "{t}.data.mul_(2)", "{t}.data[0] = 1", "{t}.detach()[..., 0] += 1"],
}
# Writes that give each element of the memory the same value, however often it is visited.
CONSTANT = {"{t}.fill_(3)", "{t}.zero_()", "{t}[1:].zero_()", "{t}[..., 0].fill_(7)", "{t}[0] = 3"}
READS = ["{t} * 2", "{t}.sum()", "{t}.clone()", "{t}[0] + 1"]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """How the arguments are made: lines, of which those named in `passed` are given to the program."""

    lines: tuple[tuple[str, str], ...]
    passed: tuple[str, ...]


GRID = "torch.arange(start, start + h * w).view(h, w) / 4"
INPUTS = {
    "one": Inputs((("x", GRID),), ("x",)),
    "two": Inputs((("x", GRID), ("y", f"-{GRID}")), ("x", "y")),
    "same": Inputs((("x", GRID), ("y", "x")), ("x", "y")),
    "base_and_view": Inputs((("x", GRID), ("y", "x[1:]")), ("x", "y")),
    "view_and_base": Inputs((("y", GRID), ("x", "y[..., ::2]")), ("x", "y")),
    "overlap": Inputs((("s", GRID), ("x", "s[:3]"), ("y", "s[1:]")), ("x", "y")),
    "transposed": Inputs((("s", GRID), ("x", "s.t()")), ("x",)),
    "strided": Inputs((("s", GRID), ("x", "s[1:, ::2]")), ("x",)),
    "base_and_transposed": Inputs((("x", GRID), ("y", "x.t()[1:]")), ("x", "y")),
    "complex": Inputs((("x", f"torch.complex({GRID}, {GRID} + 1)"),), ("x",)),
    "cube": Inputs((("x", f"({GRID}).view(2, h // 2, w)"),), ("x",)),
    "vector": Inputs((("x", f"({GRID}).view(-1)"),), ("x",)),
}

SIZE = (4, 6)  # h and w of the trace
OTHER_SIZES = ((6, 8), (8, 4))  # where a trace with symbolic sizes is called too


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a program, with the names of the tensors that it makes, writes and reads."""

    text: str
    makes: str = ""
    target: str = ""
    operand: str = ""
    constant: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """Lines over inputs.

    `grad` is "" (none), "derived" (the inputs are computed from leaves that require grad) or "leaf" (they are such
    leaves). All sizes are symbolic if `dynamic`.
    """

    inputs: str
    lines: tuple[Line, ...]
    returned: tuple[str, ...]
    grad: str = ""
    dynamic: bool = False

    @property
    def roots(self) -> dict[str, str]:
        """The arguments that are no views, with what they are made by.

        With gradients or symbolic sizes these alone are passed, and the program makes the views: leaves share no
        memory, and tensors of symbolic sizes must not.
        """
        return {name: text for name, text in INPUTS[self.inputs].lines if "start" in text}

    @property
    def parameters(self) -> list[str]:
        """The names of the arguments."""
        if self.grad == "derived":
            return [f"{name}0" for name in self.roots]
        return list(self.roots if self.grad or self.dynamic else INPUTS[self.inputs].passed)

    @property
    def make_source(self) -> str:
        """A function of the sizes and the first element, which gives the arguments."""
        lines = [f"{n} = {text}" for n, text in INPUTS[self.inputs].lines if n in self.roots or not self.dynamic]
        if self.grad:
            made = zip(self.parameters, self.roots.values(), strict=True)
            lines = [f"{name} = ({text}).clone().requires_grad_()" for name, text in made]
        return _function("make(h, w, start)", lines, self.parameters)

    @property
    def function_source(self) -> str:
        """The program itself."""
        before = [f"{name} = {name}0 * 1" for name in self.roots] if self.grad == "derived" else []
        if self.grad or self.dynamic:
            before += [f"{name} = {text}" for name, text in INPUTS[self.inputs].lines if name not in self.roots]
        lines = [*before, *(line.text for line in self.lines)]
        return _function(f"f({', '.join(self.parameters)})", lines, self.returned)

    @property
    def source(self) -> str:
        """A script that prints the results in eager and of the trace, and the arguments after either."""
        shapes = ""
        if self.dynamic:
            shapes = ", dynamic_shapes=tuple({d: torch.export.Dim.AUTO for d in range(t.dim())} for t in args)"
        h, w = SIZE
        sizes = [SIZE, *OTHER_SIZES] if self.dynamic else [SIZE]
        return (
            f"import torch, scopetrace as st\n\n{self.make_source}\n\n{self.function_source}\n\n"
            f"args = make({h}, {w}, 0)\ntrace = st.trace(f, args{shapes})\n"
            f"for h, w in {sizes}:\n"
            "    for run in (f, trace):\n        args = make(h, w, -5)\n        print(run(*args), args, sep='\\n')\n"
        )

    def functions(self):
        """`make` and `f` as Python functions."""
        names = {"torch": torch}
        exec(compile(f"{self.make_source}\n\n{self.function_source}", "<dense program>", "exec"), names)
        return names["make"], names["f"]


def _function(head: str, lines: Iterable[str], returned: Iterable[str]) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"def {head}:\n{body}    return [{', '.join(returned)}]\n"


# Making programs -----------------------------------------------------------------------------------------------------


class Draft:
    """A program that grows: its lines, and its tensors at the sizes of the trace."""

    def __init__(self, inputs: str) -> None:
        self.inputs = inputs
        self.lines: list[Line] = []
        self.pool = given(inputs, *SIZE)
        self._names = {"view": iter("abc"), "read": iter("pqr")}

    def view(self, parent: str, kind: str, turn: int) -> bool:
        """Add a view by the first form of a kind that fits, beginning with the one whose turn it is."""
        return self._make("view", VIEWS[kind], parent, turn)

    def read(self, of: str, turn: int) -> bool:
        """Add a tensor computed from another."""
        return self._make("read", READS, of, turn)

    def _make(self, what: str, forms: list[str], parent: str, turn: int) -> bool:
        for form in rotated(forms, turn):
            text = form.format(t=parent)
            made = evaluate(text, self.pool)
            if made is not None and 0 < made.numel() <= 96 and made.dim() < 5:
                name = next(self._names[what])
                self.pool[name] = made
                self.lines.append(Line(f"{name} = {text}", makes=name))
                return True
        return False

    def write(self, target: str, kind: str, turn: int) -> bool:
        """Add a write by the first form of a kind that fits."""
        alike = [u for u, t in self.pool.items() if u != target and t.shape == self.pool[target].shape]
        operand = alike[turn % len(alike)] if alike else ""
        u = operand
        if not operand:
            u = LIKE.format(t=target)
        elif not apart(self.pool[target], self.pool[operand]):
            u = f"{operand}.clone()"
        for form in rotated(WRITES[kind], turn):
            read = operand if u == operand and "{u}" in form else ""
            line = Line(form.format(t=target, u=u), "", target, read, form in CONSTANT)
            if is_defined(line, self.pool) and executes(line.text, self.pool):
                self.lines.append(line)
                return True
        return False

    def program(self, returned: Iterable[str] = (), grad: str = "", dynamic: bool = False) -> Program:
        """What was made so far; all its tensors are returned unless some are named."""
        return Program(self.inputs, tuple(self.lines), tuple(returned or self.pool), grad, dynamic)


def given(inputs: str, h: int, w: int) -> dict[str, torch.Tensor]:
    """The passed inputs."""
    names = {"torch": torch, "h": h, "w": w, "start": 0}
    for name, text in INPUTS[inputs].lines:
        names[name] = eval(text, names)
    return {name: names[name] for name in INPUTS[inputs].passed}


def rotated(forms: list[str], turn: int) -> list[str]:
    """The forms, beginning with the one whose turn it is."""
    start = turn % len(forms)
    return forms[start:] + forms[:start]


def evaluate(text: str, pool: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The value of an expression, or None where eager refuses it."""
    try:
        return eval(text, {"torch": torch}, pool)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None


def executes(text: str, pool: dict[str, torch.Tensor]) -> bool:
    """Whether eager takes a write; it changes the values in the pool, which no draft reads."""
    try:
        exec(text, {"torch": torch}, dict(pool))
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return True


# Whether a result is defined -----------------------------------------------------------------------------------------


def places(t: torch.Tensor) -> list[int]:
    """The byte in memory where each element begins."""
    offsets = [0]
    for size, stride in zip(t.shape, t.stride(), strict=True):
        offsets = [o + i * stride for o in offsets for i in range(size)]
    return [(t.storage_offset() + o) * t.element_size() for o in offsets]


def occupied(t: torch.Tensor) -> set[int]:
    """All bytes of a tensor."""
    return {p + i for p in places(t) for i in range(t.element_size())}


def apart(t: torch.Tensor, u: torch.Tensor) -> bool:
    """Whether two tensors have the same elements in the same order, or none in common."""
    if t.untyped_storage()._cdata != u.untyped_storage()._cdata:
        return True
    return (t.dtype == u.dtype and places(t) == places(u)) or occupied(t).isdisjoint(occupied(u))


def is_defined(line: Line, pool: dict[str, torch.Tensor]) -> bool:
    """Whether a write does not depend on the order in which its elements are visited."""
    t = pool[line.target]
    if not line.constant and len(set(places(t))) < t.numel():
        return False
    return not line.operand or apart(t, pool[line.operand])


def is_defined_at(program: Program, h: int, w: int) -> bool:
    """Whether all writes of a program are defined at these sizes."""
    pool = given(program.inputs, h, w)
    for line in program.lines:
        if line.makes:
            made = evaluate(line.text.partition(" = ")[2], pool)
            if made is None:  # then eager raises
                return True
            pool[line.makes] = made
        elif not is_defined(line, pool):
            return False
    return True


# All small programs --------------------------------------------------------------------------------------------------

# Kinds that differ little take turns; so do the forms of writes.
SMALL_VIEWS = (
    *(("slice", "narrow", "chunk"), ("select",), ("permute",), ("view", "unflatten", "reshape", "unsqueeze")),
    *(("diagonal",), ("unfold",), ("expand",), ("detach",), ("complex",), ("bits",)),
)
WHOLE = ("whole", "out", "copy", "fill", "foreach", "no_grad", "detached")
PART = ("part", "set", "index", "masked", "scatter", "part")


def small_programs(grad: str = "", dynamic: bool = False, first: int = 0, every: int = 1) -> Iterator[Program]:
    """All of two views and two writes to one input, and all of one view and two writes to two inputs that overlap.

    Or the part of them that begins with the `first` and has each so manyth after it.
    """
    shapes = [("one", 2), ("same", 1), ("base_and_view", 1), ("overlap", 1)]
    plans = itertools.chain.from_iterable(itertools.starmap(_plans, shapes))
    for turn, (inputs, views, order, writes) in itertools.islice(enumerate(plans), first, None, every):
        draft = Draft(inputs)
        if _fill_in(draft, list(views), list(writes), order, turn):
            yield draft.program(grad=grad, dynamic=dynamic)


def _plans(inputs: str, views: int) -> Iterator[tuple]:
    """The inputs; kinds and parent of each view; the order; kinds of each write."""
    count = len(INPUTS[inputs].passed)
    parents = itertools.product(*(range(count + view) for view in range(views)))
    for kinds, chosen in itertools.product(itertools.product(SMALL_VIEWS, repeat=views), parents):
        for order, writes in itertools.product(orders(views, 2, count), itertools.product((WHOLE, PART), repeat=2)):
            yield inputs, zip(kinds, chosen, strict=True), order, writes


def _fill_in(draft: Draft, views: list, writes: list, order: Iterable[int | None], turn: int) -> bool:
    """Add views and writes in the given order; False where one does not fit."""
    for step, target in enumerate(order):
        names = list(draft.pool)
        at = turn + step * 5
        if target is None:
            kinds, parent = views.pop(0)
            fits = draft.view(names[parent], kinds[at % len(kinds)], 0)
        else:
            kinds = writes.pop(0)
            fits = draft.write(names[target], kinds[at % len(kinds)], at // len(kinds))
        if not fits:
            return False
    return True


def orders(views: int, writes: int, inputs: int) -> Iterator[tuple[int | None, ...]]:
    """Every interleaving: None for a view, for a write the number of its target among the tensors that there are."""
    for chosen in itertools.combinations(range(views + writes), views):
        steps = [position in chosen for position in range(views + writes)]
        tensors = [inputs + sum(steps[:position]) for position in range(len(steps))]
        yield from itertools.product(*([None] if made else range(n) for made, n in zip(steps, tensors, strict=True)))


def drawn_program(seed: int, number: int, grad: str = "", dynamic: bool = False) -> Program:
    """The program of this number: two or three views, one to three writes, up to two reads, any inputs, any forms."""
    choose = random.Random(f"{seed} {number}")
    # In eager the gradient of as_strided depends on whether a write came before it.
    views = [kind for kind in VIEWS if not (grad and kind == "as_strided")]
    while True:
        draft = Draft(choose.choice(list(INPUTS)))
        adders = {
            "view": lambda on, turn, draft=draft: draft.view(on, choose.choice(views), turn),
            "write": lambda on, turn, draft=draft: draft.write(on, choose.choice(list(WRITES)), turn),
            "read": draft.read,
        }
        counts = {
            "view": choose.choice((2, 3, 3)),
            "write": choose.choice((1, 2, 3, 3)),
            "read": choose.choice((0, 0, 1, 2)),
        }
        steps = [step for step, count in counts.items() for _ in range(count)]
        choose.shuffle(steps)
        for step in steps:
            _draw(draft, adders[step], choose)
        if any(line.target for line in draft.lines):
            kept = list(draft.pool) if choose.random() < 0.8 else choose.sample(list(draft.pool), 2)
            return draft.program(kept, grad, dynamic)


def _draw(draft: Draft, add: Callable[[str, int], bool], choose: random.Random) -> None:
    """Add a step of any form that fits, to an input or view, rather to a later one."""
    names = [name for name in draft.pool if name not in "pqr"]
    for _ in range(6):
        if add(choose.choice([*names, names[-1]]), choose.randrange(60)):
            return


# Running them --------------------------------------------------------------------------------------------------------


# What a program's trace may be; with several reasons the first holds.
KINDS = {
    "wrong": "it does something else than eager",
    "fails": "it raises an exception that is no refusal",
    "refused": "it is refused when it is traced",
    "fixed": "it runs only at some of the sizes, as the program fixes them: x[:3] + x[1:]",
    "right": "it does what eager does, which may be to raise",
    "undefined": "it multiplies complex infinities, of which torch's kernels make other numbers for other strides",
}


class Verdict(NamedTuple):
    """What came of a program, one of KINDS, and why."""

    kind: str
    why: str = ""


def verdict(program: Program) -> Verdict:
    """Trace a program, run the trace on other values, and other sizes if they are symbolic, and compare with eager."""
    make, f = program.functions()
    args = make(*SIZE, 0)
    shapes = tuple({d: torch.export.Dim.AUTO for d in range(t.dim())} for t in args) if program.dynamic else None
    expected = observe(f, make(*SIZE, -5))
    if "complex" in program.source and isinstance(expected, dict) and not all(map(is_finite, expected["values"])):
        return Verdict("undefined")
    try:
        trace = st.trace(f, args, dynamic_shapes=shapes)
    except Exception as error:
        return _raised(expected, error, {st.TraceError: "refused"})
    if impure := [str(n.target) for n in trace.graph_module.graph.nodes if writes(n.target)]:
        return Verdict("wrong", f"the graph has {', '.join(impure)}")
    found = [compare(expected, trace, make(*SIZE, -5), {})]
    for h, w in OTHER_SIZES if program.dynamic else ():
        if is_defined_at(program, h, w):
            expected = observe(f, make(h, w, -5))
            found.append(compare(expected, trace, make(h, w, -5), {st.errors.InputMismatchError: "fixed"}))
    return min(found, key=lambda v: list(KINDS).index(v.kind))


def compare(expected: dict | Exception, trace: Callable, args: list, known: dict) -> Verdict:
    """The trace on these arguments against what eager did on the same. `known` has the kinds of some exceptions."""
    actual = observe(trace, args)
    if isinstance(actual, Exception):
        return _raised(expected, actual, known)
    if isinstance(expected, Exception):
        # Autograd forbids some writes to the results of split and unbind. A pure graph has no such views.
        forbidden = "function that returns multiple views" in str(expected)
        return Verdict("right" if forbidden else "wrong", f"eager raises {first_line(expected)}")
    # In eager a result still requires grad, of zero, after a constant took its place. A pure graph has forgotten that.
    actual["requires_grad"] = list(map(max, actual["requires_grad"], expected["requires_grad"]))
    for what, value in expected.items():
        if not same(value, actual[what]):
            return Verdict("wrong", f"{what}: eager {value}, trace {actual[what]}")
    return Verdict("right")


def _raised(expected: dict | Exception, error: Exception, known: dict[type[Exception], str]) -> Verdict:
    return Verdict("right", "both raise") if isinstance(expected, Exception) else raised(error, known)


def raised(error: Exception, known: dict[type[Exception], str]) -> Verdict:
    """What to say of a trace that raises where eager does not; `known` are the kinds of refusals."""
    kind = next((kind for cls, kind in known.items() if isinstance(error, cls)), "fails")
    return Verdict(kind, f"raises {first_line(error)}")


def first_line(error: Exception) -> str:
    """Class and first line of an exception."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def writes(target: object) -> bool:
    """Whether an op of a graph writes to its arguments."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def observe(run: Callable, args: list[torch.Tensor]) -> dict | Exception:
    """All that a caller can see of a run: results and arguments, how they share memory, and gradients."""
    try:
        results = run(*args)
    except Exception as error:
        return error
    tensors = [*args, *results]
    return {
        "values": [t.detach().clone() for t in tensors],
        "identity": [[u is t for u in tensors].index(True) for t in tensors],
        "memory": memory(tensors),
        "strides": [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in tensors],
        "gradients": gradients(args, results),
        "requires_grad": [t.requires_grad for t in tensors],
    }


def is_finite(t: torch.Tensor) -> bool:
    """Whether no element of a tensor is infinite or not a number."""
    return bool(t.isfinite().all())


def memory(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """For each tensor the first that shares its storage, and by how many bytes it begins behind that one."""
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    first = [storages.index(s) for s in storages]
    return [(f, t.data_ptr() - tensors[f].data_ptr()) for f, t in zip(first, tensors, strict=True)]


def gradients(args: list[torch.Tensor], results: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Of the results, each element with another weight, by the leaves among the arguments.

    None where the program overwrote what eager's backward pass needs, or views that autograd forbids to write to; a
    trace may know the gradients all the same.
    """
    leaves = [t for t in args if t.requires_grad and t.is_leaf]
    try:
        parts = [torch.view_as_real(t) if t.is_complex() else t for t in results if t.requires_grad]
        weighted = [(t * torch.arange(1.0, t.numel() + 1).view(t.shape).cos()).sum() for t in parts]
        total = sum(weighted, sum(t.real.sum() * 0 for t in leaves))
        return list(torch.autograd.grad(total, leaves)) if leaves else []
    except RuntimeError:
        return None


def same(expected: object, actual: object) -> bool:
    """Whether two observations are equal: tensors to the last bit, or nearly."""
    if isinstance(expected, torch.Tensor):
        if expected.dtype != actual.dtype or expected.shape != actual.shape:
            return False
        return torch.equal(expected, actual) or torch.allclose(expected, actual, 1e-5, 1e-5, equal_nan=True)
    if isinstance(expected, list) and expected and isinstance(expected[0], torch.Tensor):
        return len(expected) == len(actual) and all(map(same, expected, actual))
    return expected is None or expected == actual


def minimal(program: Program) -> Program:
    """The program without the lines and results that its failure does not need."""
    return smallest(program, _smaller, _fault)


def smallest(program: Any, smaller: Callable[[Any], Iterator[Any]], fault: Callable[[Any], object]) -> Any:
    """The program that is left where of those that are `smaller` one with the same fault is taken, again and again."""
    wanted = fault(program)
    while found := next((p for p in smaller(program) if fault(p) == wanted), None):
        program = found
    return program


def _fault(program: Program) -> tuple[str, str]:
    found = verdict(program)
    return found.kind, found.why.partition(":")[0]


def _smaller(program: Program) -> Iterator[Program]:
    for i, line in enumerate(program.lines):
        rest = program.lines[:i] + program.lines[i + 1 :]
        if not (line.makes and re.search(rf"\b{line.makes}\b", " ".join(other.text for other in rest))):
            kept = tuple(name for name in program.returned if name != line.makes)
            yield dataclasses.replace(program, lines=rest, returned=kept)
    for i in range(len(program.returned)):
        yield dataclasses.replace(program, returned=program.returned[:i] + program.returned[i + 1 :])


# The command line ----------------------------------------------------------------------------------------------------


def run_all(
    programs: Iterable[Any], verdict: Callable[[Any], Verdict] = verdict
) -> tuple[collections.Counter, list[tuple[Any, Verdict]]]:
    """How many programs are of each kind, and those that are not right."""
    counts, others = collections.Counter(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of complex values that become real
        for program in programs:
            found = verdict(program)
            counts[found.kind] += 1
            if found.kind != "right":
                others.append((program, found))
    return counts, others


def main(argv: list[str] | None = None) -> int:
    """Run programs, print those that are wrong and why others were refused; 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--draw", type=int, metavar="N", help="N random programs (default: all of two views and two writes)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random programs")
    parser.add_argument("--every", type=int, default=1, help="run only each so many")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--grad", choices=("derived", "leaf"), default="", nargs="?", const="derived", help="with gradients"
    )
    parser.add_argument("--dynamic", action="store_true", help="with symbolic sizes")
    parser.add_argument("--show", type=int, default=10, help="print so many wrong programs, as small as they get")
    options = parser.parse_args(argv)
    counts, wrong, refused = collections.Counter(), [], collections.Counter()
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for part, others in pool.map(_share, [options] * options.jobs, range(options.jobs)):
            counts += part
            wrong += [(program, found.why) for program, found in others if found.kind in ("wrong", "fails")]
            refused += collections.Counter(found.why for _, found in others if found.kind in ("refused", "fixed"))
    for program, why in wrong[: options.show]:
        print(f"# {why}\n{minimal(program).source}\n")
    report(counts, refused, KINDS)
    return bool(wrong)


def report(counts: collections.Counter, refused: collections.Counter, kinds: Iterable[str]) -> None:
    """Print how many programs were refused for each reason, and how many are of each kind."""
    for why, count in refused.most_common():
        print(f"{count:6} {why}")
    print(", ".join(f"{counts[kind]} {kind}" for kind in kinds), f"of {counts.total()}")


def _share(options: argparse.Namespace, job: int) -> tuple[collections.Counter, list[tuple[Program, Verdict]]]:
    """What one of the processes runs."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # of torch's interpreter of symbolic sizes
    if options.draw:
        numbers = range(job * options.every, options.draw, options.jobs * options.every)
        programs = (drawn_program(options.seed, n, options.grad, options.dynamic) for n in numbers)
    else:
        programs = small_programs(options.grad, options.dynamic, job * options.every, options.jobs * options.every)
    return run_all(programs)


if __name__ == "__main__":
    sys.exit(main())
