"""What two runs gave, compared: values, types, layout, and which tensors share memory or are one object.

Data flow:
    a run -> `Outcome`: results, arguments and state after it, and what the tensors of the result share memory with
    two of them -> their differences in words, or what was compared
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from scopetrace._compat.tensors import default_tolerances, storage_id
from scopetrace.containers.structure import leaves_with_path, tensor_holders

_PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, range, torch.dtype, torch.device, torch.layout)
"""Classes whose values are compared. Objects of others are copies in each run, which may be equal to nothing."""


@dataclasses.dataclass
class Outcome:
    """What a run of a model or a trace gave."""

    result: Any
    arguments: Any
    """(args, kwargs) after the run."""
    state: Mapping[str, torch.Tensor | None]
    """Copies of the tensors of the model, and of gradients, after the run."""
    memory: dict[str, list[str]]
    """By the path of a tensor in the result, the arguments, tensors of the model and other results that share memory
    with it, and where."""

    def parts(self) -> dict[str, Any]:
        """By name, what is compared."""
        return {"result": self.result, "arguments": self.arguments, "the model": self.state}


def memory_of(result: Any, known: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """See `Outcome.memory`. `known` are tensors of before the run."""
    outputs = dict(tensors_of("result", result))
    others = [*known.items(), *outputs.items()]
    return {
        path: [word for name, other in others if name != path for word in _relation(t, name, other)]
        for path, t in outputs.items()
    }


def tensors_of(name: str, x: Any) -> Iterator[tuple[str, torch.Tensor]]:
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
    parts = actual.parts()
    for name, old in expected.parts().items():
        yield from _differences(name, old, parts[name])
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
