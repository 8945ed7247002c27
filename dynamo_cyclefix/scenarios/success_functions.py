"""Functions in calls that succeed: closures, recompiles, dynamic shapes, code made at run time."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from typing import Any

import torch
from torch._dynamo import config

from ._recording import calls, compiled, graphs, recording
from ._registry import scenario
from ._watch import watch


class Local:
    """An object of the user's own, that compiled code reads."""

    def __init__(self, value: float = 2.0) -> None:
        self.value = value


@scenario("self-referring-closures")
def plain_call() -> object:
    """One graph, no break."""
    return calls(compiled(lambda x: x.sin() + 1))


@scenario("self-referring-closures")
def plain_call_fullgraph() -> object:
    """One graph that must be whole."""
    return calls(compiled(lambda x: x.sin() + 1, fullgraph=True))


@scenario("self-referring-closures")
def function_and_its_compiled_form() -> object:
    """The function and what ``torch.compile`` made of it are dropped."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    return calls(watch(compiled=compiled(watch(function=run))))


@scenario("self-referring-closures")
def closure_cell_is_read() -> object:
    """A compiled function reads an object and a tensor from its cells."""
    local, weight = watch(object=Local(), cell=torch.ones(1))

    @compiled
    def run(x: torch.Tensor) -> Any:
        return x * local.value + weight

    return calls(run)


@scenario("symbol-bindings", "self-referring-closures")
def closure_cell_is_written() -> object:
    """A compiled function writes a cell of the function around it."""
    total: Any = 0

    def run(x: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total = watch(cell=x.sum())
        return x + 1

    return calls(compiled(run)), total


@scenario("translator-state", "self-referring-closures")
def closure_made_and_returned() -> object:
    """A compiled function makes a closure and returns it."""

    def run(x: torch.Tensor) -> Any:
        y = x.sin()
        return lambda z: y + z

    x = watch(input=torch.ones(3))
    add = watch(function=compiled(run)(x))
    return add(x)


@scenario("self-referring-closures")
def closure_calls_itself() -> object:
    """A compiled function makes a nested function that calls itself."""

    def run(x: torch.Tensor) -> torch.Tensor:
        def power(x: torch.Tensor, n: int) -> torch.Tensor:
            return x if n == 0 else power(x, n - 1) * x

        return power(x, 3)

    return calls(compiled(run))


@scenario("self-referring-closures")
def partial_of_a_function() -> object:
    """A ``functools.partial`` is compiled."""
    local = watch(object=Local())
    return calls(compiled(functools.partial(lambda local, x: x * local.value, local)))


@scenario("self-referring-closures")
def bound_method() -> object:
    """A bound method of a user's object is compiled."""

    class Scaler(Local):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.value

    return calls(compiled(watch(object=Scaler()).run))


@scenario("self-referring-closures")
def object_with_a_property() -> object:
    """A property of a user's object is read."""

    class Scaler(Local):
        @property
        def scale(self) -> float:
            return self.value * 2

    scaler = watch(object=Scaler())
    return calls(compiled(lambda x: x * scaler.scale))


@scenario("self-referring-closures")
def object_is_made_and_returned() -> object:
    """A compiled function makes an object and returns it."""

    class Result:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    run = compiled(lambda x: Result(x.sin()))
    return calls(lambda x: watch(result=run(x)).value)


@scenario("side-effect-tables", "self-referring-closures")
def object_attribute_is_set() -> object:
    """A compiled function sets an attribute of its argument, in one whole graph."""
    local = watch(object=Local())

    def run(x: torch.Tensor, local: Any) -> torch.Tensor:
        local.value = x.sum()
        return x + local.value

    run_compiled = compiled(run, fullgraph=True)
    return calls(lambda x: run_compiled(x, local)), local.value


@scenario("side-effect-tables", "self-referring-closures")
def object_attribute_is_deleted() -> object:
    """A compiled function sets an attribute and deletes it."""

    def run(x: torch.Tensor, local: Any) -> torch.Tensor:
        local.extra = x + 1
        y = local.extra * 2
        del local.extra
        return y

    run_compiled = compiled(run)
    return calls(lambda x: run_compiled(x, watch(object=Local())))


