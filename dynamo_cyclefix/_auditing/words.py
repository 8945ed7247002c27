"""Words for objects and references.  No method of what is described is called: it is garbage."""

import collections
import os
import sys
import types
from typing import Any

LINKS: dict[str, Any] = {  # past any override in a subclass
    name: vars(BaseException)[name]
    for name in ("__traceback__", "__cause__", "__context__", "args")
}
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    types.TracebackType: ("tb_frame", "tb_next"),
    types.FrameType: ("f_back", "f_trace"),
    types.CellType: ("cell_contents",),
    types.FunctionType: ("__closure__", "__defaults__", "__kwdefaults__", "__dict__"),
    types.MethodType: ("__self__", "__func__"),
}
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
OPTIMIZED = 1  # inspect.CO_OPTIMIZED


def is_exception(obj: object) -> bool:
    return issubclass(type(obj), BaseException)


def exception_text(error: object) -> str:
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    args = LINKS["args"].__get__(error)
    lines = args[0].splitlines() if args and type(args[0]) is str else []
    return f"{name}: {lines[0][:120]}" if lines else name


def names_of(frame: types.FrameType, held: object, beyond: object) -> list[tuple[str, str]]:
    """Kind and name of each local or cell by which `frame` refers to `held`."""
    code = frame.f_code
    cells = {*code.co_cellvars, *code.co_freevars}
    values = (
        frame.f_locals
    )  # a snapshot or a proxy, unless the code is a module's or a class body's
    names: list[tuple[str, str]] = []
    if code.co_flags & OPTIMIZED or type(values) is dict:
        for name, value in values.items():
            if name in cells:
                if type(held) is types.CellType and value is held.cell_contents:
                    names.append(("cell", name))
            elif value is held:
                names.append(("local", name))
    if not names and type(held) is dict:  # the dict of the frame's locals, asked for or its own
        names = [("local", str(key)) for key, value in held.items() if value is beyond]
    return names or [("reference", edge_text(frame, held))]


def path_text(path: list[Any], known: dict[int, str]) -> tuple[str, ...]:
    steps = [node_text(path, 0)]
    attribute = False
    for i in range(1, len(path)):
        edge = known.get(i - 1) or edge_text(path[i - 1], path[i])
        if edge == "__dict__" and i < len(path) - 1:
            attribute = True
            continue
        if attribute:
            edge, attribute = f"attribute {edge.strip('[]')}", False
        step = f"{edge}: {node_text(path, i)}"
        if is_traceback(path[i - 1]) and is_traceback(path[i]):
            edge = steps.pop().rpartition(": ")[0]
            step = f"{edge}: {node_text(path, i)}" if edge else node_text(path, i)
        steps.append(step)
    return tuple(steps)


def node_text(path: list[Any], i: int) -> str:
    obj = path[i]
    if is_exception(obj):
        return f"exception {exception_text(obj)}"
    if is_traceback(obj):
        return f"traceback, line {obj.tb_lineno}"
    if type(obj) is types.FrameType:
        return f"frame of {qualname(obj.f_code)}, {obj.f_code.co_filename}"
    if type(obj) is types.FunctionType:
        return f"function {obj.__qualname__}"
    return f"{type(obj).__qualname__} object"


def edge_text(source: Any, target: object) -> str:
    """How `source` refers to `target`."""
    if is_exception(source):
        if is_traceback(target):
            return "__traceback__"
        for name, descriptor in LINKS.items():
            if descriptor.__get__(source) is target:
                return name
    for name in _ATTRIBUTES.get(type(source), ()):
        if getattr(source, name, None) is target:
            return name
    for kind in (list, tuple, collections.deque):
        if issubclass(type(source), kind):
            for i, item in enumerate(kind.__iter__(source)):
                if item is target:
                    return f"[{i}]"
    if issubclass(type(source), dict):
        for key, value in dict.items(source):
            if value is target:
                return f"[{key!r}]" if type(key) in (str, int) else f"[{type(key).__qualname__}]"
    try:
        attributes = object.__getattribute__(source, "__dict__")
    except Exception:
        attributes = None
    if attributes is target:
        return "__dict__"
    if type(attributes) is dict:
        for name, value in attributes.items():
            if value is target:
                return f"attribute {name!r}"
    for base in type(source).__mro__:
        for name, member in vars(base).items():
            if type(member) is types.MemberDescriptorType:  # a slot
                try:
                    if member.__get__(source) is target:
                        return f"attribute {name!r}"
                except AttributeError:
                    pass
    return "a reference"


def is_traceback(obj: object) -> bool:
    return type(obj) is types.TracebackType


def qualname(code: types.CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # new in Python 3.11


def owner_of(obj: Any) -> str:
    """Whose an object is: that of the code it runs, of the module it is, or of its type."""
    if type(obj) is types.FrameType:
        return owner(obj.f_code, str(obj.f_globals.get("__name__")))
    if type(obj) is types.FunctionType:
        return owner(obj.__code__, str(obj.__globals__.get("__name__")))
    module = obj if type(obj) is types.ModuleType else sys.modules.get(str(type(obj).__module__))
    namespace = vars(module) if isinstance(module, types.ModuleType) else {}
    name, file = namespace.get("__name__", "builtins"), namespace.get("__file__")
    if name == "builtins":
        return "user"  # of a container nobody can tell
    if type(file) is not str:
        file = "" if name == "__main__" else "<frozen >"
    return _owner_of_file(file, name)


def owner(code: types.CodeType, module: str) -> str:
    # Dynamo's resume functions have the file and the globals of the user's function.
    if code.co_name.startswith("torch_dynamo_resume_in_"):
        return "torch"
    return _owner_of_file(code.co_filename, module)


def _owner_of_file(file: str, module: str) -> str:
    parts = file.replace("\\", "/").split("/")
    if module.partition(".")[0] == "torch":
        return "torch"
    if "site-packages" in parts or "dist-packages" in parts:
        return "library"
    if file.startswith((_STANDARD_LIBRARY, "<frozen ")):
        return "standard library"
    return "user"
