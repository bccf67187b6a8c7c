"""Small programs with gradients, drawn at random and run as traces and in eager.

    inputs and a module with state -> views, writes and reads, some of them under no_grad; derivatives inside
        -> results, some of them inputs or not differentiable -> gradients of all leaves, once, twice, and of gradients

    python tests/grad_programs.py --draw 1000 --seed 700

`tests/dense_programs.py` has more kinds of views and writes; here autograd is what is tried. In eager, gradients are
those of the program as written: what a backward pass needs is copied when it is kept, so that later writes cannot
change it (docs/mutation.md, "Programs without a defined result").
"""

import argparse
import collections
import dataclasses
import itertools
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from dense_programs import LIKE, VIEWS, WRITES, Line, Verdict, apart, is_defined, memory, same, writes
from torch.autograd.graph import saved_tensors_hooks

import scopetrace as st

GRID = "torch.linspace(-1, 1, 24).view(4, 6) + start"
# Lines that make the arguments x, y; `grad` is whether the leaves require grad.
INPUTS = {
    "leaf": [f"x = ({GRID}).requires_grad_(grad)"],
    "plain": [f"x = {GRID}"],
    "leaf_and_plain": [f"x = ({GRID}).requires_grad_(grad)", f"y = {GRID} / 2"],
    "two_leaves": [f"x = ({GRID}).requires_grad_(grad)", f"y = ({GRID} / 2).requires_grad_(grad)"],
    "same": [f"x = ({GRID}).requires_grad_(grad)", "y = x"],
    "derived": [f"s = ({GRID}).requires_grad_(grad)", "x = s * 1"],
    "derived_view": [f"s = ({GRID}).requires_grad_(grad)", "x = (s * 1)[1:]"],
    "derived_base_and_view": [f"s = ({GRID}).requires_grad_(grad)", "x = s * 1", "y = x[1:]"],
    "derived_overlap": [f"s = ({GRID}).requires_grad_(grad)", "d = s * 1", "x = d[:3]", "y = d[1:]"],
    "leaf_and_view": [f"x = ({GRID}).requires_grad_(grad)", "y = x[1:]"],
    "leaf_and_detached": [f"x = ({GRID}).requires_grad_(grad)", "y = x.detach()[1:]"],
    "detached_and_leaf": [f"y = ({GRID}).requires_grad_(grad)", "x = y.detach()[1:]"],
    "derived_and_detached": [f"s = ({GRID}).requires_grad_(grad)", "x = s * 1", "y = x.detach()"],
}
NET = """class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.p = torch.nn.Parameter(torch.linspace(-1, 1, 6))
        self.q = torch.nn.Parameter(torch.linspace(1, -1, 24).view(4, 6))
        self.register_buffer("b", torch.linspace(0, 1, 6))
        self.linear = torch.nn.Linear(6, 6)
        self.norm = torch.nn.LayerNorm(6)
"""
STATE = ("self.p", "self.q", "self.b", "self.linear.weight")

MODES = ["torch.no_grad()", "torch.enable_grad()", "torch.set_grad_enabled(False)", "torch.inference_mode()"]
READS = [
    *("{t} * 2", "{t}.sin()", "{t} * {u}", "{t} + {u}", "{t}.clone()", "{t}.tanh()", "{t}.sum()", "{t}.detach() * {t}"),
    *("torch.where({t} > 0, {t}, {u})", "torch.stack([{t}, {u}])", "torch.cat([{t}, {u}])", "{t} * self.p"),
    *("torch.nn.functional.linear({t}, self.linear.weight)", "self.linear({t})", "self.norm({t})", "{t}.softmax(-1)"),
    *("{t} + self.b", "{t}.cumsum(0)", "{t}.relu()", "torch.einsum('...i,...i->...', {t}, {u})", "{t}.square().mean()"),
    "torch.utils.checkpoint.checkpoint(lambda t: (t * self.p).sin(), {t}, use_reentrant=False)",
    "torch.nn.functional.dropout({t}, 0.5, training=False)",
]
PIECES = ["{t}.chunk(2)", "{t}.unbind()[:2]", "{t}.split(2)[:2]", "{t}.chunk(2, -1)", "{t}.unbind(-1)[:2]"]
INNER = [
    "torch.autograd.grad({u}.square().sum(), {t}, retain_graph=True, materialize_grads=True)[0]",
    "torch.autograd.grad(({t} * {t} * self.p.sum()).sum(), {t}, create_graph={flag})[0]",
    "torch.autograd.grad(self.norm(self.linear({t})).sin().sum(), self.linear.weight, create_graph={flag})[0]",
    "torch.autograd.grad({u}.sin().sum(), [{t}, self.p], create_graph={flag}, retain_graph=True, allow_unused=True)[0]",
]
UPDATES = [
    *("self.b.mul_(0.9).add_({v}, alpha=0.1)", "self.b.copy_({v})", "self.b = self.b * 0.5 + {v}"),
    *(
        "self.b.lerp_({v}.detach(), 0.1)",
        "self.p.data.mul_(0.9)",
        "self.p.data[0] = 1",
        "self.b = {v}.detach().clone()",
    ),
    *(
        "self.p.copy_({v})",
        "self.p.mul_(0.5)",
        "self.q[0].add_({v})",
        "self.b.lerp_(self.p, 0.5)",
        "self.p.add_(self.b)",
    ),
]
RESULTS = ["{t}", "{t}", "{t}", "{t}", "{t}.argmax()", "{t} > 0", "{t}.detach()", "i", "{t}[0]", "i + 1"]


