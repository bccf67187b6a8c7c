"""The results of ops on fake tensors: by cache, by rule, else by torch.

    op + tape values -> key: the metadata of the tensors, all other arguments, grad mode, default dtype
    key -> Outputs of the cache | by rule (`rules`) | of what torch gave on fake tensors
    Outputs + tape values -> fake tensors

Equal keys give results of equal metadata, so the second of two equal layers is answered from the cache. torch's own
cache of fake results works below decomposition, where a linear layer is four ops; here it is one. As there, what is
the same in every trace is kept as long as the process lasts: what torch's own ops give for fixed sizes.

With `SCOPETRACE_CHECK=1` each is compared with what torch gives for some values of the symbols, the example's first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from scopetrace._compat.ops import is_op, schema_of
from scopetrace._compat.questions import backend_flags, default_dtype, grad_enabled, inference_mode_enabled
from scopetrace._compat.symbols import example, expanded, has_unbacked, surely_equal, to_expr
from scopetrace._compat.tensors import (
    FakeMaker,
    FakeTensor,
    is_conj_of,
    is_neg_of,
    is_symbolic,
    nbytes_of,
    offset_of,
    requires_grad_of,
    run_fake,
    storage_id,
    stride_of,
    without_dispatch,
)
from scopetrace.errors import InferenceError
from scopetrace.infer import rules
from scopetrace.infer.rules import Identity, Number, OutputMeta, Outputs, assignments, instances, replaced
from scopetrace.ir.tape import Value, checks_enabled, flat, map_argument
from scopetrace.ops import views
from scopetrace.ops.views import VIEW_OPS, Int, view_arguments

_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})

Inferred = tuple[Outputs, list[torch.Tensor | None]]
"""The metadata of the results, and the results."""


@functools.cache
def may_infer(func: Any) -> bool:
    """Whether the results of `func` may come from the cache or a rule: it writes nothing and asks for no data."""
    return not schema_of(func).is_mutable and torch.Tag.data_dependent_output not in func.tags


@functools.cache
def _asks_backends(func: Any) -> bool:
    """Whether the strides that `func` gives may depend on which backends of torch are enabled.

    Of torch's own samples of all ops, with ten settings each, on fake tensors of CPU and CUDA: the first of these do on
    the CPU, and the last two on CUDA where algorithms have to be deterministic. The others are for other backends.
    """
    name = schema_of(func).name
    parts = "scaled_dot_product", "conv", "batch_norm", "lstm", "gru", "rnn_", "pad", "max_pool"
    return any(part in name for part in parts)


class _Cache:
    """Numbers that stand for metadata, and by the key of a call what its results are, in all or below autograd."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.outputs: dict[Any, Outputs] = {}
        self.below_autograd: dict[Any, Outputs] = {}


_of_torch = _Cache()
"""What is the same in every trace: of torch's own ops, and fixed sizes."""
_MANY = 100_000
"""So many results are kept of them."""
_new_number = itertools.count().__next__
"""No number is used twice, by whatever trace."""


