"""`TARGET`: loads the model named `package.module:name`, `timm:NAME`, `torchvision:NAME` or `hf:NAME`."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch

from scopetrace.cli import ModelError
from scopetrace.cli.inputs import Input
from scopetrace.errors import UsageError
from scopetrace.ir.scopes import Frame, user_line
from scopetrace.sources import SCOPETRACE

FORM = "package.module:name, timm:NAME, torchvision:NAME or hf:NAME"


def load_model(target: str) -> torch.nn.Module:
    """The model that a TARGET names.

    Raises UsageError when the target is wrong, and ModelError when making the model raises.
    """
    source, colon, name = target.partition(":")
    if not colon or not source or not name:
        raise UsageError(f"TARGET {target!r} is incomplete: write {FORM}")
    if "/" in source or source.endswith(".py"):
        module = source.removesuffix(".py").strip("./").replace("/", ".")
        raise UsageError(f"TARGET {target!r} names a file: write the module as in an import, {module}:{name}")
    declare_missing_ops()
    libraries = {"timm": _from_timm, "torchvision": _from_torchvision, "hf": _from_transformers}
    return libraries[source](name) if source in libraries else _from_module(target, source, name)


def default_inputs(model: torch.nn.Module) -> list[Input]:
    """Inputs that a model declares for itself, as those of timm, transformers and Lightning do; none for others."""
    declared = getattr(model, "default_cfg", None)
    size = declared.get("input_size") if isinstance(declared, dict) else None
    if size:
        return [Input("0", torch.zeros(1, *size))]
    config: Any = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    dummies = getattr(model, "dummy_inputs", getattr(model, "example_input_array", None))
    if inspect.ismethod(dummies):
        dummies = dummies()
    if name == "pixel_values" and hasattr(config, "image_size"):
        sides = config.image_size if isinstance(config.image_size, (list, tuple)) else [config.image_size] * 2
        return [Input(name, torch.zeros(1, getattr(config, "num_channels", 3), *sides))]
    if isinstance(dummies, dict):
        return [Input(key, value) for key, value in dummies.items()]
    if isinstance(dummies, torch.Tensor):
        dummies = [dummies]
    return [Input(str(i), value) for i, value in enumerate(dummies)] if isinstance(dummies, (list, tuple)) else []


# -------------------------------------------------------------------- libraries of models


def _from_timm(name: str) -> torch.nn.Module:
    timm = _import(f"timm:{name}", "timm")
    if not timm.is_model(name):
        raise UsageError(f"timm has no model {name!r}: {_near('timm', name, timm.list_models())}")
    return _make(f"timm:{name}", lambda: timm.create_model(name, pretrained=False))


def _from_torchvision(name: str) -> torch.nn.Module:
    models = _import(f"torchvision:{name}", "torchvision.models")
    if name not in models.list_models():
        raise UsageError(f"torchvision has no model {name!r}: {_near('torchvision', name, models.list_models())}")
    # Detection and segmentation models download a backbone unless told not to.
    builder = inspect.signature(models.get_model_builder(name)).parameters
    options = {option: None for option in ("weights", "weights_backbone") if option in builder}
    return _make(f"torchvision:{name}", lambda: models.get_model(name, **options))


def _from_transformers(name: str) -> torch.nn.Module:
    """A model with random weights: of a kind (`bert`), a class (`BertForMaskedLM`), or a local config file."""
    transformers = _import(f"hf:{name}", "transformers")
    path = Path(name)
    cls: Any = getattr(transformers, name, None)
    is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    if path.exists():
        config = _make(f"hf:{name}", lambda: transformers.AutoConfig.from_pretrained(path))
        architecture = getattr(transformers, next(iter(config.architectures or ()), ""), None)
        return _make(f"hf:{name}", lambda: (architecture or transformers.AutoModel.from_config)(config))
    if is_model:
        return _make(f"hf:{name}", lambda: cls(cls.config_class()))
    kinds = list(transformers.CONFIG_MAPPING)
    if name not in kinds:
        raise UsageError(f"transformers has no model {name!r}, and there is no such file: {_near('hf', name, kinds)}")
    return _make(f"hf:{name}", lambda: transformers.AutoModel.from_config(transformers.AutoConfig.for_model(name)))


def _near(library: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3) or known[:3]
    return f"write {' or '.join(f'{library}:{other}' for other in near)}"


# Wheels of torchvision from PyPI are built for a CUDA torch. On a CPU-only one their operators do not load, and `import
# torchvision` (so also `import timm`, and parts of transformers) fails with "operator torchvision::nms does not exist".

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


@functools.cache
def declare_missing_ops() -> torch.library.Library | None:
    """Declare the ops that torchvision needs at import, without kernels, where its compiled operators do not load.

    The declarations last as long as the result, which the cache keeps. A model that calls the ops cannot run.
    """
    package = importlib.util.find_spec("torchvision")
    if package is None:
        return None
    binary = PathFinder.find_spec("_C", package.submodule_search_locations)  # as torchvision itself does at import
    if binary is not None and binary.origin is not None:
        with contextlib.suppress(OSError):
            torch.ops.load_library(binary.origin)
    missing = [schema for name, schema in _SCHEMAS.items() if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in missing:
        library.define(schema)
    return library


# -------------------------------------------------------------------- one's own modules


def _from_module(target: str, module_name: str, name: str) -> torch.nn.Module:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    value = _import(target, module_name, FORM)
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            raise UsageError(f"TARGET {target!r}: {_no_attribute(value, part)}") from error
        except Exception as error:  # a property, or __getattr__ of a module
            raise UsageError(f"TARGET {target!r}: {part} raised {_raised(error)}") from error
    if isinstance(value, torch.nn.Module):
        return value
    if isinstance(value, type) and not issubclass(value, torch.nn.Module):
        raise UsageError(f"TARGET {target!r} is a class, but no torch.nn.Module: name a module or what makes one")
    if not callable(value):
        kind = type(value).__name__
        raise UsageError(f"TARGET {target!r} has the type {kind}: name a torch.nn.Module or what makes one")
    try:
        with contextlib.suppress(ValueError):  # built-in callables have no signature
            inspect.signature(value).bind()
    except TypeError as error:
        raise UsageError(f"TARGET {target!r}: {error}; name a function without arguments that makes it") from error
    model = _make(target, value)
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise UsageError(f"TARGET {target!r} returned the type {kind}: it must return a torch.nn.Module")
    return model


def _no_attribute(owner: Any, name: str) -> str:
    kind = "module" if inspect.ismodule(owner) else "class" if isinstance(owner, type) else "object"
    word = getattr(owner, "__name__", type(owner).__name__)
    public = {key: x for key, x in getattr(owner, "__dict__", {}).items() if not key.startswith("_")}
    near = difflib.get_close_matches(name, public, n=3)
    if not near:  # the models that it holds, and the classes that a module defines itself
        is_class = {key: inspect.isclass(x) and x.__module__ == word for key, x in public.items()}
        near = [key for key, x in public.items() if isinstance(x, torch.nn.Module) or is_class[key]][:5]
    return f"the {kind} {word} has no {name!r}" + (f"; it has {', '.join(near)}" if near else "")


# -------------------------------------------------------------------- what goes wrong


def _import(target: str, name: str, write: str | None = None) -> Any:
    """A module. Raises UsageError where it is not there, saying what to `write` or to install, or where it raises."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing, problem = error.name or name, f"importing {name} raised {_raised(error)}"
        if write is not None and f"{name}.".startswith(f"{missing}."):
            problem = f"there is no module {missing!r} here or among the installed packages; write {write}"
        elif f"{name}.".startswith(f"{missing}.") or not _is_installed(missing):
            problem = _install(name, missing)
        raise UsageError(f"TARGET {target!r}: {problem}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"TARGET {target!r}: importing {name} raised {_raised(error)}") from error


def _make(target: str, factory: Callable[[], Any]) -> Any:
    """What a factory gives. Raises UsageError where it needs a package, ModelError where it raises anything else."""
    try:
        return factory()
    except (Exception, SystemExit) as error:
        needs = error.name if isinstance(error, ModuleNotFoundError) else None  # transformers sets none for its own
        if needs is None or _is_installed(needs):
            raise model_raised(f"making {target}", error) from error
        raise UsageError(f"TARGET {target!r}: {_install(target, needs)}") from error


def _install(wanted_by: str, module: str) -> str:
    package = module.partition(".")[0]
    who = f"{package} is" if wanted_by.partition(".")[0] == package else f"{wanted_by} needs {package}, which is"
    return f"{who} not installed: pip install {package}"


def _is_installed(module: str) -> bool:
    """Whether the package of a module is there, so that the module itself is what it lacks."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def error_text(error: BaseException) -> str:
    """The class of an exception and the first line of its message."""
    message = str(error).partition("\n")[0]
    return type(error).__name__ + (f": {message}" if message else "")


def model_raised(what: str, error: BaseException) -> ModelError:
    """An error with the message of a model's exception, and where it was raised.

    The places are the notes that tracing added to the exception; else the user's line.
    """
    notes = [note.removeprefix("scopetrace: ") for note in getattr(error, "__notes__", ())]
    places = [note for note in notes if note.startswith("while tracing ")]
    is_refused_op = bool(places) and type(error) is RuntimeError  # as torch's kernels raise it
    frames = _frames(error)
    if frames and frames[-1][0].co_filename.startswith(SCOPETRACE) and not is_refused_op:
        code, line = frames[-1]
        at = f"at {code.co_filename}:{line}, in {code.co_name}"
        return ModelError(f"an error in scopetrace itself, please report it: {error_text(error)}\n  {at}")
    return ModelError("\n  ".join([f"{what} raised {error_text(error)}", *(places or _place(error))]))


def _raised(error: BaseException) -> str:
    return ", ".join([error_text(error), *_place(error)])


def _frames(error: BaseException) -> list[Frame]:
    return [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]


def _place(error: BaseException) -> list[str]:
    """`at file.py:12, in build: return Net(0)` where the traceback has a line of the user's."""
    line = user_line([f for f in _frames(error) if not f[0].co_filename.startswith((*SCOPETRACE, "<frozen"))])
    return [f"at {line}"] if line else []
