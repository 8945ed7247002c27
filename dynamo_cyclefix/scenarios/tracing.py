"""Tracing without Dynamo that fails: a bare ``FakeTensorMode``, a report on exportability."""

# torch has no types here: mypy sees its classes and decorators as Any.
# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

from ._registry import scenario
from .exporting import branching, module

# Fake tensors run the real kernel only of operators in PyTorch's own namespaces.
_library = torch.library.Library("vision", "FRAGMENT")
_library.define("dynamo_cyclefix_alias(Tensor(a) x) -> Tensor(a)")
_library.impl("dynamo_cyclefix_alias", lambda x: x.view(-1), "CPU")
_library.define(
    "dynamo_cyclefix_flatten_(Tensor(a!) x) -> Tensor(a!)", tags=(torch.Tag.inplace_view,)
)
_library.impl("dynamo_cyclefix_flatten_", lambda x: x.resize_(x.numel()), "CPU")


@scenario("fallback-kernel-errors")
def fake_alias_without_meta() -> object:
    """An operator without a meta kernel returns a view of its input under ``FakeTensorMode``."""
    with FakeTensorMode():
        return torch.ops.vision.dynamo_cyclefix_alias(torch.ones(2, 3))


@scenario("fallback-kernel-errors")
def fake_inplace_view_without_meta() -> object:
    """An operator without a meta kernel changes its input's shape under ``FakeTensorMode``."""
    with FakeTensorMode():
        return torch.ops.vision.dynamo_cyclefix_flatten_(torch.ones(2, 3))


@scenario("export-errors")
def exportability_report() -> object:
    """A report on what can be exported is read and dropped, where two modules cannot."""
    from torch._export.tools import report_exportability

    model = torch.nn.Sequential(module(branching), torch.nn.ReLU())
    return list(report_exportability(model, (torch.ones(3),), strict=False))
