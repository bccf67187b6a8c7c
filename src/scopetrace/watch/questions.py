"""What the forward asks torch, or takes out of tensors, storages and symbolic numbers, where no op runs.

Data flow:
    `x.stride()`, `x.requires_grad`, by `FunctionMode` -> torch's answer, and `ReadRecorder` is told of it
    `torch.is_grad_enabled()`, replaced                              -> the same
    `x.data`, `x.data = y`, `storage.resize_(0)` -> ops that do the same, or a refusal
    `x.numpy()`, `f"{x}"`, `hash(n)`, `copy.copy(x)` -> a value, what torch gives, or a refusal

Only questions of the model and of torch's Python on its way count: while the recorder handles an op its mode is off,
and contexts such as `torch.no_grad` ask only to restore what was.
"""

from __future__ import annotations

import functools
import sys
import typing
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from scopetrace._compat import questions
from scopetrace._compat.ops import eager
from scopetrace._compat.questions import VIEW_QUESTIONS, Condition
from scopetrace._compat.replaced import STATIC_LOOKUP, Handler, Interception, after
from scopetrace._compat.tensors import FakeTensor, id_of_storage, is_inference_of, requires_grad_of, uncounted
from scopetrace.guards.attributes import static_lookup
from scopetrace.ir.scopes import tracing_state
from scopetrace.record.builder import TapeBuilder
from scopetrace.record.explanations import text_used
from scopetrace.record.ops import OpRecorder
from scopetrace.record.reads import ReadRecorder
from scopetrace.sources import SCOPETRACE, TORCH, TORCH_DIRECTORY, asked_by_model, asking_frame, prefixes

# Code that asks to restore what was, or to choose between kernels that compute the same.
_KEEPING_STATE = (
    *SCOPETRACE,
    *prefixes(
        TORCH_DIRECTORY,
        *("autograd/grad_mode.py", "amp/autocast_mode.py", "utils/checkpoint.py", "utils/_device.py", "_tensor.py"),
        *("utils/_contextlib.py", "_dynamo/", "_compile.py", "fx/", "_subclasses/", "_library/", "_ops.py"),
        "_functorch/eager_transforms.py",
        *("nn/modules/module.py", "nn/modules/transformer.py", "nn/modules/activation.py", "nn/functional.py"),
    ),
)
_FAKE_TENSORS = prefixes(TORCH_DIRECTORY, "_subclasses/")


def watch_questions(ops: OpRecorder, torch_calls: Interception) -> None:
    """Hear what Python asks of tensors and of torch."""
    PythonValues(ops, torch_calls)
    reads = ops.reads

    def asked() -> bool:
        if not torch_calls.in_forward():
            return False
        frame = asking_frame()
        if frame is not None and frame.f_code.co_filename.startswith(_KEEPING_STATE):
            return False
        while frame is not None and frame.f_code.co_filename.startswith(TORCH):
            if frame.f_code.co_filename.startswith(_FAKE_TENSORS):
                return False  # a fake tensor that is made without an op, as for `x.data`
            frame = frame.f_back
        return True

    for path, ask in (*questions.flags.items(), *questions.PROCESS_GROUP.items()):
        owner, _, name = path.rpartition(".")
        torch_calls.put(sys.modules[owner], name, _flag(path, ask, reads, asked))
    for name, get in (*questions.methods.items(), *questions.properties.items()):
        torch_calls.mode.on(get, _fact(name, ops, asked))
    _report_properties(torch_calls, reads)
    _report_switches(torch_calls, reads)


def _flag(name: str, ask: Callable[..., Any], reads: ReadRecorder, asked: Condition) -> Callable[..., Any]:
    @functools.wraps(ask)
    def answered(*args: Any, **kwargs: Any) -> Any:
        answer = ask(*args, **kwargs)
        arguments = tuple([a for a in (*args, *kwargs.values()) if a is not None])
        if asked() and not (arguments and name in questions.PROCESS_GROUP):
            reads.on_flag(name, arguments, answer)
        return answer

    return answered


