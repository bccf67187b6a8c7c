"""What torch.compile makes of a callable object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CompiledApart:
    """A callable object in place of which torch.compile takes a function that calls `call`.

    All callable objects of a process share one code object under torch.compile, which it compiles eight times at most.
    The function has a code object of its own.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        forward.__code__ = forward.__code__.replace()
        self.__dict__.update(_torchdynamo_orig_callable=forward, _torchdynamo_wrapper_id=id(self))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_torchdynamo")}
