"""Alias sets alone: what a write to one tensor makes of the others in its memory, on real tensors.

a base and views of it, as recorded -> writes and reads of the alias set -> the same as writes and reads in eager
"""

import itertools

import pytest
import torch

from scopetrace.containers.structure import map_structure
from scopetrace.errors import FunctionalizationError
from scopetrace.functionalization.alias_set import AliasSet, ViewMeta
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import Op, Value

aten = torch.ops.aten
VIEWS = [
    (aten.select.int, (0, 1)),
    (aten.select.int, (-1, 0)),
    (aten.slice.Tensor, (0, 1)),
    (aten.slice.Tensor, (-1, 0, 4, 2)),
    (aten.t.default, ()),
    (aten.view.default, ((-1,),)),
    (aten.diagonal.default, ()),
    (aten.detach.default, ()),
]


class RealOps:
    """In the place of an Emitter: runs each op at once, on the real tensors of its operands."""

    def __init__(self):
        self.count = 0

    def simplifying(self, origin, *, grad=None):
        return self._run

    def _run(self, func, *args, **kwargs):
        self.count += 1
        return value(func(*map_structure(lambda v: v.fake.clone(), args, Value), **kwargs))


def op(*outputs):
    return Op("call_function", None, (), {}, outputs, Scope("", ""), None, ())


def value(tensor):
    made = Value(tensor, 0, 0, None)
    op(made)
    return made


class Memory:
    """One memory in eager, and as an alias set."""

    def __init__(self, *roots):
        self.ops = RealOps()
        self.aliases = AliasSet(self.ops, bring=None)
        self.eager = {}
        self.aliases.roots = [self._alias(t) for t in roots]
        for root in self.aliases.roots:
            self.aliases.define(root, value(root.fake.clone()))

    def view(self, parent, func, args):
        """A new alias; None where eager has no such view."""
        try:
            made = func(self.eager[parent], *args)
        except (RuntimeError, IndexError):
            return None
        alias = self._alias(made)
        self.aliases.link(alias, ViewMeta(parent, func, args))
        return alias

    def write(self, alias, number):
        new = torch.full_like(self.eager[alias], number)
        self.eager[alias].copy_(new)
        self.aliases.write(alias, value(new), op())

    def read(self, alias):
        return self.aliases.read(alias, op()).fake

    def assert_as_eager(self):
        for alias, tensor in self.eager.items():
            torch.testing.assert_close(self.read(alias), tensor)

    def _alias(self, tensor):
        alias = value(tensor)
        self.eager[alias] = tensor
        return alias


def grid():
    return Memory(torch.arange(16.0).view(4, 4))


def trees():
    """A base with two views: both of the base, or the second one of the first."""
    for first, second, nested in itertools.product(VIEWS, VIEWS, (False, True)):
        memory = grid()
        base = memory.aliases.roots[0]
        a = memory.view(base, *first)
        b = a and memory.view(a if nested else base, *second)
        if b is not None:
            yield memory, (base, a, b)


def test_two_writes_anywhere_in_a_tree_of_two_views():
    count = 0
    for where in itertools.product(range(3), repeat=2):
        for memory, aliases in trees():
            for number, target in enumerate(where, 100):
                memory.write(aliases[target], number)
            memory.assert_as_eager()
            count += 1
    assert count > 800


def test_a_read_between_two_writes_changes_nothing():
    for read, where in itertools.product(range(3), itertools.product(range(3), repeat=2)):
        for memory, aliases in trees():
            memory.write(aliases[where[0]], 100)
            memory.read(aliases[read])
            memory.write(aliases[where[1]], 101)
            memory.assert_as_eager()


def test_a_write_makes_the_written_alias_and_its_ancestors_current_and_others_stale():
    memory = grid()
    base = memory.aliases.roots[0]
    row = memory.view(base, aten.select.int, (0, 1))
    part = memory.view(row, aten.slice.Tensor, (0, 1))
    other = memory.view(base, aten.t.default, ())
    memory.read(other)
    memory.write(part, 100)
    assert memory.aliases.version == 1
    assert [memory.aliases.current(v) is not None for v in (base, row, part, other)] == [True, True, True, False]
    memory.read(other)
    assert memory.aliases.current(other) is not None


def test_what_is_current_is_read_without_an_op():
    memory = grid()
    base = memory.aliases.roots[0]
    row = memory.view(base, aten.select.int, (0, 1))
    memory.write(row, 100)
    before = memory.ops.count
    memory.read(row)
    memory.read(base)
    assert memory.ops.count == before


def test_another_name_of_one_tensor_is_that_tensor():
    memory = grid()
    base = memory.aliases.roots[0]
    name = memory._alias(memory.eager[base])
    memory.aliases.link(name, ViewMeta(base))
    memory.write(name, 100)
    assert memory.aliases.same(name) is base
    memory.assert_as_eager()


def test_roots_that_share_memory_are_read_from_a_row():
    whole = torch.arange(10.0)
    memory = Memory(whole[:6], whole[4:])
    left, right = memory.aliases.roots
    part = memory.view(right, aten.slice.Tensor, (0, 1, 4))
    for number, target in enumerate((left, part, right, left), 100):
        memory.write(target, number)
        memory.assert_as_eager()


def test_a_root_whose_elements_share_memory():
    memory = Memory(torch.arange(3.0).expand(2, 3))
    (base,) = memory.aliases.roots
    memory.write(memory.view(base, aten.select.int, (0, 1)), 100)
    memory.assert_as_eager()


def test_a_new_value_of_the_whole_storage_leaves_no_other_root():
    memory = grid()
    (base,) = memory.aliases.roots
    new = value(torch.zeros(7))
    memory.aliases.replace(base, new)
    assert memory.aliases.read(base, op()) is new
    assert memory.aliases.roots == [base]


def test_roots_of_different_dtypes_are_refused():
    memory = Memory(torch.zeros(4), torch.zeros(4, dtype=torch.int32))
    with pytest.raises(FunctionalizationError, match="different dtypes"):
        memory.aliases.write(memory.aliases.roots[0], value(torch.ones(4)), op())