class Inference:
    """Gives the results of ops on the fake tensors of one trace. Lives as long as the trace.

    Recording and the passes after it share one object, so that what one has cached the other need not run.
    """

    def __init__(self, maker: FakeMaker) -> None:
        self._maker = maker
        self._of_trace = _Cache()
        if len(_of_torch.outputs) + len(_of_torch.below_autograd) > _MANY:
            for table in vars(_of_torch).values():
                table.clear()
        self._check = checks_enabled()

    def key_of(self, fake: torch.Tensor) -> int | None:
        """A number, equal for tensors with which an op gives results of equal metadata.

        It stands for size, strides, offset, dtype, device, requires_grad, and the bytes of the memory; symbolic numbers
        count by their expressions. None for sizes that depend on data, sparse layouts, conj and neg bits, subclasses.
        """
        if fake.layout is not torch.strided or is_conj_of(fake) or is_neg_of(fake) or type(fake) is not FakeTensor:
            return None
        size, stride, offset, nbytes = fake.size(), stride_of(fake), offset_of(fake), nbytes_of(fake.untyped_storage())
        cache = _of_torch
        if is_symbolic(fake) or type(nbytes) is not int:  # the bytes may be symbolic where the tensor itself is not
            size, stride, offset = to_expr(size), to_expr(stride), to_expr(offset)
            nbytes, cache = expanded(to_expr(nbytes)), self._of_trace  # torch counts bytes in several ways
        facts = (size, stride, offset, fake.dtype, fake.device, requires_grad_of(fake), nbytes)
        number = cache.numbers.get(facts)
        if number is None and not any(has_unbacked(n) for n in (*size, *stride, offset)):
            number = cache.numbers.setdefault(facts, _new_number())
        return number

    def current_key(self, value: Value) -> int | None:
        """As `key_of` of its tensor.

        `value.key` is out of date after `requires_grad_()`, or where a function that makes a tensor got
        `requires_grad=True`: neither is an op.
        """
        is_current = value.key is not None and value.currently_requires_grad is value.requires_grad
        return value.key if is_current else self.key_of(value.fake)

    def run(self, func: Any, args: Any, kwargs: Any, inputs: list[Value]) -> tuple[Inferred | None, Any]:
        """The results without autograd history, made from metadata; or None, and what torch returns, its tensors fake.

        `inputs` are the values among the arguments. Raises what the op raises.
        """
        if grad_enabled():
            with torch.no_grad():
                return self.run(func, args, kwargs, inputs)
        key = self.key_of_call(func, args, kwargs) if is_op(func) and may_infer(func) else None
        inferred = None if key is None else self.infer(key, func, args, kwargs, inputs)
        if inferred is not None:
            return inferred, None
        operands = map_argument(lambda x: x.fake if isinstance(x, Value) else x, (args, kwargs))
        out = run_fake(self._maker.mode, func, *operands)
        if key is not None:  # which is another one where as_strided has made the memory of its argument larger
            key = self.key_of_call(func, args, kwargs)
        if key is not None:
            self.cache_result(key, inputs, out)
            inferred = self.cached(key, func, args, kwargs, inputs)  # as the next op of equal metadata
        return inferred, out

    def key_of_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What stands for all that decides the metadata of the op's results: equal for two calls, these are equal.

        None where the metadata of the arguments does not say it.
        """
        key = [func, grad_enabled(), inference_mode_enabled(), default_dtype()]
        if _asks_backends(func):
            key.append(backend_flags())
        if not self._describe(args, key):
            return None
        if kwargs:
            key += kwargs
            if not self._describe(kwargs.values(), key):
                return None
        return tuple(key)

    def _describe(self, items: Iterable[Any], key: list[Any]) -> bool:
        """Append what the items are to `key`; False where that cannot be said."""
        for x in items:
            kind = type(x)
            key.append(kind)  # 1, 1.0 and True are equal
            if kind is Value:
                number = self.current_key(x)
                if number is None:
                    return False
                key.append(number)
            elif kind in _ATOMS:
                key.append(x)
            elif kind is list or kind is tuple:
                key.append(len(x))
                if not self._describe(x, key):
                    return False
            elif kind is torch.SymInt and not has_unbacked(to_expr(x)):
                key.append(to_expr(x))
            elif kind is not torch.SymFloat or not rules.is_elementwise(key[0]):  # of which no number decides more
                return False
        return True

    def infer(self, key: Any, func: Any, args: Any, kwargs: Any, inputs: list[Value]) -> Inferred | None:
        """The results without running the op, where the cache or a rule has them.

        `key` stands for all that decides the metadata of the results, `inputs` are the values among the arguments.
        With `SCOPETRACE_CHECK=1`, raises InferenceError where torch's own results are others.
        """
        cached = self.cached(key, func, args, kwargs, inputs)
        outputs = self._by_rule(func, args, kwargs, inputs) if cached is None else None
        if outputs is None:
            return cached
        tensors = self._make(outputs, func, args, kwargs, inputs)
        metas = [
            meta._replace(key=self.key_of(t)) if isinstance(meta, OutputMeta) and t is not None else meta
            for meta, t in zip(outputs.tensors, tensors, strict=True)
        ]
        outputs = self._cache_for(key, inputs).outputs[key] = Outputs(outputs.container, tuple(metas))
        return outputs, tensors

    def cached(self, key: Any, func: Any, args: Any, kwargs: Any, inputs: list[Value]) -> Inferred | None:
        """As `infer`, by the cache alone."""
        outputs = _of_torch.outputs.get(key) or self._of_trace.outputs.get(key)
        return None if outputs is None else (outputs, self._make(outputs, func, args, kwargs, inputs))

    def _make(
        self, outputs: Outputs, func: Any, args: Any, kwargs: Any, inputs: list[Value]
    ) -> list[torch.Tensor | None]:
        with without_dispatch():
            tensors = outputs.make(self._maker, inputs)
        if self._check:
            compare(self._maker, func, args, kwargs, inputs, outputs.container, tensors)
        return tensors

    def _by_rule(self, func: Any, args: Any, kwargs: Any, inputs: list[Value]) -> Outputs | None:
        fakes = [v.fake for v in inputs]
        if not fakes or not all(map(rules.is_plain, fakes)):
            return None
        base = fakes[0]
        is_view = func in VIEW_OPS and len(fakes) == 1 and not kwargs
        view = view_arguments(func, base.size(), args[1:]) if is_view else None
        if view is not None:
            return rules.view_of(base, view)
        if not (any(map(is_symbolic, fakes)) or any(isinstance(a, torch.SymInt) for a in flat(args))):
            return None  # torch says all at the same price
        return rules.outputs_by_rule(self._maker, self._of_plain, func, args, kwargs, inputs)

    def _of_plain(self, func: Any, args: Any, kwargs: Any, inputs: list[Value]) -> Outputs | None:
        """What the op gives for plain sizes; None where it raises, or where their metadata does not say it."""
        try:
            inferred, out = self.run(func, args, kwargs, inputs)
        except Exception:  # the run with the tensors themselves raises it for the user
            return None
        return _outputs_of(self, inputs, out) if inferred is None else inferred[0]

    def _cache_for(self, key: Any, inputs: list[Value]) -> _Cache:
        """Where the results of a call are to be kept."""
        is_fact_of_torch = key[0].namespace in ("aten", "prims") and all(part is not torch.SymInt for part in key)
        is_fixed = all(not is_symbolic(v.fake) and type(nbytes_of(v.fake.untyped_storage())) is int for v in inputs)
        return _of_torch if is_fact_of_torch and is_fixed else self._of_trace

    def cache_result(self, key: Any, inputs: list[Value], out: Any) -> None:
        """Keep what torch gave, where its metadata follows from that of the inputs alone."""
        outputs = _outputs_of(self, inputs, out)
        if outputs is not None:
            self._cache_for(key, inputs).outputs[key] = outputs

    def below_autograd(self, func: Any, args: Any, kwargs: Any, inputs: list[Value], run: Callable[[], Any]) -> Any:
        """What `func` gives below autograd, which then makes the history of it: what `run` gave for an equal key.

        Call under no_grad. No result requires grad, also where the op gives a view of what does.
        """
        key = self.key_of_call(func, args, kwargs)
        cached = _of_torch.below_autograd.get(key) or self._of_trace.below_autograd.get(key)
        if cached is None:
            out = run()
            outputs = None if key is None else _outputs_of(self, inputs, out)
            if outputs is not None:
                self._cache_for(key, inputs).below_autograd[key] = outputs
            return out
        if self._check:
            outputs = _outputs_of(self, inputs, run())  # None where arguments are in one memory: it says less then
            assert outputs is None or _without_keys(outputs) == _without_keys(cached), func
        with without_dispatch():
            return cached.contained(cached.make(self._maker, inputs))

    def like(self, fake: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the same size, strides, dtype and device in memory of its own, without gradient."""
        with without_dispatch(), torch.no_grad():
            return self._maker.fresh(fake.size(), fake.stride(), fake.dtype, fake.device, False)


