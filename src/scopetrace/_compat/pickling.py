"""Pickles of what torch cannot pickle: fake tensors by their metadata, ops by their names."""

from __future__ import annotations

import io
import pickle
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.nn.utils import parametrize

from scopetrace._compat.fake import FakeFactory, FakeTensor, without_dispatch
from scopetrace._compat.shape_env import WatchedShapeEnv
from scopetrace._compat.sym_nodes import sym_node


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, OpOverload):
            return _op, (obj._schema.name, obj._overloadname)
        if isinstance(obj, CodeType):
            return Code, (obj.co_filename, obj.co_name)
        if isinstance(obj, HigherOrderOperator):
            return _higher_order_op, (obj._name,)
        if isinstance(obj, FakeTensor):
            return _Fakes.make, (
                tuple(obj.size()),
                tuple(obj.stride()),
                obj.dtype,
                obj.device,
                obj.requires_grad,
            )
        if isinstance(obj, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            node = obj.node
            return _number, (type(obj), node.shape_env, node.expr, node.pytype, node.hint)
        if isinstance(obj, WatchedShapeEnv):
            return _Fakes.environment, (obj.saved(),)
        if isinstance(obj, type) and obj.__module__ == parametrize.__name__ and not hasattr(parametrize, obj.__name__):
            return _parametrized, (obj.__name__, obj.__base__)
        return NotImplemented


class Code(NamedTuple):
    """What is kept of a code object: enough to say where a line is."""

    co_filename: str
    co_name: str


class _Fakes:
    """The fake tensors of one load share a fake mode."""

    factory: FakeFactory | None = None

    @classmethod
    def environment(cls, state: dict[str, Any]) -> WatchedShapeEnv:
        """The symbols of the load."""
        assert cls.factory is not None
        cls.factory.shape_env.restore(state)
        return cls.factory.shape_env

    @classmethod
    def make(cls, size: Any, stride: Any, dtype: Any, device: Any, requires_grad: bool) -> torch.Tensor:
        assert cls.factory is not None
        with without_dispatch(), torch.no_grad():
            return cls.factory.fresh(size, stride, dtype, device, requires_grad)


def _number(kind: type, env: WatchedShapeEnv, expr: Any, pytype: type, hint: Any) -> Any:
    return kind(sym_node(env, expr, pytype, hint))


def _op(name: str, overload: str) -> Any:
    namespace, _, op = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)


def _parametrized(name: str, base: type) -> type:
    """A class as torch makes it for a parametrized module: it is in no module under its name."""
    return type(name, (base,), {"__module__": parametrize.__name__})


def _higher_order_op(name: str) -> Any:
    return getattr(torch.ops.higher_order, name)


def dumps(x: Any) -> bytes:
    """`x` as bytes. Raises pickle.PicklingError for what pickle refuses."""
    file = io.BytesIO()
    _Pickler(file).dump(x)
    return file.getvalue()


def loads(data: bytes) -> Any:
    """What `dumps` was given. As all pickles, to be read only from sources that you trust."""
    outer, _Fakes.factory = _Fakes.factory, FakeFactory()
    try:
        return pickle.loads(data)
    finally:
        _Fakes.factory = outer