@scenario("self-referring-closures")
def list_argument_is_changed() -> object:
    """A compiled function appends to a list that it was given."""
    kept: list[torch.Tensor] = []

    def run(x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        kept.append(x + 1)
        return kept[-1] * 2

    run_compiled = compiled(run)
    return calls(lambda x: run_compiled(x, kept)), kept


@scenario("self-referring-closures")
def dictionary_argument_is_changed() -> object:
    """A compiled function stores a tensor in a dictionary that it was given."""
    kept: dict[str, torch.Tensor] = {}

    def run(x: torch.Tensor, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        kept["last"] = x + 1
        return kept["last"] * 2

    run_compiled = compiled(run)
    return calls(lambda x: run_compiled(x, kept)), kept


@scenario("symbol-bindings", "self-referring-closures")
def ordered_dictionary_is_made() -> object:
    """A compiled function makes an ordered dictionary and a deque."""

    def run(x: torch.Tensor) -> torch.Tensor:
        table = collections.OrderedDict(a=x, b=x + 1)
        table.move_to_end("a")
        queue = collections.deque([*table.values()], maxlen=2)
        queue.append(x * 2)
        return queue[0] + queue[1]

    return calls(compiled(run))


@scenario("self-referring-closures")
def dataclass_argument() -> object:
    """A dataclass of tensors is an argument, and another one is made."""

    @dataclasses.dataclass
    class Batch:
        left: torch.Tensor
        right: torch.Tensor

    def run(batch: Batch) -> torch.Tensor:
        other = Batch(batch.right, batch.left + 1)
        return other.left * other.right

    run_compiled = compiled(run)
    return calls(lambda x: run_compiled(watch(object=Batch(x, x + 1))))


@scenario("self-referring-closures")
def global_is_written() -> object:
    """A compiled function writes a global of its module."""

    def run(x: torch.Tensor) -> torch.Tensor:
        global _steps
        _steps += 1
        return x + _steps

    return calls(compiled(run)), _steps * 0


_steps = 0


@scenario("self-referring-closures")
def recompile_for_a_type() -> object:
    """Another dtype has the function compiled again."""
    run = compiled(lambda x: x * 2)
    return calls(run), calls(lambda x: run(x.double()))


@scenario("self-referring-closures")
def recompile_for_a_constant() -> object:
    """Another string has the function compiled again."""

    def run(x: torch.Tensor, mode: str) -> torch.Tensor:
        return x * 2 if mode == "double" else x + 1

    run_compiled = compiled(run)
    return calls(lambda x: run_compiled(x, "double")), calls(lambda x: run_compiled(x, "add"))


@scenario("self-referring-closures")
def recompile_for_an_object() -> object:
    """Another object in a cell of the same code has it compiled again."""

    def make(local: Local) -> Any:
        return compiled(lambda x: x * local.value)

    return [calls(make(watch(object=Local(value)))) for value in (1.0, 2.0, 3.0)]


@scenario("self-referring-closures")
def recompile_limit_is_reached() -> object:
    """A function reaches the limit of its recompiles and runs eagerly from there on."""

    def run(x: torch.Tensor, mode: str) -> torch.Tensor:
        return x + len(mode)

    run_compiled = compiled(run)
    with config.patch(cache_size_limit=2):
        return [calls(lambda x, n=n: run_compiled(x, "a" * n)) for n in range(4)]


@scenario("self-referring-closures")
def dynamic_sizes() -> object:
    """The sizes are symbols from the first call on."""
    return calls(compiled(lambda x: x * x.shape[0] + 1, dynamic=True))


@scenario("self-referring-closures")
def dynamic_sizes_of_two_inputs() -> object:
    """Two sizes are found equal."""
    run = compiled(lambda x, y: (x + y).sum() * x.shape[0] + y.shape[0], dynamic=True)
    return calls(lambda x: run(x, watch(second=x + 1)))


@scenario("self-referring-closures")
def dynamic_size_marked() -> object:
    """A dimension is marked as dynamic."""

    def run(x: torch.Tensor) -> Any:
        torch._dynamo.mark_dynamic(x, 0)
        return run_compiled(x)

    run_compiled = compiled(lambda x: x.reshape(-1, 1) + x.shape[0])
    return calls(run)


@scenario("self-referring-closures")
def dynamic_size_branch() -> object:
    """A branch on a symbol guards it."""
    run = compiled(lambda x: x + 1 if x.shape[0] > 3 else x * 2, dynamic=True)
    return calls(run)


@scenario("symbol-bindings", "self-referring-closures")
def dynamic_sizes_and_a_break() -> object:
    """A symbol lives across a graph break."""

    def run(x: torch.Tensor) -> torch.Tensor:
        size = x.shape[0]
        y = x.sin()
        torch._dynamo.graph_break()
        return y.reshape(size, 1) * size

    return calls(compiled(run, dynamic=True))


@scenario("self-referring-closures")
def dynamic_number() -> object:
    """A number becomes a symbol at its second value."""
    run = compiled(lambda x, n: x * n)
    return [calls(lambda x, n=n: run(x, n)) for n in (2, 3, 4)]


@scenario("self-referring-closures")
def dynamic_float() -> object:
    """A float becomes a symbol at its second value."""
    run = compiled(lambda x, n: x * n)
    return [calls(lambda x, n=n: run(x, n)) for n in (2.5, 3.5, 4.5)]


@scenario("self-referring-closures")
def static_sizes() -> object:
    """Each size has a graph of its own."""
    return calls(compiled(lambda x: x * 2, dynamic=False))


@scenario("self-referring-closures")
def reset_between_calls() -> object:
    """Dynamo is reset between two calls of one compiled function."""
    run = compiled(lambda x: x * 2 + 1)
    told = calls(run)
    torch._dynamo.reset()
    return told, calls(run)


@scenario("symbol-bindings")
def collecting_after_compile() -> object:
    """Dynamo collects after each compile, as it does unless told not to."""

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y + x

    if hasattr(config, "run_gc_after_compile"):
        with config.patch(run_gc_after_compile=True):
            return calls(compiled(run))
    return calls(compiled(run))


@scenario()
def code_made_by_exec() -> object:
    """The compiled function comes from ``exec``, and breaks the graph."""
    namespace: dict[str, Any] = {"torch": torch}
    source = "def run(x):\n    y = x.sin()\n    torch._dynamo.graph_break()\n    return y + x\n"
    exec(source, namespace)
    watch(function=namespace["run"], code=namespace["run"].__code__)
    return calls(compiled(namespace["run"]))


@scenario()
def code_made_by_exec_without_a_break() -> object:
    """The compiled function comes from ``exec``, in one graph."""
    namespace: dict[str, Any] = {}
    exec("def run(x):\n    return x.sin() + x\n", namespace)
    watch(function=namespace["run"], code=namespace["run"].__code__)
    return calls(compiled(namespace["run"]))


@scenario("self-referring-closures")
def allowed_in_graph() -> object:
    """A function that is allowed in the graph stays one of its globals."""

    @torch._dynamo.allow_in_graph
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    return calls(compiled(lambda x: opaque(x) + 1))


@scenario("self-referring-closures")
def constant_result_assumed() -> object:
    """The result of a method is taken for a constant."""

    class Settings(Local):
        @torch._dynamo.assume_constant_result
        def scale(self) -> float:
            return self.value

    settings = watch(object=Settings())
    return calls(compiled(lambda x: x * settings.scale()))


@scenario("symbol-bindings", "self-referring-closures")
def numpy_argument() -> object:
    """A numpy array is an argument of a compiled function."""
    run = compiled(lambda a: a * 2 + 1)
    return [torch.from_numpy(run(watch(array=x.numpy()))) for x in (torch.ones(3), torch.ones(4))]


@scenario("self-referring-closures")
def compiled_inside_of_compiled() -> object:
    """A compiled function calls another compiled function."""
    inner = compiled(lambda x: x.sin() + 1)
    return calls(compiled(lambda x: inner(x) * 2))


@scenario("self-referring-closures")
def compiled_in_a_thread() -> object:
    """A function is compiled and called in a thread of its own."""
    run = compiled(lambda x: x * 2)
    told: list[object] = []
    thread = threading.Thread(target=lambda: told.extend(calls(run)))
    thread.start()
    thread.join()
    return told


@scenario()
def compiled_without_a_graph() -> object:
    """A function without any tensor operation is compiled."""
    run = compiled(lambda x: x)
    return calls(run)


@scenario("self-referring-closures")
def input_is_returned_in_a_structure() -> object:
    """Inputs are returned in a nested structure, as a view and as they are."""
    run = compiled(lambda x: {"all": [x, (x[1:], x + 1)]})
    return calls(lambda x: run(x)["all"][1][1])


@scenario("self-referring-closures")
def input_is_changed_in_place() -> object:
    """A compiled function changes its input in place."""
    run = compiled(lambda x: x.add_(1).mul_(2), backend="aot_eager")
    return calls(lambda x: run(watch(clone=x.clone())))


@scenario("self-referring-closures")
def inputs_share_memory() -> object:
    """Two inputs of a compiled function are views of one tensor."""
    run = compiled(lambda x, y: x.add_(y), backend="aot_eager")

    def call(x: torch.Tensor) -> torch.Tensor:
        base = watch(base=torch.cat((x, x)))
        return run(base[:3], base[1:4]) + 0

    return calls(call)


@scenario("self-referring-closures")
def random_numbers() -> object:
    """A compiled function draws random numbers."""
    torch.manual_seed(0)
    return calls(compiled(lambda x: x + torch.rand_like(x)))


@scenario("self-referring-closures")
def stance_changes() -> object:
    """A compiled function is called eagerly by ``torch.compiler.set_stance``."""
    run = compiled(lambda x: x * 2 + 1)
    told = calls(run)
    if not hasattr(torch.compiler, "set_stance"):
        return told, []
    with torch.compiler.set_stance("force_eager"):
        return told, calls(run)


@scenario("self-referring-closures")
def runs_only_what_is_compiled() -> object:
    """``torch._dynamo.run`` takes compiled code where there is some."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    calls(torch.compile(run, backend=recording("eager")))
    return calls(torch._dynamo.run(run)), len(graphs)