@dataclasses.dataclass(frozen=True)
class Step:
    """A statement, the names that it makes, and the context manager that it is under."""

    text: str
    makes: tuple[str, ...] = ()
    mode: str = ""

    def __str__(self) -> str:
        return f"with {self.mode}: {self.text}" if self.mode else self.text


@dataclasses.dataclass(frozen=True)
class Program:
    """The forward of a module with state, on inputs of one of the kinds above and integers."""

    inputs: str
    steps: tuple[Step, ...]
    returned: tuple[str, ...]

    @property
    def parameters(self) -> list[str]:
        """The names of the arguments."""
        made = [line.partition(" = ")[0] for line in INPUTS[self.inputs]]
        return [*(name for name in made if name in "xy"), "i"]

    @property
    def make_source(self) -> str:
        """A function of the first element, and of whether leaves require grad; it gives the leaves and arguments."""
        lines = [*INPUTS[self.inputs], "i = torch.arange(6) % 4"]
        leaf = lines[0].partition(" = ")[0]
        others = ["y"] if self.inputs == "two_leaves" else []
        given = f"return [{', '.join([leaf, *others])}], ({', '.join(self.parameters)})"
        return "def make(start, grad):\n" + "".join(f"    {line}\n" for line in [*lines, given])

    @property
    def source(self) -> str:
        """The module and its inputs."""
        lines = [*map(str, self.steps), f"return [{', '.join(self.returned)}]"]
        forward = "".join(f"        {line}\n" for line in lines)
        head = f"    def forward(self, {', '.join(self.parameters)}):\n"
        return f"import torch\nimport torch.utils.checkpoint\n\n{NET}\n{head}{forward}\n{self.make_source}"

    def made(self) -> tuple[type[torch.nn.Module], Callable]:
        """The class of the module, and `make`."""
        names: dict = {}
        exec(compile(self.source, "<program with gradients>", "exec"), names)
        return names["Net"], names["make"]


# Making programs -----------------------------------------------------------------------------------------------------