def _fact(name: str, ops: OpRecorder, asked: Condition) -> Handler:
    def answered(ask: Callable[..., Any], t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        try:  # not by `_may_fail`, whose frame would be between the question and who asks
            answer = ask(t, *args, **kwargs)
        except Exception as error:
            ops.builder.raised.append((error, None))
            raise
        if asked():
            args = () if name in questions.properties else (*args, *kwargs.values())
            ops.reads.on_fact(t, name, args, answer is not None if name == "grad_fn" else answer)
        return answer

    return answered


def _report_properties(torch_calls: Interception, reads: ReadRecorder) -> None:
    """`isinstance(x, nn.Parameter)`; `torch.backends.cudnn.enabled` and its kind, where code outside of torch asks."""

    def checked(ask: Callable[..., bool], cls: Any, x: Any) -> bool:
        is_parameter = ask(cls, x)
        if isinstance(x, torch.Tensor) and asked_by_model(()):
            reads.on_fact(x, "is_parameter", (), is_parameter)
        return is_parameter

    def got(ask: Callable[..., Any], prop: Any, module: Any, cls: type) -> Any:
        answer = ask(prop, module, cls)
        if asked_by_model(()):
            name = next((key for key, x in vars(type(module)).items() if x is prop), "")
            reads.on_flag(f"{module.__name__}.{name}", None, answer)
        return answer

    torch_calls.replace(type(torch.nn.Parameter), "__instancecheck__", checked)
    torch_calls.replace(torch.backends.ContextProp, "__get__", got)


def _report_switches(torch_calls: Interception, reads: ReadRecorder) -> None:
    """What switches autograd or autocast on or off."""

    def set_grad_enabled(enabled: bool) -> None:
        frame = asking_frame()  # from which a mode of the model may have got it
        while frame is not None and frame.f_code.co_name == "__init__" and frame.f_back is not None:
            frame = frame.f_back
        if frame is not None and frame.f_code.co_name == "__exit__":
            reads.on_grad_block_end()
        elif frame is not None:
            reads.on_grad_mode(enabled)

    torch_calls.on(questions.switch_grad, after(set_grad_enabled), torch_calls.in_forward)
    blocks: list[tuple[Any, Callable[..., None], Callable[..., None]]] = [
        # `inference_mode(False)` switches autograd on
        (torch.inference_mode, lambda mode: reads.on_grad_mode(not mode.mode), lambda *_: reads.on_grad_block_end()),
        (torch.autocast, lambda _: reads.on_autocast(True), lambda *_: reads.on_autocast(False)),
    ]
    for cls, entered, left in blocks:
        torch_calls.replace(cls, "__enter__", after(entered))
        torch_calls.replace(cls, "__exit__", after(left))


# Values ------------------------------------------------------------------------------------------------------------

_STORAGES = prefixes(TORCH_DIRECTORY, "storage.py")
_MAKES_TEXT = prefixes(TORCH_DIRECTORY, "_tensor.py", "_tensor_str.py")


def refuse_flag(builder: TapeBuilder, problem: str, name: str) -> NoReturn:
    """Refuse a change to what a tensor is for autograd."""
    problem = f"the forward {problem}, which no op does"
    hint = "do it outside of the forward; to cut a gradient inside, use x.detach()"
    raise builder.refusal(problem, op=f"Tensor.{name}", hint=hint)


class PythonValues:
    """Answers in the place of torch where `is_observed()`; in leaf modules, which run unseen, too."""

    def __init__(self, ops: OpRecorder, torch_calls: Interception) -> None:
        """Enters the handlers, and replaces what no mode sees."""
        self._builder, self._ops, self._values = ops.builder, ops, ops.values
        self._torch_calls, always = torch_calls, torch_calls.mode.on
        tensor: Any = torch.Tensor
        on = torch_calls.on
        for ask in (tensor.numpy, tensor.__array__, tensor.data_ptr, tensor.share_memory_, tensor.__dlpack__):
            always(ask, self._may_fail)
        for ask in (tensor.numpy, tensor.__array__):
            on(ask, self._array)
        on(tensor.tolist, self._list)
        on(tensor.__format__, self._format)
        always(tensor.nbytes.__get__, lambda _, t: t.numel() * t.element_size())  # torch's takes no symbolic sizes
        on(tensor.__repr__, self._text)
        for copy in (tensor.__reduce_ex__, tensor.__deepcopy__):
            on(copy, after(self._refuse_copy))
        for run in (tensor.apply_, tensor.map_, tensor.map2_):  # which call a function of Python for each element
            always(run, self._refuse_elements)
        for name, func in VIEW_QUESTIONS.items():
            on(func, after(functools.partial(self._refuse_base, name)))
        on(tensor.__deepcopy__, self._deepcopy)
        texts = [(cls, name) for cls in (torch.SymInt, torch.SymFloat) for name in ("__repr__", "__format__")]
        for cls, name in ((torch.SymInt, "__hash__"), (torch.SymBool, "__repr__"), *texts):
            torch_calls.replace(cls, name, self._of_number)
        storage = torch.UntypedStorage
        torch_calls.replace(storage, "nbytes", self._nbytes)
        torch_calls.replace(storage, "resize_", self._resize)
        torch_calls.replace(storage, "data_ptr", self._may_fail, when=torch_calls.in_tracing_thread)
        on(tensor.data.__get__, self._get_data)
        on(tensor.data.__set__, self._set_data, torch_calls.in_tracing_thread)
        if hasattr(typing, STATIC_LOOKUP):
            torch_calls.replace(typing, STATIC_LOOKUP, static_lookup)

    def _may_fail(self, ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return ask(*args, **kwargs)
        except Exception as error:
            self._builder.raised.append((error, None))
            raise

    def _refuse_copy(self, t: torch.Tensor, *_: Any, **__: Any) -> None:
        if isinstance(t, FakeTensor):
            raise self._builder.refusal(
                "the forward copies or pickles a tensor by Python (copy.copy, copy.deepcopy, pickle, torch.save), "
                "which runs no op",
                op="Tensor.__reduce_ex__",
                hint="write tensor.clone()",
            )

    def _refuse_elements(self, *_: Any) -> NoReturn:
        error = RuntimeError("a tensor in a trace doesn't have data for a function of its elements")
        self._builder.raised.append((error, None))
        raise error

    def _refuse_base(self, name: str, *_: Any) -> None:
        """The forward asks whether a tensor is a view, which it need not be in a trace."""
        if asked_by_model():
            problem = "the forward asks whether a tensor is a view, which no call of a trace can know"
            hint = "ask outside of the forward"
            raise self._builder.refusal(problem, op=f"Tensor.{name}", hint=hint)

    # ---------------------------------------------------------------- data

    def _get_data(self, ask: Callable[..., Any], t: torch.Tensor, *args: Any) -> Any:
        source = self._values.data_source(t)
        alias = ask(source, *args)
        if isinstance(alias, FakeTensor):  # for autograd a tensor of its own, as `detach()` gives
            self._values.append_op(torch.ops.aten.detach.default, (self._values.value_of(source),), alias)
        return alias

    def _set_data(self, ask: Callable[..., Any], t: torch.Tensor, new: Any) -> None:
        """`t.data = new`: recorded as `t.set_(new)` for tensors from outside.

        Tensors made in the trace need no op: their storage changes, which `ValueTable.value_of` sees.
        """
        builder, values, is_observed = self._builder, self._values, self._torch_calls.is_observed()
        if builder.running is not None or not isinstance(new, torch.Tensor):
            return ask(t, new)
        if is_inference_of(values.value_of(t).fake) != is_inference_of(new):
            refuse_flag(
                builder, "sets `.data` under inference mode of a tensor made outside of it, or reversely", "data"
            )
        if not values.is_outside(t):
            self._leave_data(t, new)
            return ask(t, new)
        if not is_observed or (t.dtype, t.device, t.layout) != (new.dtype, new.device, new.layout):
            raise builder.refusal(
                "`.data = ...` of a tensor of the model, or an input, "
                + ("in a leaf module" if not is_observed else f"that gives it {new.dtype} on {new.device}"),
                op="Tensor.data",
                hint="bind a new tensor (`self.name = ...`), or write to it with copy_",
            )
        if not values.are_one_view(t, new):
            with torch.no_grad(), uncounted(values.fake_of(t)):  # for autograd it is no write
                t.set_(new.detach())  # type: ignore[call-overload]

    def _leave_data(self, t: torch.Tensor, new: torch.Tensor) -> None:
        """Before a tensor that the forward made gets other data."""
        builder, values = self._builder, self._values
        self._ops.reads.on_fact(t, "requires_grad", (), requires_grad_of(t))
        if requires_grad_of(t):
            refuse_flag(builder, "sets `.data` of a tensor that it made and that requires grad", "data")
        if values.value_of(t).storage == values.value_of(new).storage and not values.are_one_view(t, new):
            refuse_flag(builder, "sets `.data` of a tensor that it made to a view of its own memory", "data")
        values.leave_memory(t)

    def _resize(self, resize: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        """A storage gets another size, in bytes: recorded as the op that Dynamo writes for it."""
        known = [] if self._builder.running is not None else self._values.in_storage(id_of_storage(storage))
        if not known:
            return resize(storage, size)
        torch.ops.inductor.resize_storage_bytes_(known[0].fake, size)
        return storage

    def _nbytes(self, ask: Callable[[Any], int], storage: torch.UntypedStorage) -> int:
        if asked_by_model(_STORAGES):
            values = self._values.in_storage(id_of_storage(storage))
            inputs = [v.fake for v in values if v in self._builder.tape.inputs]
            for t in inputs[:1]:
                self._ops.reads.on_fact(t, "storage_nbytes", (), ask(storage))
        return ask(storage)

    def _array(self, ask: Callable[..., Any], t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        known = self._ops.data.data_of(t)
        if known is NotImplemented:
            return ask(t, *args, **kwargs)
        with eager():
            result = ask(known, *args, **kwargs)
        result.flags.writeable = False  # a write to it would not be in the graph
        return result

    def _list(self, ask: Callable[..., Any], t: torch.Tensor) -> Any:
        """Of a tensor of the model, whose data C code would take without any op: the numbers of its elements."""
        if isinstance(t, FakeTensor) or not asked_by_model():
            return ask(t)
        return [row.tolist() for row in t] if t.dim() > 0 else t.item()

    def _deepcopy(self, ask: Callable[..., Any], t: torch.Tensor, memo: dict[Any, Any]) -> Any:
        """Of a tensor of the model that autograd does not know the copy is an op, but where several share memory."""
        is_plain = type(t) is torch.Tensor and t.layout == torch.strided and not t.requires_grad
        if not is_plain or id(t) in memo:
            return ask(t, memo)
        copies = memo.setdefault("scopetrace", set())
        storage = t.untyped_storage()
        if id_of_storage(storage) in copies or storage.nbytes() != t.numel() * t.itemsize:
            return ask(t, memo)
        copies.add(id_of_storage(storage))
        memo[id(t)] = t.clone()
        return memo[id(t)]

    # ---------------------------------------------------------------- text

    def _format(self, ask: Callable[..., str], t: torch.Tensor, spec: str) -> str:
        """`f"{tensor:.3f}"`; without a number there is no text of that form, and it is that of `repr`."""
        number = NotImplemented if t.dim() > 0 else self._ops.data.number_of(t)
        if number is not NotImplemented:
            return format(number, spec)
        return self._text(ask, t, "" if isinstance(t, FakeTensor) and t.dim() == 0 else spec)

    def _of_number(self, ask: Callable[..., Any], number: Any, *spec: str) -> Any:
        """`hash`, `repr` or `format` of a symbolic number: of the number itself where the model's own code asks."""
        if not asked_by_model():
            return ask(number, *spec)
        known = self._ops.data.number_of(number)
        if known is not NotImplemented:
            return getattr(known, ask.__name__)(*spec)
        return ask(number) if ask.__name__ == "__hash__" else self._text(ask, number, *(("",) if spec else ()))

    def _text(self, ask: Callable[..., str], x: Any, *spec: Any, **kwargs: Any) -> str:
        """Text of what has no value in a trace."""
        text = str.__str__(ask(x, *spec, **kwargs))  # torch asks for one by another
        if isinstance(x, torch.Tensor) and not (isinstance(x, FakeTensor) and asked_by_model(_MAKES_TEXT)):
            return text
        self._builder.texts.add(text)
        shown = (_TextOfTensor if isinstance(x, torch.Tensor) else _TextForPeople)(text)
        shown.builder = weakref.ref(self._builder)
        return shown


class _TextForPeople(str):
    """Text that may be shown and made part of other text, which is plain; while the forward runs it is not read."""

    builder: weakref.ref[TapeBuilder]


class _TextOfTensor(_TextForPeople):
    """The same of a tensor, which no table has; `warnings.warn` looks it up among those that it has shown."""

    __hash__ = str.__hash__


def _unless_observed(name: str) -> Callable[..., Any]:
    def read(text: _TextForPeople, *args: Any) -> Any:
        builder, answer = text.builder(), getattr(str, name)(text, *args)
        is_observed = builder is not None and tracing_state() is builder.state and asked_by_model()
        if builder is not None and is_observed and (name, answer) != ("__eq__", True):  # no text of eager is equal
            raise text_used("reads", **builder.where())
        return answer

    return read


_READS = "__eq__ __ne__ __lt__ __gt__ __le__ __ge__ __hash__ __len__ __contains__ __getitem__ __iter__"
for _name in f"{_READS} endswith startswith count find index isdigit split encode".split():
    setattr(_TextForPeople, _name, _unless_observed(_name))
