"""``torch.fx`` and other tracers, the first import of Dynamo, and a few compiles by inductor."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import make_fx

from ._registry import scenario
from ._watch import watch


def model(parameters: bool = True) -> Any:
    """Return a watched model, whose parameters are the same in every process.

    They are not watched where they are parameters of the trace too, which is a cycle.
    """
    made = watch(module=torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    for parameter in made.parameters():
        torch.nn.init.constant_(parameter, 0.25)
        if parameters:
            watch(parameter=parameter)
    return made


@scenario()
def symbolic_trace_function() -> object:
    """``torch.fx.symbolic_trace`` of a function that closes over a tensor."""
    weight = watch(cell=torch.ones(3))

    def run(x: Any) -> Any:
        return torch.sin(x) * weight

    return torch.fx.symbolic_trace(watch(function=run))


@scenario("symbolic-traces")
def symbolic_trace_module() -> object:
    """``torch.fx.symbolic_trace`` of a module, whose trace is run."""
    return torch.fx.symbolic_trace(model(parameters=False))(torch.ones(3, 2))


@scenario("symbolic-traces")
def symbolic_trace_wrapped() -> object:
    """A function is wrapped for ``torch.fx`` from inside of a user's function."""
    namespace: dict[str, Any] = {"wrap": torch.fx.wrap}
    exec("def helper(x):\n    return x + 1\nwrap('helper')\n", namespace)
    return torch.fx.symbolic_trace(namespace["helper"])(watch(input=torch.ones(3)))


@scenario("symbolic-traces")
def symbolic_trace_wraps_by_name() -> object:
    """``torch.fx.wrap`` is called by a module that is imported in a user's function."""
    source = "import torch.fx\ndef helper(x):\n    return x + 1\ntorch.fx.wrap('helper')\n"
    exec(compile(source, "<module>", "exec"), {"__name__": "imported"})
    return "wrapped"


@scenario("symbolic-traces")
def symbolic_trace_unpacks() -> object:
    """A proxy is unpacked, which looks at the frame that does so."""

    def run(x: Any) -> Any:
        first, second = x
        return first + second

    return torch.fx.symbolic_trace(run)((watch(input=torch.ones(3)), torch.ones(3)))


@scenario("symbolic-traces")
def symbolic_trace_asserts() -> object:
    """A proxy is asserted, which looks at the frame that does so."""

    def run(x: Any) -> Any:
        assert x.sum() > 0
        return x + 1

    class Believing(torch.fx.Tracer):
        trace_asserts = True

        def to_bool(self, obj: Any) -> bool:
            return True

    return str(Believing().trace(run))


@scenario("symbolic-traces")
def symbolic_trace_with_a_tracer() -> object:
    """A tracer of the user's own traces a module and is dropped."""

    class Flat(torch.fx.Tracer):
        def is_leaf_module(self, module: torch.nn.Module, name: str) -> bool:
            return False

    module = model(parameters=False)
    graph = watch(tracer=Flat()).trace(module)
    return torch.fx.GraphModule(module, graph)(torch.ones(3, 2))


@scenario()
def make_fx_real() -> object:
    """``make_fx`` traces a function with real tensors."""
    x = watch(input=torch.ones(3))
    return make_fx(lambda x: x.sin() + 1)(x)


@scenario()
def make_fx_symbolic() -> object:
    """``make_fx`` traces a function with symbolic sizes."""
    x = watch(input=torch.ones(3))
    return make_fx(lambda x: x.sin() + x.shape[0], tracing_mode="symbolic")(x)


@scenario()
def make_fx_module() -> object:
    """``make_fx`` traces a module's call."""
    module = model()
    return make_fx(lambda x: module(x))(watch(input=torch.ones(3, 2))).code


@scenario()
def make_fx_fake() -> object:
    """``make_fx`` traces a function with fake tensors."""
    x = watch(input=torch.ones(3))
    return make_fx(lambda x: x.sin() + 1, tracing_mode="fake")(x)


@scenario()
def functionalized() -> object:
    """``torch.func.functionalize`` is traced."""
    x = watch(input=torch.ones(3))
    return make_fx(torch.func.functionalize(lambda x: x.clone().add_(1)))(x)


@scenario()
def fake_tensors_made() -> object:
    """Fake tensors are made of real ones, and dropped."""
    from torch._subclasses import FakeTensorMode

    mode = watch(mode=FakeTensorMode())
    fake = watch(fake=mode.from_tensor(watch(input=torch.ones(3))))
    return tuple(fake.sin().shape)


@scenario("fake-tensor-errors", "symbol-bindings", "self-referring-closures")
def real_tensors_propagated() -> object:
    """Real tensors are propagated beside the fake ones."""
    from torch._functorch import config

    x = watch(input=torch.ones(3))
    with config.patch(fake_tensor_propagate_real_tensors=True):
        return torch.compile(lambda x: x.nonzero().float() + 1, backend="eager")(x)


@scenario()
def torchscript_traced() -> object:
    """``torch.jit.trace`` of a function."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: x.sin() + 1, (watch(input=torch.ones(3)),))
    return traced(torch.ones(3))


@scenario()
def aot_function() -> object:
    """AOT Autograd's own front end compiles a function."""
    compilers = importlib.import_module("functorch.compile")
    run = compilers.aot_function(lambda x: x.sin() * 2, fw_compiler=compilers.nop)
    x = watch(input=torch.ones(3, requires_grad=True))
    run(x).sum().backward()
    return x.grad


@scenario("self-referring-closures")
def inductor_compiles() -> object:
    """Inductor compiles a function, without a kernel of its own."""
    from torch._inductor import config

    with config.patch(fx_graph_cache=False):
        run = torch.compile(lambda x: torch.mm(x, x), backend="inductor")
        return run(watch(input=torch.ones(2, 2)))


@scenario(torch=">=2.12")
def inductor_freezes() -> object:
    """Inductor takes the parameters of a model into its graph."""
    from torch._inductor import config

    module = model()[0]
    with config.patch(freezing=True, fx_graph_cache=False), torch.no_grad():
        return torch.compile(module, backend="inductor")(watch(input=torch.ones(3, 2)))


@scenario("self-referring-closures")
def inductor_trains() -> object:
    """Inductor compiles a function and its backward, without a kernel of its own."""
    from torch._inductor import config

    with config.patch(fx_graph_cache=False):
        x = watch(input=torch.ones(2, 2, requires_grad=True))
        torch.compile(lambda x: torch.mm(x, x), backend="inductor")(x).sum().backward()
        return x.grad