class Draft:
    """A program that grows, and its tensors in eager."""

    def __init__(self, inputs: str, choose: random.Random) -> None:
        self.choose = choose
        self.empty = Program(inputs, (), ())
        net, make = self.empty.made()
        self.scope = {"torch": torch, "self": net()}
        given = make(0, grad=True)[1]
        self.pool: dict[str, torch.Tensor] = dict(zip(self.empty.parameters, given, strict=True))
        del self.pool["i"]
        self.steps: list[Step] = []
        self.mode = ""
        self._names = (f"t{n}" for n in itertools.count(1))

    def add(self, kind: str) -> bool:
        """Add a step of a kind if one is found that eager takes."""
        makers = {
            "view": self._view,
            "write": self._write,
            "read": lambda: self._make(self._filled(self.choose.choice(READS))),
            "inner": lambda: self._make(self._filled(self.choose.choice(INNER))),
            "pieces": lambda: self._make(self._filled(self.choose.choice(PIECES)), 2),
            "update": self._update,
            "leaf": lambda: self._make(self._filled("{t}.detach().requires_grad_()")),
            "retain_grad": lambda: self._execute(Step(self._filled("{t}.retain_grad()"), (), self.mode)),
        }
        return any(makers[kind]() for _ in range(6))

    def _view(self) -> bool:
        kind = self.choose.choice([k for k in VIEWS if k not in ("as_strided", "bits", "complex")])
        return self._make(self._filled(self.choose.choice([*VIEWS[kind], *VIEWS["slice"]])))

    def _write(self) -> bool:
        form = self.choose.choice(WRITES[self.choose.choice(list(WRITES))])
        if form.startswith("with "):
            form = form.partition(": ")[2]  # under a mode of its own
        target = self.choose.choice([*self.pool, *self.pool, self.choose.choice(STATE)])
        t = self._value(target)
        alike = [u for u in self.pool if u != target and self.pool[u].shape == t.shape]
        u = self.choose.choice(alike) if alike else LIKE.format(t=target)
        if alike and not apart(t, self.pool[u]):
            u = f"{u}.clone()"
        line = Line(form.format(t=target, u=u), "", "t", "")
        return is_defined(line, {"t": t}) and self._execute(Step(line.text, (), self.mode))

    def _update(self) -> bool:
        fitting = [
            f"{n}[0]" if t.dim() == 2 else n for n, t in self.pool.items() if t.shape[-1:] == (6,) and t.dim() < 3
        ]
        if not fitting:
            return False
        text = self.choose.choice(UPDATES).format(v=self.choose.choice(fitting))
        return self._execute(Step(text, (), self.mode))

    def _filled(self, form: str) -> str:
        t = self.choose.choice([*self.pool, list(self.pool)[-1]])
        alike = [u for u in self.pool if u != t and self.pool[u].shape == self.pool[t].shape]
        u = self.choose.choice(alike or [t])
        return form.format(t=t, u=u, flag=self.choose.choice((True, False)))

    def _make(self, text: str, count: int = 1) -> bool:
        names = tuple(next(self._names) for _ in range(count))
        return self._execute(Step(f"{', '.join(names)} = {text}", names, self.mode))

    def _value(self, name: str) -> torch.Tensor:
        return eval(name, self.scope, self.pool)

    def _execute(self, step: Step) -> bool:
        """Whether eager takes it and what it makes is small and finite."""
        made = dict(self.pool)
        try:
            exec(str(step), self.scope, made)
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
            return False
        new = [made.get(name) for name in step.makes]
        if any(not isinstance(t, torch.Tensor) or not 0 < t.numel() <= 96 or t.dim() > 3 for t in new):
            return False
        if any(t.is_inference() for t in new) or any(float(t.detach().abs().max()) > 1e3 for t in new):
            return False
        self.pool |= dict(zip(step.makes, new, strict=True))
        self.steps.append(step)
        return True

    def program(self) -> Program:
        """What was made, with results of which at least one is computed last."""
        names = [*self.pool, *self.pool, self.choose.choice(STATE)]
        kept = (
            list(self.pool) if self.choose.random() < 0.5 else self.choose.choices(names, k=self.choose.randint(1, 4))
        )
        results = [self.choose.choice(RESULTS).format(t=t) if self.choose.random() < 0.4 else t for t in kept]
        sized = [r for r in results if not (r.endswith("[0]") and self._value(r[:-3]).dim() == 0)]
        return dataclasses.replace(self.empty, steps=tuple(self.steps), returned=tuple(sized or ["i"]))


def drawn_program(seed: int, number: int) -> Program:
    """The program of this number."""
    choose = random.Random(f"{seed} {number}")
    usual = [name for name in INPUTS if "detached" not in name]
    draft = Draft(choose.choice(usual if choose.random() < 0.95 else list(INPUTS)), choose)
    kinds = ["view"] * 8 + ["write"] * 10 + ["read"] * 8 + ["inner", "pieces", "update"] * 4 + ["leaf"]
    if choose.random() < 0.03:
        kinds.append("retain_grad")
    for _ in range(choose.randint(3, 8)):
        if choose.random() < 0.5:
            draft.mode = choose.choice(["", "", "", *MODES, MODES[0]])
        draft.add(choose.choice(kinds))
    return draft.program()


# Running them --------------------------------------------------------------------------------------------------------

KINDS = {
    "wrong": "it does something else than eager",
    "fails": "it raises an exception that is no refusal",
    "refused": "it is refused when it is traced",
    "refused at the call": "it is refused when it is called with other inputs or in another grad mode",
    "raises": "its backward pass raises: it needs a tensor that `.data` changed, where eager does not look",
    "right": "it does what eager does, which may be to raise",
}
FORBIDDEN = (
    "function that returns multiple views",
    "has been modified inplace",
    "being modified inplace",
    "a view of a leaf Variable",
)
CALLS = {  # the first element of the inputs, whether leaves require grad, and whether the call is under no_grad
    "a call": (-0.5, True, False),
    "a call under no_grad": (0.25, True, True),
    "a call with inputs that do not require grad": (0.5, False, False),
}


