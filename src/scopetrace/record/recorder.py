"""The recorder: one pass over the model under fake tensors, writing the tape.

Data flow:
    op arrives (pre-dispatch) -> its tensors become tape values -> its results are made -> an Op goes on the tape

Results are made in one of two ways. The first time that an op meets arguments of some metadata, torch runs it on fake
tensors; after that, an op with equal metadata gets results of equal metadata at once (`results`), which is what makes
recording fast: a layer's ops repeat in the next layer. Such results have no autograd history. That shows only when
the forward itself differentiates, or writes into a view of them; then `NeedsAutograd` ends the recording, and `record`
starts again with torch running every op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from scopetrace._compat import dispatch
from scopetrace._compat.schema import schema_of
from scopetrace._compat.symbols import has_unbacked, to_expr
from scopetrace._compat.tensors import FakeTensor, run_op, storage_id, without_dispatch
from scopetrace.errors import UnsupportedOpError
from scopetrace.infer import results, rules
from scopetrace.infer.size_rules import ACTIVATIONS, PLAIN_WRITES
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import Value, flat
from scopetrace.ops.functional_variants import UNDECLARED_WRITTEN, undeclared_variant, undeclared_writes
from scopetrace.record.bodies import FORMS, INLINED, BodyRecorder
from scopetrace.record.model import Model
from scopetrace.record.reading import READ_INSIDE, ReadingWriter
from scopetrace.record.retrace import Assumptions, Retrace
from scopetrace.record.values import reads_a_value
from scopetrace.record.writer import place_of

_aten = torch.ops.aten
_ATOMS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_ATOM_SET = frozenset(_ATOMS)
_Parameter = torch.nn.Parameter
_grad_enabled = torch.is_grad_enabled


class _OpFacts:
    """What the recorder needs to know of an op, looked up once."""

    __slots__ = (
        "convolves",
        "func",
        "has_dtype",
        "in_place",
        "instead",
        "may_lie",
        "positions",
        "quiet",
        "reads",
        "recipes",
        "repeatable",
        "reshapes",
        "squeezes",
        "written",
    )

    def __init__(self, func: Any) -> None:
        self.func = func  # keeps its id from being used again
        self.instead = Recorder._lift_fresh if func is _aten.lift_fresh.default else READ_INSIDE.get(func)
        self.reads = reads_a_value(func)
        self.repeatable = results.can_repeat(func, func.tags)
        schema = schema_of(func)
        self.convolves = "conv" in schema.name  # asks for sizes to choose a kernel: that binds no call
        self.reshapes = torch.Tag.inplace_view in func.tags
        self.written = tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.is_written)
        self.positions = tuple(enumerate(schema.names))
        self.in_place = torch.Tag.inplace in func.tags and (torch.Tag.pointwise in func.tags or func in PLAIN_WRITES)
        self.has_dtype = any(a.name == "dtype" and a.kwarg_only for a in schema.arguments)
        self.squeezes = schema.name.startswith("aten::squeeze")
        self.may_lie = any(name in UNDECLARED_WRITTEN for _, name in self.positions)
        self.recipes: dict[Any, results.Recipe] = {}
        self.quiet: dict[Any, bool] = {}  # whether the op in place changes values alone


class Recorder(ReadingWriter):
    """Writes `tape` from the ops and module calls of one forward."""

    def __init__(self, model: Model, root: Scope, assumptions: Assumptions, *, specialize: bool = False) -> None:
        super().__init__(model, root, exact_autograd=assumptions.exact_autograd)
        self.object_types = assumptions.object_types
        self.exact = assumptions.exact_autograd
        self.mode = dispatch.PreDispatchMode(self.on_op, self.on_higher_order)
        self.run_graph: Callable[[torch.fx.GraphModule, Any], Any] = lambda gm, args: torch.fx.Interpreter(gm).run(
            *args
        )
        self.factory.shape_env.place = self.where
        self.learn_values(specialize)
        self._facts: dict[int, _OpFacts] = {}
        self._repeatable = True  # whether all arguments of the running op have keys

    # ---------------------------------------------------------------- ops

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op arrives; transforms and autocast come first. What this returns goes back to the model."""
        if dispatch.in_transform():
            if not self.exact:
                raise Retrace("a transform such as torch.vmap runs", exact_autograd=True)
            return dispatch.through_transform(self._record, func, args, kwargs)
        if dispatch.autocast_enabled():
            out = dispatch.through_autocast(self.mode, func, self._device(args, kwargs), args, kwargs)
            if out is not NotImplemented:
                return out
        return self._record(func, args, kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts = self._facts.get(id(func))
        if facts is None:
            facts = self._facts[id(func)] = _OpFacts(func)
        if facts.instead is not None:
            return facts.instead(self, *args, **kwargs)
        if facts.written and (facts.reshapes or id(args[0]) in self._of_data) and isinstance(args[0], FakeTensor):
            self.set_apart(args[0])
        self._repeatable = True
        inputs: list[Value] = []
        key: list[Any] = []
        given = (args, kwargs)
        lifted = tuple([self._lift(a, inputs, key) for a in args])
        lifted_kwargs = {}
        for name, a in kwargs.items():
            key.append(name)
            lifted_kwargs[name] = self._lift(a, inputs, key)
        if func is _aten.as_strided.default and (lifted[3:] or lifted_kwargs) not in ((None,), {}):
            self.tape.uses_absolute_offset.add(lifted[0].storage)
        if facts.reads:
            answer = self.answer(func, args, lifted, lifted_kwargs)
            if answer is not NotImplemented:
                return answer
        if not self._repeatable or (self.exact and (_grad_enabled() or any(v.fake.requires_grad for v in inputs))):
            return self._run(facts, given, lifted, lifted_kwargs, inputs, None)
        full_key = (_grad_enabled(), torch.get_default_dtype(), *key)
        recipe = facts.recipes.get(full_key) or self._predict(facts, lifted, lifted_kwargs, inputs, full_key)
        if recipe is None:
            return self._run(facts, given, lifted, lifted_kwargs, inputs, full_key)
        return self._repeat(facts, recipe, lifted, lifted_kwargs, inputs)

    def _predict(self, facts: _OpFacts, args: Any, kwargs: Any, inputs: list[Value], key: Any) -> results.Recipe | None:
        """The recipe of an op met for the first time, where a rule for symbolic sizes gives it."""
        if not facts.repeatable or (facts.may_lie and undeclared_writes(facts.func, args, kwargs)):
            return None
        recipe = rules.predict(self.factory, self._keys, facts.func, args, kwargs, inputs)
        if recipe is not None:
            facts.recipes[key] = recipe
        return recipe

    def _lift(self, a: Any, inputs: list[Value], key: list[Any]) -> Any:
        """The tape's form of an op argument; its tensors go to `inputs`, what results depend on to `key`."""
        kind = type(a)
        if kind is FakeTensor or kind is _Parameter:
            value = self._by_id.get(id(a))
            if value is None or (kind is FakeTensor and value.storage != storage_id(a)):
                value = self.value_of(a)
            inputs.append(value)
            key.append(value.key)
            if value.key is None:
                self._repeatable = False
            return value
        if kind in _ATOM_SET:
            key.append(a)
            key.append(kind)  # 1, 1.0 and True are equal
            return a
        if kind is list or kind is tuple:
            key.append(kind)
            key.append(len(a))
            return kind([self._lift(item, inputs, key) for item in a])
        if kind is torch.SymInt:
            expr = to_expr(a)
            key.append(expr)
            self._repeatable = self._repeatable and not has_unbacked(expr)
            return a
        if isinstance(a, torch.Tensor):
            value = self._by_id.get(id(a)) or self.value_of(a)
            inputs.append(value)
            key.append(value.key)
            self._repeatable = self._repeatable and value.key is not None
            return value
        self._repeatable = False
        return a

    def _run(self, facts: _OpFacts, given: Any, args: Any, kwargs: Any, inputs: list[Value], key: Any) -> Any:
        """Let torch run the op on the fake tensors that it was given."""
        unseen = bool(facts.written) and self._prepare_write(facts, args, kwargs, inputs)
        secret = undeclared_writes(facts.func, args, kwargs) if facts.may_lie else ()
        if secret and undeclared_variant(facts.func, args, kwargs) is None and facts.func._can_decompose():
            return dispatch.decomposed(self.mode, facts.func, *given)  # instance_norm: its parts say what they write
        given_args, given_kwargs = self._with_fakes(given)
        objects = [t for t in flat((given_args, given_kwargs)) if isinstance(t, torch.Tensor)]
        versions = [_version(t) for t in objects]
        tracked = [v for v, t in zip(inputs, objects, strict=True) if t.requires_grad] if facts.written else []
        places = [(v, place_of(v.fake), _layout(v.fake)) for v in _pick(facts.written, args, kwargs)]
        with torch.no_grad() if unseen else contextlib.nullcontext():
            out = self._execute(facts, given_args, given_kwargs, (args, kwargs), inputs, key)
        if facts.squeezes and inputs[0].fake._has_symbolic_sizes_strides:
            self._watch_squeeze(inputs[0].fake, args[1:])
        moved = [(value, layout) for value, old, layout in places if place_of(value.fake) != old]
        for value, layout in moved:
            self._freeze(value, *layout)
        written = self._written(facts, args, kwargs, secret, zip(inputs, objects, versions, strict=True))
        unbacked = self.factory.unbacked_bindings(out)
        if key is not None and facts.repeatable and not written and unbacked is None:
            recipe = results.learn(self._keys, inputs, out)
            if recipe is not None:
                facts.recipes[key] = recipe
        if out is not None and not written and unbacked is None and not _has_tensor(out):
            return out  # a question about metadata, answered
        if not inputs and facts.has_dtype and isinstance(out, torch.Tensor):
            kwargs = {**kwargs, "dtype": out.dtype}  # the default is that of the trace
        op = self._append("call_function", facts.func, args, kwargs)
        op.writes = tuple(dict.fromkeys(written))
        op.tracked = tuple(tracked)
        op.unbacked = unbacked
        op.outputs = self._register(out, op)
        if moved:
            self.follow([t for t in flat(given) if isinstance(t, torch.Tensor)], objects, str(facts.func))
        return out

    def _execute(self, facts: _OpFacts, args: Any, kwargs: Any, lifted: Any, inputs: list[Value], key: Any) -> Any:
        """What torch returns for fake tensors."""
        if facts.in_place and self._only_values_change(facts, args[0], lifted, inputs, key):
            torch.autograd.graph.increment_version(args[0])
            return args[0]
        self.running = facts.func
        free = facts.convolves and not any(isinstance(n, torch.SymInt) for n in args[0].size()[1:2])  # not the channels
        with self.factory.shape_env.suppress_guards() if free else contextlib.nullcontext():
            out = run_op(self.factory.mode, facts.func, args, kwargs)
        self.running = None
        return out

    def _only_values_change(self, facts: _OpFacts, t: torch.Tensor, lifted: Any, inputs: list[Value], key: Any) -> bool:
        """Whether an op in place leaves no trace on the fake tensor that it writes but in its version counter."""
        if t.is_inference():
            return False
        if facts.func in ACTIVATIONS:
            return t.is_floating_point() and not (t.requires_grad and _grad_enabled() and (self.exact or t.is_leaf))
        if _grad_enabled() and any(v.fake.requires_grad for v in inputs):
            return False
        args, kwargs = lifted
        if any(v.storage == args[0].storage and v is not args[0] for v in inputs):
            return False  # they may overlap
        quiet = facts.quiet.get(key)
        if quiet is None:
            quiet = rules.changes_only_values(self.factory, facts.func, args, kwargs, inputs)
            if key is not None:
                facts.quiet[key] = quiet
        return quiet

    def _written(self, facts: _OpFacts, args: Any, kwargs: Any, secret: tuple[str, ...], read: Any) -> list[Value]:
        """What the op wrote: by its schema, by what is known of it, and by the version counters of what it read."""
        written = _pick(facts.written, args, kwargs)
        written += _pick(tuple(p for p in facts.positions if p[1] in secret), args, kwargs)
        said = {v.storage for v in written}  # views of these have the same version counter
        changed = [value for value, t, old in read if _version(t) != old and value.storage not in said]
        return written + changed

    def _with_fakes(self, x: Any) -> Any:
        """The arguments as they came, with fake tensors for real ones. The objects count: some ops change them."""
        if isinstance(x, torch.Tensor):
            return x if isinstance(x, FakeTensor) and x.fake_mode is self.factory.mode else self._by_id[id(x)].fake
        if isinstance(x, (list, tuple)):
            return type(x)([self._with_fakes(item) for item in x])
        if isinstance(x, dict):
            return {name: self._with_fakes(item) for name, item in x.items()}
        return x

    def _watch_squeeze(self, t: torch.Tensor, dims: tuple[Any, ...]) -> None:
        """Calls with size 1 would lose a dimension here."""
        for d in flat(dims) if dims else range(t.dim()):
            if isinstance(t.size(d), torch.SymInt):
                self.factory.shape_env.take_for_more_than_one(t.size(d))

    def _freeze(self, value: Value, offset: Any, size: Any, stride: Any, dtype: Any) -> None:
        """A tensor got another shape in place: what the tape says of it before that keeps the shape before."""
        changed = value.fake
        with without_dispatch(), torch.no_grad():
            before = self.factory.fresh(size, stride, dtype, changed.device, changed.requires_grad)
        value.key = None
        for same in self._by_storage.get(value.storage, ()):
            if same.fake is changed:
                same.fake = before
                same.offset = offset
        self._by_id[id(changed)] = value

    def _repeat(self, facts: _OpFacts, recipe: results.Recipe, args: Any, kwargs: Any, inputs: list[Value]) -> Any:
        """Make the results that equal arguments gave before."""
        op = self._append("call_function", facts.func, args, kwargs)
        container, parts = recipe
        values = []
        fakes = [v.fake for v in inputs]
        with without_dispatch():
            for slot, part in enumerate(parts):
                fake = part.make(self.factory, fakes)
                if isinstance(part, results.Same):
                    old = inputs[part.base]
                    value = Value(fake, op, slot, old.storage, old.key)
                    value.autograd_placeholder = old.autograd_placeholder
                else:
                    value = Value(fake, op, slot, fake.untyped_storage()._cdata, part.key)
                    value.autograd_placeholder = part.requires_grad
                self._by_id[id(fake)] = value
                self._by_storage.setdefault(value.storage, []).append(value)
                values.append(value)
        if container is None:
            op.outputs = values[0]
            if not inputs and facts.has_dtype:
                op.kwargs = {**kwargs, "dtype": values[0].fake.dtype}
            return values[0].fake
        op.outputs = container(values)
        return container([v.fake for v in values])

    def _prepare_write(self, facts: _OpFacts, args: Any, kwargs: Any, inputs: list[Value]) -> bool:
        """Before autograd sees a write: give results made from recipes the history that it expects.

        True where autograd needs not see it: all tensors in the memory have a history before and after.
        """
        if self.exact or not _grad_enabled() or not any(v.fake.requires_grad for v in inputs):
            return False
        written = _pick(facts.written, args, kwargs)
        if facts.in_place and all(_has_history(v) for w in written for v in self._by_storage.get(w.storage, ())):
            return True
        for value in written:
            same_memory = self._by_storage.get(value.storage, ())
            if any(v.fake is not value.fake for v in same_memory):
                raise Retrace("an op writes to a view of a tensor that requires grad", exact_autograd=True)
            if any(v.autograd_placeholder for v in same_memory):
                self.factory.give_history(value.fake)
            for v in same_memory:
                v.autograd_placeholder = False
        return False

    def resize_storage(self, storage: torch.UntypedStorage, size: int) -> bool:
        """Give the memory of a known tensor another size in bytes; False where no known tensor lies in it."""
        value = next(iter(self._by_storage.get(storage._cdata, ())), None)
        if value is not None:
            torch.ops.inductor.resize_storage_bytes_(value.fake, size)
        return value is not None

    def on_higher_order(self, hop: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch.cond and its kind."""
        if hop in INLINED:
            return self._run_callable(args[0], args[1:])
        if hop not in FORMS or kwargs:
            raise UnsupportedOpError(
                "a higher-order op that is not recorded" + (f" with {', '.join(kwargs)}" if hop in FORMS else ""),
                op=str(hop),
                **self.where(),
                hint="write the branch or loop so that Python decides it",
            )
        return BodyRecorder(self, hop, args, self._run_callable).run()

    def _run_callable(self, fn: Any, args: Any) -> Any:
        """Call what a higher-order op was given, with the recorder on; graphs node by node, which is no module call."""
        run = self.run_graph if isinstance(fn, torch.fx.GraphModule) else lambda fn, args: fn(*args)
        return dispatch.with_mode(self.mode, lambda: run(fn, args))

    def _device(self, args: Any, kwargs: Any) -> str:
        for a in (*args, *kwargs.values()):
            for t in a if isinstance(a, (list, tuple)) else (a,):
                if isinstance(t, torch.Tensor):
                    return t.device.type
        return "cpu"


def _layout(t: torch.Tensor) -> tuple[Any, ...]:
    return (
        (t.storage_offset(), t.size(), t.stride(), t.dtype) if t.layout is torch.strided else (0, t.size(), (), t.dtype)
    )


def _version(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _has_history(value: Value) -> bool:
    """Whether autograd would let eager write to this result of an op, and it requires grad already."""
    op = value.op
    single = not isinstance(op.outputs, (list, tuple))  # it refuses writes to one of several views
    return value.fake.requires_grad and op.kind == "call_function" and op.grad and single


def _pick(written: tuple[tuple[int, str], ...], args: Any, kwargs: Any) -> list[Value]:
    """The values that stand at the written positions."""
    found: list[Value] = []
    for position, name in written:
        a = args[position] if position < len(args) else kwargs.get(name)
        found += [v for v in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(v, Value)]
    return found


def _has_tensor(out: Any) -> bool:
    if isinstance(out, (list, tuple)):
        return any(isinstance(t, torch.Tensor) for t in out)
    return isinstance(out, torch.Tensor)
