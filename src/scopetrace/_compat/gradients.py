"""Autograd as Python sees it during a trace: hooks, `grad`, `requires_grad`, and the graph that they hang on.

Data flow:
    `y.register_hook(f)`, `y.retain_grad()`, `with saved_tensors_hooks(...)`, `y.grad_fn`, replaced -> a listener
    `p.requires_grad = False`, `x.detach_()`, replaced                                              -> the same
    `p.grad = None`, `optimizer.zero_grad()`, replaced                                              -> its `gradients`
    tensors -> nodes of autograd's graph -> leaves, hooks, tensors that nodes have saved
    optimizers and scalers of gradients, by torch's hooks of all optimizers or replaced -> its `gradients`

The listener is the `AutogradRecorder` of room `autograd`, which says what each of its methods is told. Backward hooks
of modules are functions of autograd, which `_compat.patches` reports.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
import torch.autograd.graph
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing as apply_activation_checkpointing,
)
from torch.nn.modules._functions import BackwardHookFunction as BackwardHookFunction
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from scopetrace._compat.ops import eager
from scopetrace._compat.replaced import Handler, Interception, after
from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import storage_id
from scopetrace._compat.versions import CURRENT
from scopetrace.sources import NOT_THE_MODEL, SCOPETRACE, TORCH_DIRECTORY, asked_by_model, asking_frame, prefixes

_saved_tensors_hooks = torch.autograd.graph.saved_tensors_hooks
_METHODS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
_TAKES_GRADIENTS = prefixes(TORCH_DIRECTORY, "optim/", "nn/utils/clip_grad.py", "amp/grad_scaler.py")
_MODULES = prefixes(TORCH_DIRECTORY, "nn/modules/module.py")
_TAKES_NODES = (*_MODULES, *prefixes(TORCH_DIRECTORY, "autograd/graph.py"))
_HOOK_ON_SEVERAL = torch.autograd.graph.register_multi_grad_hook.__code__


def has_other_gradient(by: Sequence[torch.Tensor], outside: Iterable[torch.Tensor]) -> bool:
    """Whether the derivative by one of these tensors is not what the ops of the forward say.

    It has a hook on its gradient and is no parameter, or is a leaf and yet a view of what requires grad, which has
    none; or a tensor from `outside` of the forward was computed from it.
    """
    hooked = [t for t, hooks in zip(by, hooks_of(*by), strict=True) if hooks and not isinstance(t, torch.nn.Parameter)]
    views = [t for t in by if t.is_leaf and t._base is not None and t._base.requires_grad]
    if hooked or views or any(t.retains_grad for t in by):
        return True
    nodes = nodes_of(outside)
    edges = {torch.autograd.graph.get_gradient_edge(t)[:2] for t in by if t.requires_grad} if nodes else set()
    return any(not edges.isdisjoint(node.next_functions) for node in nodes)


def hooks_of(*tensors: torch.Tensor) -> list[list[Callable[..., Any]]]:
    """The hooks on the gradient of each tensor."""
    return [[*(t._backward_hooks or {}).values(), *(t._post_accumulate_grad_hooks or {}).values()] for t in tensors]


def have_node_hooks(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether hooks made in Python hang on a node of autograd's graph that adds to the `grad` of one of some leaves.

    The node lives while somebody keeps it. It tells of its hooks where it gets another one.
    """
    with torch.enable_grad():
        return any(_has_hooks(t.view_as(t).grad_fn.next_functions[0][0]) for t in tensors)  # type: ignore[union-attr]


def _has_hooks(node: Any) -> bool:
    handles = node.register_hook(print), node.register_prehook(print)
    has_others = [len(handle.hooks_dict_ref() or ()) > 1 for handle in handles]
    for handle in handles:
        handle.remove()
    return any(has_others)


def give_hooks(t: torch.Tensor, to: torch.Tensor) -> None:
    """Let the hooks on the gradient of `t` run on that of `to` too."""
    if t._backward_hooks:
        to._backward_hooks = t._backward_hooks


def run_after_accumulation(t: torch.Tensor) -> None:
    """Run the hooks that ask for `t.grad` after a gradient was added to it."""
    for hook in list((t._post_accumulate_grad_hooks or {}).values()):
        if hook(t) is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")  # as torch's engine does