def verdict(program: Program) -> Verdict:
    """Trace a program, call the trace in three ways, and compare with eager."""
    net, make = program.made()
    model, traced = net(), net()
    try:
        trace = st.trace(traced, make(0, grad=True)[1])
    except Exception as error:
        expected = observe(model, model, make(*CALLS["a call"][:2]), False)
        return _raised(expected, error, {st.TraceError: "refused"})
    if impure := [str(n.target) for n in trace.graph_module.graph.nodes if writes(n.target)]:
        return Verdict("wrong", f"the graph has {', '.join(impure)}")
    for way in CALLS:
        found = called(program, way, model, trace, traced)
        if found is None:
            break
        if found.kind != "right":
            return Verdict(found.kind, f"{way}: {found.why}")
    return Verdict("right")


def called(
    program: Program, way: str, model: torch.nn.Module, trace: Callable, traced: torch.nn.Module
) -> Verdict | None:
    """Call a trace in one of the ways, and compare; None where eager raises in another way than the traced one."""
    make, (start, grad, without) = program.made()[1], CALLS[way]
    source = " ".join(step.text for step in program.steps)
    with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        expected = observe(model, model, make(start, grad), without)
    actual = observe(trace, traced, make(start, grad), without)
    if isinstance(expected, Exception) and way != "a call":
        return None  # inner derivatives need gradients; a graph has them as ops
    if not isinstance(expected, Exception) and (without or (not grad and "requires_grad_" in source)):
        # Views made in the other grad mode, and leaves that the forward makes: those of the trace are kept.
        for what in ("requires_grad", "leaf", "none"):
            expected.pop(what, None)
    found = compare(expected, actual)
    if found.kind == "fails" and "modified by an inplace operation" in found.why:
        if ".data" in source:
            return Verdict("raises", found.why)
        found = compare(_plainly(program, way), actual)
    return found


def _plainly(program: Program, way: str) -> dict | Exception:
    """What eager does in a call after the ways before it, without copies of what backward needs."""
    net, make = program.made()
    model = net()
    for before, (start, grad, without) in CALLS.items():
        found = observe(model, model, make(start, grad), without)
        if before == way:
            break
    return found


def observe(run: Callable, model: torch.nn.Module, given: tuple, without: bool) -> dict | Exception:
    """All that a caller can see of a run: results, arguments and state, how they share memory, and gradients."""
    leaves, args = given
    versions = [t._version for t in args]
    parameters = list(model.parameters())
    for t in parameters:
        t.grad = None
    model.b = model.b.detach()  # without the history of the call before
    try:
        with torch.set_grad_enabled(not without):
            results = run(*args)
        return seen(model, args, versions, results) | ({} if without else gradients([*leaves, *parameters], results))
    except Exception as error:
        return error


def seen(model: torch.nn.Module, args: tuple, versions: list[int], results: list[torch.Tensor]) -> dict:
    """Values, metadata and shared memory of arguments, results and state."""
    tensors = [*args, *results, *model.parameters(), *model.buffers()]
    return {
        "values": [t.detach().clone() for t in tensors],
        "identity": [[u is t for u in tensors].index(True) for t in tensors],
        "memory": memory(tensors),
        "requires_grad": [t.requires_grad for t in tensors],
        "leaf": [t.is_leaf for t in tensors],
        "unwritten": [t._version == before for t, before in zip(args, versions, strict=True)],
        "attributes": list(dict(model.named_parameters())) + list(dict(model.named_buffers())),
    }


def gradients(leaves: list[torch.Tensor], results: list[torch.Tensor]) -> dict:
    """The gradients of the leaves: accumulated by two backward passes, of one result, and of gradients."""
    leaves = [t for t in leaves if t.requires_grad]
    found: dict = {}
    parts = [r for r in results if r.requires_grad]
    if not parts or not leaves:
        return {"none": not parts}
    total = weighted(parts)
    for name in ("backward", "second backward"):
        total.backward(retain_graph=True)
        found[name] = [None if t.grad is None else t.grad.clone() for t in leaves]
    found["retained"] = [None if r.grad is None else r.grad.clone() for r in parts if not r.is_leaf]
    found["of the first"] = torch.autograd.grad(weighted(parts[:1]), leaves, retain_graph=True, allow_unused=True)
    found["of the last"] = torch.autograd.grad(weighted(parts[-1:]), leaves, retain_graph=True, allow_unused=True)
    first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    used = [g for g in first if g is not None and g.requires_grad]
    found["of gradients"] = torch.autograd.grad(weighted(used), leaves, allow_unused=True) if used else []
    return {name: list(grads) for name, grads in found.items()}