def _without_keys(outputs: Outputs) -> Any:
    """For comparison: a size that was dynamic and got fixed has another number."""
    return outputs.container, [m._replace(key=None) if isinstance(m, OutputMeta) else m for m in outputs.tensors]


def _outputs_of(inference: Inference, inputs: list[Value], out: Any) -> Outputs | None:
    """How to make `out` from `inputs` again; None where its metadata does not follow from theirs alone."""
    container = None if type(out) is FakeTensor else type(out)
    if container not in (None, tuple, list):
        return None
    results = [out] if container is None else list(out)
    tensors = [t for t in results if t is not None]  # a backward gives None for what needs no gradient
    if not tensors or any(type(t) is not FakeTensor for t in tensors):
        return None
    metas = [None if t is None else _meta_of(inference, inputs, t) for t in results]
    storages = {storage_id(v.fake) for v in inputs}
    new = [storage_id(t) for t in tensors if storage_id(t) not in storages]
    if any(meta is None and t is not None for meta, t in zip(metas, results, strict=True)):
        return None
    if len(set(new)) < len(new):
        return None  # two results share memory that is no input's
    if len(storages) < len(inputs) and len(new) < len(tensors):
        return None  # the metadata of the inputs does not say which of them a result is a view of
    return Outputs(container, tuple(metas))


def _meta_of(inference: Inference, inputs: list[Value], out: torch.Tensor) -> OutputMeta | Identity | None:
    key = inference.key_of(out)
    if key is None:
        return None
    for i, value in enumerate(inputs):
        if out is value.fake:
            return Identity(i)
    size: tuple[Int, ...] = tuple(out.size())
    stride: tuple[Int, ...] = tuple(out.stride())
    for i, value in enumerate(inputs):
        base = value.fake
        if storage_id(base) == storage_id(out):
            if base.dtype != out.dtype:
                return None
            offset = out.storage_offset() - base.storage_offset()
            return OutputMeta(size, stride, offset, out.dtype, out.device, out.requires_grad, 0, i, key)
    if is_symbolic(out):
        dense = views.dense_strides(out) if surely_equal(out.storage_offset(), 0) else None
        if dense is None:
            return None
        stride = dense
    elif out.storage_offset() != 0 or nbytes_of(out.untyped_storage()) != _bytes_spanned(out):
        return None
    nbytes = out.numel() * out.dtype.itemsize if is_symbolic(out) else _bytes_spanned(out)
    return OutputMeta(size, stride, 0, out.dtype, out.device, out.requires_grad, nbytes, key=key)


def _bytes_spanned(t: torch.Tensor) -> int:
    if t.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(t.size(), t.stride(), strict=True))) * t.element_size()


# SCOPETRACE_CHECK ----------------------------------------------------------------------------------------------------


def compare(
    maker: FakeMaker,
    func: Any,
    args: Any,
    kwargs: Any,
    inputs: list[Value],
    container: type | None,
    tensors: list[torch.Tensor | None],
) -> None:
    """Raises InferenceError where torch's results for the same arguments are not those inferred: `tensors`.

    torch runs the op on fake tensors of plain sizes: symbolic answers are checked at several, and checking adds no
    guards to the trace. The stride of a dimension of size 1, by which no element moves, is not compared: that of
    torch's fake tensors is not always that of eager.
    """
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
