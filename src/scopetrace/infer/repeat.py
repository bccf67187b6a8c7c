"""What ops give for fake tensors: the first time by running them, then for arguments of equal metadata by recipe.

The recorder's idea (`record.results`), for the ops that passes make. Recipes live as long as one pass, so that the
settings of the process which results depend on (grad mode, default dtype, autocast) are the same for all.
"""

from __future__ import annotations

from typing import Any

import torch

from scopetrace._compat.tensors import FakeMaker, run_fake, without_dispatch
from scopetrace.infer import results, rules
from scopetrace.ir.tape import Value

_Overload = type(torch.ops.aten.add.Tensor)  # beside these, passes put higher-order ops and torch functions
_ATOMS = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format},
)


class FakeRuns:
    """Runs ops on the fakes of values, or makes again what an equal run gave."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._maker = FakeMaker(mode)
        self._keys = results.Keys()
        self._recipes: dict[Any, results.Recipe] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What `func` returns, its tensors fake. Raises what the op raises."""
        inputs: list[Value] = []
        key: list[Any] = [func]
        known = self._describe((args, kwargs), inputs, key) and _can_repeat(func)
        recipe = self._recipes.get(tuple(key)) if known else None
        if known and recipe is None:
            with torch.no_grad():  # as `run_fake` has it: the emitter says what requires grad
                recipe = rules.predict(self._maker, self._keys, func, args, kwargs, inputs)
            if recipe is not None:
                self._recipes[tuple(key)] = recipe
        if recipe is not None:
            return self._make(recipe, inputs)
        out = run_fake(self._mode, func, _fakes(args), _fakes(kwargs))
        if known:
            self._learn(tuple(key), inputs, out)
        return out

    def like(self, fake: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the same metadata in memory of its own."""
        with without_dispatch(), torch.no_grad():
            return self._maker.fresh(fake.size(), fake.stride(), fake.dtype, fake.device, False)

    def _learn(self, key: Any, inputs: list[Value], out: Any) -> None:
        recipe = results.learn(self._keys, inputs, out)
        if recipe is None:
            return
        if len(inputs) > 1 and not all(isinstance(part, results.Fresh) for part in recipe[1]):
            return  # which of the inputs it shares memory with is not said by their metadata
        self._recipes[key] = recipe

    def _make(self, recipe: results.Recipe, inputs: list[Value]) -> Any:
        container, parts = recipe
        with without_dispatch():
            made = [part.make(self._maker, [v.fake for v in inputs]) for part in parts]
        return made[0] if container is None else container(made)

    def _describe(self, x: Any, inputs: list[Value], key: list[Any]) -> bool:
        """Put the metadata of an argument into `key`, its values into `inputs`; False for what has no key."""
        kind = type(x)
        key.append(kind)  # 1, 1.0 and True are equal
        if kind is Value:
            inputs.append(x)
            number = self._keys.of(x.fake)
            key.append(number)
            return number is not None
        if kind in _ATOMS:
            key.append(x)
            return True
        if kind is dict:
            key += x
            return self._describe(tuple(x.values()), inputs, key)
        if kind is list or kind is tuple:
            key.append(len(x))
            return all([self._describe(item, inputs, key) for item in x])
        return False


def _can_repeat(func: Any) -> bool:
    return isinstance(func, _Overload) and results.can_repeat(func, func.tags)


def _fakes(x: Any) -> Any:
    if isinstance(x, Value):
        return x.fake
    if isinstance(x, (list, tuple)):
        return type(x)([_fakes(item) for item in x])
    if isinstance(x, dict):
        return {name: _fakes(item) for name, item in x.items()}
    return x