def weighted(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of all elements, each with another weight."""
    return sum((t * torch.arange(1.0, t.numel() + 1).view(t.shape).cos()).sum() for t in parts)


def compare(expected: dict | Exception, actual: dict | Exception) -> Verdict:
    """What a trace did against what eager did."""
    if isinstance(actual, Exception):
        return _raised(expected, actual, {st.errors.InputMismatchError: "refused at the call"})
    if isinstance(expected, Exception):
        # Autograd forbids some writes to views, and tells when somebody looks. A pure graph has no such views.
        return Verdict(
            "right" if any(f in str(expected) for f in FORBIDDEN) else "wrong", f"eager raises {_first_line(expected)}"
        )
    # A write hidden from autograd (`.data`) does not count in eager, but does where a trace writes back.
    actual["unwritten"] = list(map(max, actual["unwritten"], expected["unwritten"]))
    for what in expected:
        for i, (a, b) in (
            enumerate(zip(expected[what], actual.get(what, ()), strict=False))
            if isinstance(expected[what], list)
            else ()
        ):
            if not ((a is None) == (b is None) and same(a, b)):
                return Verdict("wrong", f"{what} {i}: eager {a}, trace {b}")
        if what not in actual:
            return Verdict("wrong", f"{what}: missing in the trace")
    return Verdict("right")


def _raised(expected: dict | Exception, error: Exception, known: dict[type[Exception], str]) -> Verdict:
    if isinstance(expected, Exception):
        return Verdict("right", "both raise")
    kind = next((kind for cls, kind in known.items() if isinstance(error, cls)), "fails")
    return Verdict(kind, f"raises {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def minimal(program: Program) -> Program:
    """The program without the steps and results that its failure does not need."""
    fault = _fault(program)
    while smaller := next((p for p in _smaller(program) if _fault(p) == fault), None):
        program = smaller
    return program


def _fault(program: Program) -> tuple[str, ...]:
    try:
        found = verdict(program)
    except Exception as error:
        return ("fails", str(error))
    return found.kind, *re.sub(r"\d+", "", found.why).split(":")[:2]


def _smaller(program: Program) -> Iterator[Program]:
    replace, steps, returned = dataclasses.replace, program.steps, program.returned
    for i, step in enumerate(steps):
        rest = steps[:i] + steps[i + 1 :]
        if not any(re.search(rf"\b{n}\b", " ".join([*(o.text for o in rest), *returned])) for n in step.makes):
            yield replace(program, steps=rest)
    for i in range(len(returned) if len(returned) > 1 else 0):
        yield replace(program, returned=returned[:i] + returned[i + 1 :])
    for i, step in enumerate(steps):
        if step.mode:
            yield replace(program, steps=(*steps[:i], replace(step, mode=""), *steps[i + 1 :]))
    for simpler in ("plain", "leaf", "leaf_and_plain", "two_leaves", "derived"):
        if simpler != program.inputs and list(INPUTS).index(simpler) < list(INPUTS).index(program.inputs):
            yield replace(program, inputs=simpler)


def run_all(programs: Iterable[Program]) -> tuple[collections.Counter, list[tuple[Program, Verdict]]]:
    """How many programs are of each kind, and those that are not right."""
    counts, others = collections.Counter(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program in programs:
            found = verdict(program)
            counts[found.kind] += 1
            if found.kind != "right":
                others.append((program, found))
    return counts, others


def main(argv: list[str] | None = None) -> int:
    """Run programs, print those that are wrong and why others were refused; 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draw", type=int, metavar="N", default=100, help="N random programs")
    parser.add_argument("--seed", type=int, default=0, help="of the random programs")
    parser.add_argument("--show", type=int, default=10, help="print so many wrong programs, as small as they get")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    counts, others = run_all(drawn_program(options.seed, n) for n in range(options.draw))
    wrong = [(program, found.why) for program, found in others if found.kind in ("wrong", "fails")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program, why in wrong[: options.show]:
            small = minimal(program)
            print(f"# {why}\n# {verdict(small).why}\n{small.source.partition(NET)[2]}\n")
    refused = collections.Counter(found.why for _, found in others if found.kind.startswith("refused"))
    for why, count in refused.most_common():
        print(f"{count:6} {why}")
    print(", ".join(f"{counts[kind]} {kind}" for kind in KINDS), f"of {counts.total()}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
