"""The rules of the source tree, read off its syntax: who may import whom, and what a file owes its reader."""

import ast
import functools
import warnings
from collections.abc import Container, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

# The rooms of src/scopetrace with what each is for, ground floor first. A module imports from its own room, without
# cycles, and from those before it. Imports in functions and for type checking count.
LAYERS = {
    "errors": "one exception class for each kind of mistake",
    "formatting": "aligned columns, quantities and objects as text",
    "sources": "where the Python files of torch and of this package are, and who asks",
    "interrupts": "signals that wait while programs are built",
    "_compat": "all private torch, one file for each concern",
    "containers": "arguments and results as trees: pytree, dataclasses, objects that hold tensors",
    "ir": "the program as data: values, ops, calls, scopes, tapes, write-back",
    "guards": "what of Python a forward may reach, and what it reads of modules",
    "ops": "what torch's ops are: schema facts, functional variants, view inverses, higher-order forms",
    "files": "traces as files: a zip archive of JSON and tensors",
    "infer": "the result of an op without running it",
    "record": "running the callable: ops, values, module calls",
    "watch": "what a forward asks of torch, reads and changes of Python, and what that means for calls",
    "autograd": "what training steps need, by torch's own engine: backward, checkpoints, hooks, optimizers",
    "session": "one recording, put together: RecordedTape",
    "functionalization": "no op writes: FunctionalTape and the write-back beside it",
    "outline": "module calls as calls of shared functions",
    "program": "TracedProgram: tape, fx lowering, node.meta, calls, boundary of a call, lint, check",
    "torch_level": "a torch-level GraphModule made functional",
    "lower": "ExportedProgram and ONNX",
    "order": "in which order modules run and parameters are used",
    "view": "text, summaries, pictures, pages, differences",
    "api": "what people hold: Trace, OutlinedProgram, Functionalized, load",
    "distributed": "FSDP2 plans and pipeline stages",
    "cli": "the command line",
    "__init__": "the public names",
    "integrations": "scopetrace in pytest, Lightning and transformers, by its public names alone",
    "__main__": "python -m scopetrace",
}

# The one layer that may name torch's private parts; what counts as private beside a leading underscore; and what does
# not count: the ecosystem's pytree, and op names such as torch.ops.aten._to_copy.
PRIVATE_LAYER = "_compat"
PRIVATE_MODULES = ("torch.fx.experimental",)
NOT_PRIVATE = ("torch.utils._pytree", "torch.ops")

# Private attributes of torch's classes, which a class of ours may have too; and what is private by its name only.
TORCH_ATTRIBUTES = set(
    """
    _backward_hooks _backward_pre_hooks _base _buffers _c _call_impl _can_decompose _cdata _check_input_dim
    _check_scale_growth_tracker _compiled_call_impl _debug_flush_compilation_cache _erased _examples _expr
    _forward_hooks _forward_pre_hooks _get_dispatch _get_method _get_name _get_user_frame _has_symbolic_sizes_strides
    _init_group _is_better _is_python_assert _is_view _lazy_init_scale_growth_tracker _make_subclass _maybe_opt_step
    _method_names _modules _name_template _named_members _non_persistent_buffers_set _op_dk _optimizer_step_post_hooks
    _optimizer_step_pre_hooks _overloadname _parameters _per_optimizer_states _post_accumulate_grad_hooks
    _real_recompile _resolve_unbacked_binding _schema _schema_check_mode _set_replacement _suppress_guards_tls
    _update_args_kwargs _update_version_counter _version
    """.split()  # noqa: SIM905
)
PUBLIC_ATTRIBUTES = {"_asdict", "_fields", "_getframe", "_replace"}

