"""Compares inferred results with torch's own, for `SCOPETRACE_CHECK=1`.

    op + tape values + inferred results -> some values for the symbols, the example's first
    each -> torch runs the op on fake tensors of these plain sizes -> metadata of both, which must be equal

So symbolic answers are checked at several sizes, and checking adds no guards to the trace. The stride of a dimension of
size 1, by which no element moves, is not compared: that of torch's fake tensors is not always that of eager.
"""

from __future__ import annotations

from typing import Any

import torch

from scopetrace._compat.symbols import example
from scopetrace._compat.tensors import FakeMaker, run_fake, storage_id
from scopetrace.errors import InferenceError
from scopetrace.infer.assignments import Number, assignments
from scopetrace.infer.rules import instances, replaced
from scopetrace.ir.tape import Value, flat


def compare(
    maker: FakeMaker,
    func: Any,
    args: Any,
    kwargs: Any,
    inputs: list[Value],
    container: type | None,
    tensors: list[torch.Tensor | None],
) -> None:
    """Raises InferenceError where torch's results for the same arguments are not those inferred: `tensors`."""
    fakes = [v.fake for v in inputs]
    for number in assignments(maker, [*fakes, *(t for t in tensors if t is not None)], (args, kwargs)):
        examples = instances(maker, inputs, number)
        try:
            operands = replaced((args, kwargs), examples, number)
            out = run_fake(maker.mode, func, *operands, grad=torch.is_grad_enabled())
        except Exception as error:
            if number is example:
                raise _difference(func, args, kwargs, f"{tensors}", f"{type(error).__name__}: {error}") from error
            continue  # no call has these sizes
        theirs = [out] if isinstance(out, torch.Tensor) else list(out)
        wanted = [None if t is None else _describe(t, [examples[id(v)] for v in inputs], int) for t in theirs]
        inferred = [None if t is None else _describe(t, fakes, number) for t in tensors]
        if inferred != wanted or (None if isinstance(out, torch.Tensor) else type(out)) is not container:
            raise _difference(func, args, kwargs, _text(container, inferred), _text(type(out), wanted))


def _difference(func: Any, args: Any, kwargs: Any, inferred: str, wanted: str) -> InferenceError:
    arguments = ", ".join([str(a.fake) if isinstance(a, Value) else repr(a) for a in flat((args, kwargs))])
    return InferenceError(
        f"the results that scopetrace inferred are not those of torch\n  op: {func}\n  arguments: {arguments}\n"
        f"  inferred: {inferred}\n  torch: {wanted}"
    )


def _text(container: Any, results: list[dict[str, Any] | None]) -> str:
    return f"{getattr(container, '__name__', 'tensor')} of {', '.join(map(str, results))}"


def _describe(t: torch.Tensor, inputs: list[torch.Tensor], number: Number) -> dict[str, Any]:
    """All that a later op, or autograd, sees of a result; `inputs` are those of the op."""
    size = tuple(map(number, t.size()))
    return {
        "kind": type(t).__name__,
        "size": size,
        "stride": tuple([0 if n == 1 else number(s) for n, s in zip(size, t.stride(), strict=True)]),
        "offset": number(t.storage_offset()),
        "nbytes": number(t.untyped_storage().nbytes()),
        "of": (t.dtype, t.device, t.layout),
        "requires_grad": t.requires_grad,
        "bits": (t.is_conj(), t.is_neg()),
        "is_input": [i for i, base in enumerate(inputs) if base is t],
        "shares_memory": [i for i, base in enumerate(inputs) if storage_id(base) == storage_id(t)],
    }
