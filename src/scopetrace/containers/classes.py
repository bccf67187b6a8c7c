"""Classes and other Python objects by name, for traces that are read from a file.

Data flow:
    class -> module and qualified name -> the class, where its module is imported; else a `NotImported` of its name
    a template with these -> `with_imports`, before a call of the trace -> the same with real classes and objects

So reading a file imports nothing, and a trace prints without the model's code. With `Fields` in their place results
need none of these classes.
"""

from __future__ import annotations

import enum
import pkgutil
import sys
import types
from collections.abc import Iterator
from typing import Any

from scopetrace.containers.structure import OpaqueContainer, close_container, instantiate, map_structure, unflattened
from scopetrace.errors import TraceFileError


class NotImported(type):
    """The class of classes that stand for those whose module is not imported; they have their names."""


def class_of_name(module: str, qualname: str, bases: tuple[type, ...] = (), members: Any = None) -> type:
    """The class of this name, where its module is imported and it derives from `bases`; else a `NotImported`."""
    kind = object_named(module, qualname)
    if isinstance(kind, type) and all(issubclass(kind, base) for base in bases):
        return kind
    names = {"__module__": module, "__qualname__": qualname}
    return NotImported(qualname.rpartition(".")[2], bases, {**(members or {}), **names})


def object_named(module: str, qualname: str) -> Any:
    """The object of this name; None where its module is not imported."""
    item: Any = sys.modules.get(module)
    for part in qualname.split("."):
        item = getattr(item, part, None)
    return item


class Fields:
    """What a result of a class that is not imported holds: its fields, as attributes, and as items by name or position.

    Also for a named tuple, whose file does not say that it is one: iteration gives names, as that of a dict.
    """

    def __getitem__(self, key: Any) -> Any:
        return vars(self)[key] if isinstance(key, str) else tuple(vars(self).values())[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))

    def __repr__(self) -> str:
        return f"Fields({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def with_fields(template: Any) -> Any:
    """A template of a loaded trace: `Fields` for what is of classes that are not imported, texts for other objects."""
    return map_structure(lambda x: x.name or x.text, template, NamedObject, close=_fields)


def _fields(template: Any, items: list[Any]) -> Any:
    if not (isinstance(template, OpaqueContainer) and isinstance(template.kind, NotImported)):
        return close_container(template, items)
    return OpaqueContainer(Fields, None, ["." + key.strip("[]'\".") for key in template.keys], items)


class NamedObject:
    """In a template of a loaded trace, an object that is neither tensor nor container: it is made before a call.

    Attributes:
        kind: its class; `object` where it has a name.
        attributes: those of a plain object; None of one of which the file has only the class and text.
        text: what is shown of it.
        module, name: of a function, class or member of an enum, where it is found; name is None of other objects.
    """

    def __init__(
        self, kind: type, attributes: dict[str, Any] | None, text: str, module: str = "", name: str | None = None
    ) -> None:
        self.kind, self.attributes, self.text, self.module, self.name = kind, attributes, text, module, name

    def imported(self) -> Any:
        """The object. Raises TraceFileError where it cannot be made."""
        if self.name is not None:
            item = imported_object(self.module, self.name)
            known = (type, enum.Enum, types.FunctionType, types.BuiltinFunctionType)
            if isinstance(item, types.ModuleType) or not isinstance(item, known):
                raise TraceFileError(f"{self.module}.{self.name} is no function, class or member of an enum")
            return item
        kind = imported_class(self.kind)
        if self.attributes is None:
            raise TraceFileError(f"the file does not have this {kind.__qualname__}; trace the model again for it")
        attributes = [with_imports(value) for value in self.attributes.values()]
        plain = OpaqueContainer(kind, None, [f".{name}" for name in self.attributes], attributes)
        return instantiate(lambda leaf: leaf, plain, ())

    def __repr__(self) -> str:
        return self.text


def imported_object(module: str, qualname: str) -> Any:
    """The object of this name. Imports its module; raises TraceFileError where there is none."""
    try:
        return pkgutil.resolve_name(f"{module}:{qualname}")
    except (ImportError, AttributeError, ValueError) as error:
        raise TraceFileError(
            f"a call of this trace needs {module}.{qualname}, which cannot be imported here: {error}; "
            "make the module that defines it importable under the same name, or, of a result, take its fields: "
            "st.load(path, plain_outputs=True)"
        ) from error


def imported_class(kind: type) -> type:
    """The real class of a `NotImported`; others as they are."""
    if not isinstance(kind, NotImported):
        return kind
    real = imported_object(kind.__module__, kind.__qualname__)
    if not isinstance(real, type):
        raise TraceFileError(f"{kind.__module__}.{kind.__qualname__} is no class")
    return real


def with_imports(template: Any) -> Any:
    """A template of a loaded trace with real classes and objects; TraceFileError where one cannot be imported."""
    return map_structure(NamedObject.imported, template, NamedObject, close=_imported)


def _imported(template: Any, items: list[Any]) -> Any:
    if not isinstance(template, OpaqueContainer):
        return close_container(template, items)
    children = list(zip(template.keys, items, strict=True))
    return unflattened(imported_class(template.kind), with_imports(template.context), children)