MAX_LINES = 600  # more is a warning: walls follow ideas, and a long file often has two
SOURCE = Path(__file__).parents[1] / "src" / "scopetrace"

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Module:
    """One source file: its path under src/scopetrace, its dotted name and its syntax tree."""

    def __init__(self, path: str, source: str) -> None:
        parts = ("scopetrace", *Path(path).with_suffix("").parts)
        self.path = path
        self.source = source
        self.tree = ast.parse(source, path)
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.layer = parts[1]

    def problem(self, line: int, text: str) -> str:
        return f"src/scopetrace/{self.path}:{line}: {text}"


@functools.cache
def read_tree(root: Path) -> list[Module]:
    return [Module(path.relative_to(root).as_posix(), path.read_text()) for path in sorted(root.rglob("*.py"))]


# Imports -------------------------------------------------------------------------------------------------------------


def imported_names(module: Module, node: ast.AST) -> Iterator[tuple[str, str]]:
    """(local name, absolute dotted name) of everything that an import statement brings in."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], alias.name
    elif isinstance(node, ast.ImportFrom):
        base = absolute_base(module, node)
        for alias in node.names:
            yield alias.asname or alias.name, f"{base}.{alias.name}"


def absolute_base(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parents = module.name.split(".")
    kept = parents[: len(parents) - node.level + module.is_package]
    return ".".join([*kept, node.module] if node.module else kept)


def own_imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of what a module imports from scopetrace: at the top, in a function, for types only."""
    for node in ast.walk(module.tree):
        for _, name in imported_names(module, node):
            if name.split(".")[0] == "scopetrace":
                yield node.lineno, name


def layer_of(name: str) -> str:
    """The layer of a dotted name; scopetrace.VERSION, which is no module, belongs to __init__."""
    top = name.split(".")[1:2]
    return top[0] if top and top[0] in LAYERS else "__init__"