def leaves_of(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that autograd leads to from some tensors, each once."""
    leaves = [t for t in outputs if t.grad_fn is None and t.requires_grad]
    leaves += [node.variable for node in nodes_of(outputs) if hasattr(node, "variable")]
    return list({id(t): t for t in leaves}.values())


def nodes_of(outputs: Iterable[torch.Tensor]) -> list[Any]:
    """The nodes of autograd's graph that lead from some tensors to leaves, those of the leaves included."""
    seen: dict[Any, None] = {}
    work: list[Any] = [t.grad_fn for t in outputs]
    while work:
        node = work.pop()
        if node is not None and node not in seen:
            seen[node] = None
            work += [n for n, _ in node.next_functions]
    return list(seen)


next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node of autograd's graph gets; each thread counts by itself."""
current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node of autograd's graph that runs now; None outside of a backward."""
sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""The number of a node."""


def is_function(node: Any) -> bool:
    """Whether a node is of a `torch.autograd.Function`, so that Python computes its gradients."""
    return isinstance(node, BackwardCFunction)


def node_number(t: torch.Tensor) -> int:
    """The number of the node that made a tensor; -1 for a leaf."""
    return -1 if t.grad_fn is None else sequence_number(t.grad_fn)


def report_hooks(torch_calls: Interception, listener: Any) -> None:
    """Tell `listener` of hooks, `requires_grad` and `grad`, first."""
    tensor: Any = torch.Tensor
    for name in _METHODS:
        torch_calls.on(getattr(tensor, name), after(lambda t, *_, method=name, **__: listener.on_hook(t, method)))
    for name in ("grad_fn", "is_leaf"):
        torch_calls.on(getattr(tensor, name).__get__, _history(name, listener), torch_calls.in_forward)

    def require(t: torch.Tensor, requires_grad: bool = True) -> None:
        listener.on_requires_grad(t, requires_grad)

    def detach_(ask: Callable[..., Any], t: torch.Tensor) -> torch.Tensor:
        return ask(t) if listener.on_detach(t) else t

    for func in (tensor.requires_grad_, tensor.requires_grad.__set__):
        torch_calls.on(func, after(require), torch_calls.in_forward)
    for func in (tensor.detach_, torch.detach_):
        torch_calls.on(func, detach_, torch_calls.in_forward)
    _report_gradients(torch_calls, listener)
    _report_saved_tensors_hooks(torch_calls, listener)

    def region(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        return _reported_region(listener, run, args, kwargs)

    for module in (torch.utils.checkpoint, sys.modules.get("torch.distributed._composable.checkpoint_activation")):
        if module is not None:
            torch_calls.replace(module, CURRENT.checkpoint_generator, region)


def _history(name: str, listener: Any) -> Handler:
    def get(ask: Callable[..., Any], t: torch.Tensor, *args: Any) -> Any:
        frame = asking_frame()
        file = "" if frame is None else frame.f_code.co_filename
        asked = frame is not None and not file.startswith(SCOPETRACE)  # a trace inside this one
        if asked and t.requires_grad:
            listener.on_graph(t)
        answer = ask(t, *args)
        if asked and name == "grad_fn" and answer is not None:
            codes = [each.f_code for each in (frame, frame and frame.f_back) if each is not None]
            to_hook = file.startswith(_MODULES) or _HOOK_ON_SEVERAL in codes
            if file.startswith(_TAKES_NODES) or not file.startswith(NOT_THE_MODEL):
                listener.on_grad_fn(t, to_hook=to_hook)
        return answer

    return get


class Leaf:
    """What a call of a trace does to the leaves of autograd's graph; a trace around that call takes its place."""

    @staticmethod
    def grad(t: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor | None:
        """The `grad` of a leaf. `more` is added to it before as autograd does: in place, if no gradient flows there."""
        if more is None:
            return t.grad
        if t.grad is None:
            t.grad = more
        elif more.requires_grad:
            t.grad = t.grad + more
        else:
            with torch.no_grad():
                t.grad += more
        return t.grad


def _report_gradients(torch_calls: Interception, listener: Any) -> None:
    grad: Any = torch.Tensor.grad

    def get_grad(ask: Callable[..., Any], t: torch.Tensor, *args: Any) -> Any:
        frame = asking_frame()
        code = frame and frame.f_code
        if frame is not None and code is _ZERO_GRAD and frame.f_locals["set_to_none"]:
            return t  # whatever it is: it is set to None next
        takes = code is not None and (code.co_name == "zero_grad" or code.co_filename.startswith(_TAKES_GRADIENTS))
        asked = takes or asked_by_model()
        recorded = listener.gradients.get(t) if asked else NotImplemented
        return ask(t, *args) if recorded is NotImplemented else recorded

    def set_grad(_: Callable[..., Any], t: torch.Tensor, new: Any = None) -> None:
        if not listener.gradients.set(t, new):
            grad.__set__(t, new)

    def zero_grad(ask: Callable[..., Any], optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        if not set_to_none:
            return ask(optimizer, set_to_none)
        listener.gradients.on_zero_grad(optimizer)
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            p.grad = None  # without a look at what it was

    torch_calls.on(grad.__get__, get_grad, torch_calls.in_forward)
    for func in (grad.__set__, grad.__delete__):
        torch_calls.on(func, set_grad, torch_calls.in_forward)
    torch_calls.replace(torch.optim.Optimizer, "zero_grad", zero_grad, torch_calls.in_forward)
    torch_calls.replace(Leaf, "grad", lambda *args: listener.gradients.on_leaf(*args), torch_calls.in_forward)


_ZERO_GRAD = torch.nn.Module.zero_grad.__code__


def _report_saved_tensors_hooks(torch_calls: Interception, listener: Any) -> None:
    """`with saved_tensors_hooks`: those of users and of regions under checkpointing stay off.

    Those of torch itself, such as `save_on_cpu`, leave values and gradients as they are.
    """
    marks: dict[int, Any] = {}

    def enter(ask: Callable[..., Any], hooks: Any) -> None:
        marks[id(hooks)] = listener.mark()
        if not _stays_off(hooks):
            ask(hooks)

    def leave(ask: Callable[..., Any], hooks: Any, *error: Any) -> None:
        mark = marks.pop(id(hooks), None)
        if mark is None or not _stays_off(hooks):
            ask(hooks, *error)
        if mark is not None and not any(error) and _is_users(hooks):
            listener.leave_saved_tensors_hooks(mark)

    torch_calls.replace(_saved_tensors_hooks, "__enter__", enter)
    torch_calls.replace(_saved_tensors_hooks, "__exit__", leave, when=lambda: bool(marks))


def _is_users(hooks: Any) -> bool:
    return type(hooks) is _saved_tensors_hooks or not type(hooks).__module__.startswith("torch.")


def _stays_off(hooks: Any) -> bool:
    return _is_users(hooks) or isinstance(hooks, torch.utils.checkpoint._checkpoint_hook)


def _reported_region(listener: Any, run: Callable[..., Generator[None]], args: Any, kwargs: Any) -> Iterator[None]:
    """torch's generator `run` around a region of `torch.utils.checkpoint(use_reentrant=False)`."""
    checkpoint, bound = torch.utils.checkpoint, inspect.signature(run).bind(*args, **kwargs)
    bound.apply_defaults()
    options, grad = bound.arguments, torch.is_grad_enabled()
    context_fn = options["context_fn"] if grad else checkpoint.noop_context_fn
    early_stop = checkpoint._enable_checkpoint_early_stop
    with contextlib.closing(run(*args, **kwargs)) as inside:
        next(inside)  # what it saves of the arguments is outside of the region
        with listener.checkpointed(
            options["args"],
            None if context_fn is checkpoint.noop_context_fn else context_fn,
            grad=grad,
            early_stop=options["early_stop"] if early_stop is None else early_stop,
            keeps_rng=options["preserve_rng_state"],
        ):
            yield
        next(inside, None)


@contextlib.contextmanager
def saving_by(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
    """Inside, autograd saves tensors by these hooks, of which the listener is not told."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    try:
        yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def policy_of(context_fn: Any) -> Callable[..., bool]:
    """Whether a policy of selective checkpointing keeps what an op, called with some arguments, gives.

    It is asked for each op of a region, in order. Other kinds of `context_fn` keep nothing.
    """
    policy = getattr(context_fn()[0], "policy_fn", None) if context_fn is not None else None
    if policy is None:
        return lambda *_, **__: False
    checkpoint = torch.utils.checkpoint
    keeps = (checkpoint.CheckpointPolicy.MUST_SAVE, checkpoint.CheckpointPolicy.PREFER_SAVE)

    def asked(out: Any, func: Any, /, *args: Any, **kwargs: Any) -> bool:
        if func in checkpoint.SAC_IGNORED_OPS:
            return False
        answer = policy(checkpoint.SelectiveCheckpointContext(is_recompute=False, op_output=out), func, *args, **kwargs)
        return answer is True or answer in keeps

    return asked


def node_of(t: torch.Tensor) -> Any:
    """The node that made a tensor; None of a view made under no_grad and written since, for which torch raises."""
    try:
        return t.grad_fn
    except RuntimeError:
        return None


def saved_storages(results: Iterable[torch.Tensor]) -> set[int]:
    """The storages of what the ops that led to `results` have saved for their backward."""
    saved = [getattr(node, name) for node in nodes_of(results) for name in dir(node) if name.startswith("_saved_")]
    return {storage_id(t) for t in tree_leaves(saved) if isinstance(t, torch.Tensor)}


def copying_saved(storages: Set[int]) -> contextlib.AbstractContextManager[None]:
    """Inside, autograd saves copies of tensors in these storages, which may be written before backward reads them."""
    return _saved_tensors_hooks(lambda t: t.clone() if storage_id(t) in storages else t, lambda t: t)


def hooks_of_all_optimizers() -> list[Callable[..., Any]]:
    """The hooks that run around each step of any optimizer, but for those by which traces see steps."""
    tables = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    return [hook for table in tables for hook in table.values() if not str(hook.__module__).startswith("scopetrace.")]


def hooks_of_optimizer(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """The hooks that run around each step of an optimizer."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class is one of torch.optim itself."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def counts_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """A call of a trace steps an optimizer without calling it, and torch's schedulers warn where nobody did."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def first_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: torch.Tensor) -> dict[str, Any]:
    """The state that the first step of an optimizer of torch.optim makes for a parameter before it computes.

    Empty where there is none. The optimizer stays as it is.
    """
    make = getattr(type(optimizer), "_init_group", None)
    if make is None:
        return {}
    stand_in: Any = object.__new__(type(optimizer))
    vars(stand_in).update(vars(optimizer), state=collections.defaultdict(dict))
    leaf = p.detach().requires_grad_()  # whose memory nobody writes
    leaf.grad = p.detach()
    lists = len(inspect.signature(make).parameters) - 2  # to which it appends what the step takes
    make(stand_in, {**group, "params": [leaf]}, *([] for _ in range(lists)))
    return dict(stand_in.state[leaf])


# Training steps ------------------------------------------------------------------------------------------------------


def report_optimizers(torch_calls: Interception, listener: Any) -> None:
    """Tell of new optimizers, and the steps of all. What one takes for the greater of numbers may be a symbol."""
    hooks = hooks_of_all_optimizers()

    def init(make: Callable[..., None], optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        listener.gradients.new_optimizers.append(optimizer)

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if not torch_calls.in_forward():
            return None
        is_named = len(args) < 2  # the optimizer is the first
        closure = kwargs.get("closure") if is_named else args[1]
        run = listener.gradients.on_step(optimizer, closure if callable(closure) else None, hooks)
        if run is None:
            return None
        return (args, {**kwargs, "closure": run}) if is_named else ((args[0], run, *args[2:]), kwargs)

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch_calls.in_forward():
            listener.gradients.after_step(optimizer)

    def of_two(ask: Callable[..., Any], a: Any, b: Any) -> Any:
        symbolic = isinstance(a, Symbolic) or isinstance(b, Symbolic)
        return getattr(torch, f"sym_{ask.__name__}")(a, b) if symbolic else ask(a, b)

    for name in ("max", "min"):
        torch_calls.replace(torch.optim._adafactor, name, of_two)
    torch_calls.replace(torch.optim.Optimizer, "__init__", init, torch_calls.in_forward)
    torch_calls.stack.callback(register_optimizer_step_pre_hook(before_step).remove)
    torch_calls.stack.callback(register_optimizer_step_post_hook(after_step).remove)


def report_scalers(torch_calls: Interception, listener: Any) -> None:
    """Tell of scalers. What one has noted of optimizers since its last `update()` is put back when the trace ends."""
    used: dict[int, tuple[torch.amp.GradScaler, dict[int, Any]]] = {}

    def begin(ask: Callable[..., None], scaler: torch.amp.GradScaler, device: torch.device) -> None:
        with eager():
            ask(scaler, device)
        listener.gradients.on_scaler(scaler)

    def step(_: Any, scaler: Any, optimizer: torch.optim.Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(optimizer.step, *args, **kwargs)
        return listener.gradients.on_scaled_step(optimizer, state["found_inf_per_device"].values(), run)

    def note(scaler: torch.amp.GradScaler, *_: Any) -> None:
        if id(scaler) not in used:
            if scaler._per_optimizer_states:
                listener.gradients.on_begun_scaler("GradScaler.unscale_ or step was called before what is traced")
            used[id(scaler)] = scaler, scaler._per_optimizer_states

    def put_back(kind: type[BaseException] | None, *_: object) -> None:
        left = [scaler for scaler, _ in used.values() if scaler._per_optimizer_states]
        for scaler, states in used.values():
            states.clear()
            scaler._per_optimizer_states = states
        if left and kind is None:
            listener.gradients.on_begun_scaler("GradScaler.update is not called after unscale_ or step")

    tell = after(lambda scaler, *_, **__: listener.gradients.on_scaler(scaler))
    handlers: dict[str, Handler] = {"_lazy_init_scale_growth_tracker": begin, "_maybe_opt_step": step, "scale": tell}
    for name, handler in {**handlers, "_check_scale_growth_tracker": after(note)}.items():
        torch_calls.replace(torch.amp.GradScaler, name, handler, torch_calls.in_forward)
    torch_calls.stack.push(put_back)
