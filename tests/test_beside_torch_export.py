"""What is asked of an ExportedProgram, of torch.export's and of ours: the table of docs/export.md."""

import copy
import io

import pytest
import torch
from torch import nn

import scopetrace as st


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(4))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.constant = torch.ones(4)

    def forward(self, x, *, scale=2.0):
        self.steps.add_(1)
        return self.fc(x) * scale + self.scratch + self.constant


X = torch.randn(3, 4)


@pytest.fixture(scope="module")
def programs():
    theirs = torch.export.export(Net(), (X,), {"scale": 2.0})
    return theirs, st.trace(Net(), (X,), {"scale": 2.0}).to_exported_program()


class Unchanged(torch.export.FlatArgsAdapter):
    def adapt(self, target_spec, input_spec, input_args, *args, **kwargs):
        return input_args


def saved(program):
    file, files = io.BytesIO(), {"a": ""}
    torch.export.save(program, file, extra_files={"a": "1"})
    file.seek(0)
    loaded = torch.export.load(file, extra_files=files)
    return files, loaded.dialect, loaded.module()(X, scale=2.0).shape


def steps(program):
    module = program.module()
    module(X, scale=2.0)
    return module.steps.tolist()


QUESTIONS = {
    "buffers": lambda p: [name for name, _ in p.named_buffers()],
    "parameters": lambda p: [name for name, _ in p.named_parameters()],
    "constants": lambda p: (sorted(p.constants), sorted(p.tensor_constants)),
    "state_dict": lambda p: list(p.state_dict),
    "call_spec": lambda p: str(p.call_spec),
    "dialect": lambda p: (p.dialect, p.verifier, p.run_decompositions({}).dialect),
    "validate": lambda p: p.validate(),
    "range_constraints": lambda p: p.range_constraints,
    "inputs": lambda p: [(s.kind, s.target, s.persistent) for s in p.graph_signature.input_specs],
    "placeholders": lambda p: [node.name for node in p.graph.find_nodes(op="placeholder")],
    "module_call_graph": lambda p: [(entry.fqn, entry.signature is not None) for entry in p.module_call_graph],
    "nn_module_stack": lambda p: [n.meta["nn_module_stack"] for n in p.graph.nodes if n.op == "call_function"],
    "module()": lambda p: (steps(p), list(p.module().state_dict())),
    "check_guards=False": lambda p: p.module(check_guards=False)(X, scale=2.0).shape,
    "eval": lambda p: p.module().eval(),
    "train": lambda p: p.module().train(),
    "another number": lambda p: p.module()(X, scale=3.0),
    "a missing argument": lambda p: p.module()(X),
    "another size": lambda p: p.module()(torch.randn(5, 4), scale=2.0),
    "a call of the program": lambda p: p(X),
    "save and load": saved,
    "deepcopy": lambda p: copy.deepcopy(p).module()(X, scale=2.0).shape,
    "unflatten": lambda p: [name for name, _ in torch.export.unflatten(p).named_modules()],
    "flat_args_adapter": lambda p: torch.export.unflatten(p, Unchanged())(X, scale=2.0).shape,
    "export again": lambda p: torch.export.export(p.module(), (X,), {"scale": 2.0}).dialect,
    "compile": lambda p: torch.compile(p.module(), backend="eager", fullgraph=True)(X, scale=2.0).shape,
}


def answer(question, program):
    try:
        return question(program)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", QUESTIONS)
def test_answers_are_those_of_torch_export(programs, name):
    theirs, ours = (answer(QUESTIONS[name], program) for program in programs)
    assert ours == theirs