def unknown_modules(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        if module.layer not in LAYERS:
            yield module.problem(1, f"{module.layer!r} has no layer: add it to LAYERS in tests/test_layers.py")


def empty_rooms(modules: list[Module]) -> Iterator[str]:
    for layer in LAYERS.keys() - {module.layer for module in modules}:
        yield f"LAYERS in tests/test_layers.py has {layer!r}, which is not there"


def upward_imports(modules: list[Module]) -> Iterator[str]:
    rank = {layer: position for position, layer in enumerate(LAYERS)}
    for module in modules:
        for line, name in own_imports(module):
            target = layer_of(name)
            if rank[target] > rank.get(module.layer, len(LAYERS)):
                yield module.problem(line, f"{module.layer} imports {name}, of the higher layer {target}")


def inner_imports(modules: list[Module]) -> Iterator[str]:
    """What is for other tools is made of what users have."""
    for module in modules:
        for line, name in own_imports(module) if module.layer == "integrations" else ():
            if layer_of(name) not in ("__init__", "errors", "integrations"):
                yield module.problem(line, f"{name} is not public: write `import scopetrace as st`")


def import_cycles(modules: list[Module]) -> Iterator[str]:
    """Cycles inside a layer; upward_imports leaves no other."""
    layers = {module.name: module.layer for module in modules}
    graph: dict[str, set[str]] = {name: set() for name in layers}
    for module in modules:
        targets = {owner(name, layers) for _, name in own_imports(module)} - {module.name}
        graph[module.name] = {target for target in targets if layers.get(target) == module.layer}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield "modules import each other: " + " -> ".join(reversed(error.args[1]))


def owner(name: str, modules: Container[str]) -> str:
    """The module that a dotted name is in: the longest prefix that is one."""
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name


# Private torch names -------------------------------------------------------------------------------------------------


def private_part(name: str) -> str | None:
    """The first private prefix of a dotted torch name: torch._C of torch._C._nn.gelu."""
    parts = name.split(".")
    prefixes = [".".join(parts[: end + 1]) for end in range(len(parts))]
    if parts[0] != "torch" or any(prefix in NOT_PRIVATE for prefix in prefixes):
        return None
    return next((p for p in prefixes if p in PRIVATE_MODULES or is_private(p.rpartition(".")[2])), None)


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.endswith("__")


def dotted(node: ast.AST, local_names: dict[str, str]) -> str | None:
    """The absolute name of an attribute chain such as fx.Node.meta, where fx is torch.fx."""
    if isinstance(node, ast.Name):
        return local_names.get(node.id)
    base = dotted(node.value, local_names) if isinstance(node, ast.Attribute) else None
    return base and f"{base}.{node.attr}"


def torch_names(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import from torch and every attribute chain that starts at one."""
    local_names = {}
    for node in ast.walk(module.tree):
        for local, name in imported_names(module, node):
            yield node.lineno, name
            # `import torch.fx` binds torch; with `as`, or from `from`, the local name is the whole.
            plain = isinstance(node, ast.Import) and local == name.partition(".")[0]
            local_names[local] = local if plain else name
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node, local_names)):
            yield node.lineno, name


def private_torch(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        if module.layer != PRIVATE_LAYER:
            found = {(line, part) for line, name in torch_names(module) if (part := private_part(name))}
            for line, part in sorted(found):
                yield module.problem(line, f"{part} is private to torch: reach it through scopetrace.{PRIVATE_LAYER}")


def private_attributes(modules: list[Module]) -> Iterator[str]:
    """Private attributes are read on `self`, or on objects of a class in the same file; ops may be private."""
    for module in modules:
        if module.layer == PRIVATE_LAYER:
            continue
        local_names = dict(aliases(module))
        own = set(own_attributes(module)) - TORCH_ATTRIBUTES
        for node in ast.walk(module.tree):
            for base, name in private_reads(node):
                is_op = (dotted(base, local_names) or "").startswith("torch.ops.")
                is_self = ast.unparse(base) in ("self", "cls", "super()")
                if not (is_op or is_self or name in own or name in PUBLIC_ATTRIBUTES):
                    where = f"reach it through scopetrace.{PRIVATE_LAYER}, if torch's, or make it public"
                    yield module.problem(node.lineno, f"{ast.unparse(base)}.{name} is private: {where}")


def aliases(module: Module) -> Iterator[tuple[str, str]]:
    """(local name, dotted name) of imports, and of assignments such as `_aten = torch.ops.aten`."""
    known = {}
    for node in ast.walk(module.tree):
        for local, name in imported_names(module, node):
            known[local] = local if isinstance(node, ast.Import) and local == name.partition(".")[0] else name
    yield from known.items()
    for node in module.tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and (name := dotted(node.value, known))
        ):
            yield node.targets[0].id, name


def own_attributes(module: Module) -> Iterator[str]:
    """What the classes of a file define, in their bodies and on `self`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            yield from (ast.unparse(target) for item in node.body for target in targets(item))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def targets(item: ast.stmt) -> list[ast.expr]:
    """What a statement of a class body defines."""
    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
        return [ast.Name(item.name)]
    return item.targets if isinstance(item, ast.Assign) else [item.target] if isinstance(item, ast.AnnAssign) else []


def private_reads(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """(object, name) of a private attribute: `x._name`, `getattr(x, "_name")`."""
    if isinstance(node, ast.Attribute) and is_private(node.attr):
        yield node.value, node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
        if is_private(name):
            yield node.args[0], name


# What a file owes its reader -----------------------------------------------------------------------------------------


def long_files(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        lines = len(module.source.splitlines())
        if lines > MAX_LINES:
            yield module.problem(lines, f"{lines} lines, more than {MAX_LINES}: is it one idea?")


def definitions(node: ast.AST, owner: str = "") -> Iterator[tuple[str, Definition]]:
    """Public classes and functions with their qualified names; nothing inside functions or private classes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition):
            yield from definitions(child, owner)
        elif not child.name.startswith("_"):
            yield owner + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, f"{owner}{child.name}.")


def shares_docstring(node: Definition) -> bool:
    """Overloads and property setters: the docstring is at the function or getter that they belong to."""
    tails = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return bool(tails & {"overload", "setter", "deleter"})


def overriding(tree: ast.Module) -> set[str]:
    """The qualified names of methods of a base class in the same file: the docstring is at that of the base."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    methods = {name: {m.name for m in node.body if isinstance(m, ast.FunctionDef)} for name, node in classes.items()}
    bases = {name: [ast.unparse(base).partition("[")[0] for base in node.bases] for name, node in classes.items()}
    return {f"{name}.{m}" for name in classes for base in bases[name] for m in methods[name] & methods.get(base, set())}


def undocumented(modules: list[Module]) -> Iterator[str]:
    for module in modules:
        inherited = overriding(module.tree)
        for name, node in definitions(module.tree):
            if not ast.get_docstring(node) and not shares_docstring(node) and name not in inherited:
                yield module.problem(node.lineno, f"{name} has no docstring")


# Tests ---------------------------------------------------------------------------------------------------------------

RULES = (unknown_modules, upward_imports, inner_imports, import_cycles, private_torch, private_attributes, undocumented)


@pytest.fixture(scope="module")
def modules():
    return read_tree(SOURCE)


@pytest.mark.parametrize("rule", [*RULES, empty_rooms], ids=lambda rule: rule.__name__)
def test_the_source_tree_keeps_the_rule(rule, modules):
    problems = list(rule(modules))
    assert not problems, "\n" + "\n".join(problems)


def test_long_files_are_named(modules):
    for problem in long_files(modules):
        warnings.warn(problem, stacklevel=1)


def check(rule, files):
    return list(rule([Module(path, source) for path, source in files.items()]))


BROKEN = [
    (unknown_modules, {"helpers.py": ""}, "add it to LAYERS"),
    (unknown_modules, {"helpers/__init__.py": ""}, "add it to LAYERS"),
    (upward_imports, {"ir/scopes.py": "import scopetrace.api.trace"}, "higher layer api"),
    (upward_imports, {"ir/scopes.py": "from scopetrace.api.trace import Trace"}, "higher layer api"),
    (upward_imports, {"ir/scopes.py": "from scopetrace import api"}, "higher layer api"),
    (upward_imports, {"errors.py": "from . import api"}, "higher layer api"),
    (upward_imports, {"errors.py": "from .lower.onnx import export"}, "higher layer lower"),
    (upward_imports, {"ir/tape.py": "from ..lower import onnx"}, "higher layer lower"),
    (upward_imports, {"record/__init__.py": "from ..lower import onnx"}, "higher layer lower"),
    (upward_imports, {"view/text.py": "from scopetrace import __version__"}, "higher layer __init__"),
    (upward_imports, {"view/text.py": "import scopetrace as st"}, "higher layer __init__"),
    (upward_imports, {"errors.py": "def f():\n    from scopetrace import cli"}, "errors.py:2"),
    (upward_imports, {"errors.py": "if TYPE_CHECKING:\n    from . import cli"}, "errors.py:2"),
    (inner_imports, {"integrations/a.py": "def f():\n    from scopetrace.api.trace import Trace"}, "a.py:2"),
    (import_cycles, {"record/a.py": "from .b import x", "record/b.py": "from scopetrace.record import a"}, "record.b"),
    (import_cycles, {"record/__init__.py": "from .a import x", "record/a.py": "from scopetrace.record import y"}, "a"),
    (private_torch, {"trace.py": "import torch._C"}, "torch._C is private"),
    (private_torch, {"trace.py": "import torch._dynamo.config as c"}, "torch._dynamo is private"),
    (private_torch, {"trace.py": "from torch import _ops"}, "torch._ops is private"),
    (private_torch, {"trace.py": "from torch._subclasses import FakeTensor"}, "torch._subclasses is private"),
    (private_torch, {"trace.py": "from torch.utils import _python_dispatch"}, "torch.utils._python_dispatch"),
    (private_torch, {"trace.py": "from torch.fx.experimental import proxy_tensor"}, "torch.fx.experimental"),
    (private_torch, {"trace.py": "import torch\nx = torch._C._nn.gelu"}, "trace.py:2: torch._C is private"),
    (private_torch, {"trace.py": "from torch import fx as f\nx = f.experimental"}, "trace.py:2: torch.fx.experimental"),
    (private_torch, {"trace.py": "from torch import nn\nnn.Module._call_impl = 1"}, "torch.nn.Module._call_impl"),
    (empty_rooms, {f"{layer}.py": "" for layer in LAYERS if layer != "view"}, "'view', which is not there"),
    (private_attributes, {"trace.py": "def f(op): return op._schema"}, "op._schema is private"),
    (private_attributes, {"trace.py": "x = getattr(op, '_schema', None)"}, "op._schema is private"),
    (private_attributes, {"trace.py": "def f(t): return t.untyped_storage()._cdata"}, "t.untyped_storage()._cdata"),
    (private_attributes, {"trace.py": "class A:\n    def f(self, t): self._version = t._version"}, "t._version"),
    (private_attributes, {"trace.py": "from .tape import Tape\nx = Tape()._ops"}, "Tape()._ops is private"),
    (long_files, {"trace.py": "x = 1\n" * (MAX_LINES + 1)}, "is it one idea?"),
    (undocumented, {"trace.py": "def f(): ..."}, "f has no docstring"),
    (undocumented, {"trace.py": "async def f(): ..."}, "f has no docstring"),
    (undocumented, {"trace.py": "class A: ..."}, "A has no docstring"),
    (undocumented, {"trace.py": "class A:\n    '''Doc.'''\n    def f(self): ..."}, "A.f has no docstring"),
    (undocumented, {"trace.py": "if X:\n    def f(): ..."}, "f has no docstring"),
]


@pytest.mark.parametrize(("rule", "files", "message"), BROKEN)
def test_a_broken_rule_is_found(rule, files, message):
    problems = check(rule, files)
    assert len(problems) == 1
    assert message in problems[0]


GOOD = {
    "__init__.py": "from scopetrace.api.trace import Trace\nfrom . import errors",
    "integrations/a.py": "import scopetrace as st\nfrom scopetrace.errors import Error\nfrom scopetrace import Trace",
    "__main__.py": "from scopetrace.cli import main",
    "api/trace.py": "from scopetrace.record import A\nfrom .. import record, errors\nimport torch.utils._pytree as p",
    "record/__init__.py": "from .tape import Tape\nfrom ..errors import Error",
    "record/tape.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from scopetrace.ir.scopes import Scope",
    "record/core.py": "from . import tape\nfrom scopetrace.ir.tape import Tape\nimport torch\nx = torch.__file__",
    "program/calls.py": "import torch\nx = torch.ops.aten._to_copy.default\nfrom torch.utils import _pytree",
    "program/graph.py": "@overload\ndef f(): ...\nclass _A:\n    def f(self): ...\ndef _g():\n    def f(): ...",
    "_compat/__init__.py": "from torch._subclasses import FakeTensor\nimport torch\nx = torch._C",
    "errors.py": "x = 1\n" * MAX_LINES,
    "ir/tape.py": "import torch\n_aten = torch.ops.aten\nx = _aten._to_copy\ny = point._replace(x=1)",
    "ir/frames.py": "class _A:\n    def f(self, other): self._x = other._x\n    def _g(self): super()._g()",
}


@pytest.mark.parametrize("rule", [*RULES, long_files], ids=lambda rule: rule.__name__)
def test_what_the_rules_allow(rule):
    assert check(rule, GOOD) == []


# Which tests are fast -------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize(("column", "_"), [("a", 0), ("b", 0), ("c", 1)])
def test_each_row_and_column_of_a_sampled_table_has_fast_cases(request, row, column, _):
    #     a  b  c
    # 0   x     x       x: fast
    # 1      x
    # 2   x     x
    is_fast = request.node.get_closest_marker("slow") is None
    assert is_fast == ((row + "abc".index(column)) % 2 == 0)
