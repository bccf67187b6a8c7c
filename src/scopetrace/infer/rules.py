"""How to make the results of the commonest ops without asking torch's rules for symbolic sizes, or any.

torch has shape rules in C++ for plain numbers. For symbolic ones it takes most ops apart in Python, which costs 10 to
50 times as much. `size_rules` and `view_rules` say for some ops what sizes the result has, as expressions. All else
(dtype, device, order of the dimensions in memory, errors) comes from torch's own rule for the sizes of the example: the
op is run on stand-ins of these. Where a rule is not sure, torch's way for symbolic sizes is taken.

Data flow: op + tape values -> sizes by rule, result on stand-ins -> `results.Recipe`, or None for "ask torch"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from scopetrace._compat.symbols import example, surely_equal, to_expr
from scopetrace._compat.tensors import FakeMaker, FakeTensor, is_symbolic, run_fake, storage_id, without_dispatch
from scopetrace.infer.layouts import Sizes, dense_strides, gapless_strides, keeps_order, view_strides
from scopetrace.infer.results import Fresh, Keys, Recipe, Same, View
from scopetrace.infer.row_major import known, writes_plainly
from scopetrace.infer.size_rules import COPY_OR_VIEW, broadcast, rule_of
from scopetrace.infer.view_rules import VIEWS
from scopetrace.ir.tape import Value, flat


def predict(factory: FakeMaker, keys: Keys, func: Any, args: Any, kwargs: Any, inputs: list[Value]) -> Recipe | None:
    """How to make the result of an op that was not met before, or None where torch has to say."""
    sure = known(func, args, kwargs, inputs)
    if sure is not None:
        return _with_keys(keys, None, [sure], inputs)
    if func in VIEWS:
        seen = _predict_view(keys, VIEWS[func], args, kwargs, inputs)
        if seen is not None or func not in COPY_OR_VIEW:
            return seen
    if not any(is_symbolic(v.fake) for v in inputs) and not _has_symbols(args):
        return None
    return _by_rule(factory, keys, func, args, kwargs, inputs)


def _by_rule(factory: FakeMaker, keys: Keys, func: Any, args: Any, kwargs: Any, inputs: list[Value]) -> Recipe | None:
    rule = rule_of(func)
    if rule is None or not all(type(v.fake) is FakeTensor and keeps_order(v.fake) for v in inputs):
        return None
    said = rule(*args, **kwargs)
    if said is None:
        return None
    stand_ins = {id(v): _stand_in(factory, v.fake) for v in inputs}
    out = _on_stand_ins(factory, func, args, kwargs, stand_ins)
    grad = torch.is_grad_enabled() and any(v.fake.requires_grad for v in inputs)
    bases = [stand_ins[id(v)] for v in inputs]
    if type(out) is FakeTensor:
        recipe = _recipe(func, out, said, grad, bases, inputs)
        return None if recipe is None else _with_keys(keys, None, [recipe], inputs)
    if type(out) not in (tuple, list) or any(type(t) is not FakeTensor for t in out):
        return None
    if len(out) != len(said) or not all(isinstance(sizes, (list, tuple)) for sizes in said):
        return None
    recipes = [_recipe(func, t, sizes, grad, bases, inputs) for t, sizes in zip(out, said, strict=True)]
    if not all(isinstance(r, Fresh) for r in recipes) or len({storage_id(t) for t in out}) < len(out):
        return None
    return _with_keys(keys, type(out), recipes, inputs)


def changes_only_values(factory: FakeMaker, func: Any, args: Any, kwargs: Any, inputs: list[Value]) -> bool:
    """Whether an op that writes its first argument in place, element by element, leaves its sizes as they are.

    The first argument shares memory with no other one.
    """
    fakes = [v.fake for v in inputs]
    if any(v.key is None for v in inputs):
        return False
    if writes_plainly(func, args, kwargs, inputs):
        return True
    target = args[0]
    size = broadcast([t.size() for t in fakes])
    if size is None or len(size) != target.fake.dim() or not all(map(surely_equal, size, target.fake.size())):
        return False
    stand_ins = {id(v): _stand_in(factory, v.fake) for v in inputs}
    return _on_stand_ins(factory, func, args, kwargs, stand_ins) is stand_ins[id(args[0])]


def _on_stand_ins(factory: FakeMaker, func: Any, args: Any, kwargs: Any, stand_ins: dict[int, torch.Tensor]) -> Any:
    """What the op returns for the sizes of the example; None where it raises."""
    try:
        return run_fake(factory.mode, func, _with_examples(args, stand_ins), _with_examples(kwargs, stand_ins))
    except Exception:  # torch's own way raises it, with symbols in its words
        return None


def _has_symbols(args: Any) -> bool:
    return any(isinstance(a, torch.SymInt) for a in flat(args))


def _predict_view(keys: Keys, rule: Callable[..., Any], args: Any, kwargs: Any, inputs: list[Value]) -> Recipe | None:
    if kwargs or len(inputs) != 1 or type(inputs[0].fake) is not FakeTensor:
        return None
    base = inputs[0].fake
    found = rule(base, *args[1:]) if 0 not in to_expr(base.size()) else None
    if found is None:
        return None
    several = isinstance(found, list)
    recipes = [
        View(0, tuple(size), tuple(stride), offset, base.device, base.requires_grad, 0)  # under no_grad, too
        for size, stride, offset in (found if several else [found])
    ]
    return _with_keys(keys, list if several else None, recipes, inputs)


def _with_keys(keys: Keys, container: type | None, recipes: Sequence[Any], inputs: list[Value]) -> Recipe | None:
    found: list[Fresh | View | Same] = []
    for recipe in recipes:
        if not isinstance(recipe, Same):
            key = keys.of_recipe(recipe, [v.fake for v in inputs])
            if key is None:
                return None
            recipe = recipe._replace(key=key)
        found.append(recipe)
    return container, tuple(found)


def _recipe(
    func: Any, out: torch.Tensor, said: Sizes, grad: bool, stand_ins: list[torch.Tensor], inputs: list[Value]
) -> Fresh | View | Same | None:
    """How to make a result like `out`, which came out for the sizes of the example, of the sizes that a rule said."""
    if out.dim() != len(said):
        return None
    size = tuple(there if n is None else n for n, there in zip(said, out.size(), strict=True))
    if list(out.size()) != [example(n) for n in size]:
        return None
    grad = grad and (out.dtype.is_floating_point or out.dtype.is_complex)
    for i, t in enumerate(stand_ins):
        if t is out:
            return None if func in COPY_OR_VIEW and gapless_strides(inputs[i].fake) is None else Same(i)
        if storage_id(t) == storage_id(out):
            return _seen_again(func, i, inputs[i].fake, out, size)
    stride = dense_strides(size, out)
    if stride is None or out.storage_offset() != 0:
        return None
    if (
        func in COPY_OR_VIEW
        and gapless_strides(inputs[0].fake) is None
        and view_strides(inputs[0].fake, size) is not False
    ):
        return None  # it may be a view at other sizes
    return Fresh(size, tuple(stride), out.dtype, out.device, grad, 0, math.prod(size) * out.dtype.itemsize)


def _seen_again(func: Any, i: int, base: torch.Tensor, out: torch.Tensor, size: Sizes) -> View | None:
    stride = view_strides(base, size) if func in COPY_OR_VIEW and base.dtype == out.dtype else None
    if not stride or [example(n) for n in stride] != list(out.stride()):
        return None
    return View(i, tuple(size), tuple(stride), 0, out.device, base.requires_grad, 0)


def _stand_in(factory: FakeMaker, t: torch.Tensor) -> torch.Tensor:
    """The same tensor with the sizes of the example, in memory of its own."""
    size, stride = ([example(n) for n in numbers] for numbers in (t.size(), t.stride()))
    with without_dispatch(), torch.no_grad():
        return factory.fresh(size, stride, t.dtype, t.device, t.requires_grad)


def _with_examples(x: Any, stand_ins: dict[int, torch.Tensor]) -> Any:
    if isinstance(x, Value):
        return stand_ins[id(x)]
    if isinstance(x, torch.SymInt):
        return example(x)
    if isinstance(x, (list, tuple)):
        return type(x)([_with_examples(item, stand_ins) for item in x])
    if isinstance(x, dict):
        return {name: _with_examples(item, stand_ins) for name, item in x.items()}
    return x
