"""The bytes that tensors hold."""

import sys
from typing import Any


def storages(objects: list[object]) -> dict[int, tuple[int, int]]:
    """Address and bytes of the storage of each tensor in `objects`, by index."""
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)  # missing while torch is being imported
    if torch is None or tensor is None:
        return {}
    with torch._C.DisableTorchFunctionSubclass():  # no method of a subclass is called
        storages = {
            i: _storage(obj) for i, obj in enumerate(objects) if issubclass(type(obj), tensor)
        }
    return {i: storage for i, storage in storages.items() if storage is not None}


def _storage(tensor: Any) -> tuple[int, int] | None:
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # has a size, but no memory: fake tensors, too
            return None
        return storage.data_ptr(), storage.nbytes()
    except Exception:  # a layout or a wrapper without a storage of its own
        return None


def total_bytes(storages: dict[int, tuple[int, int]], nodes: set[int]) -> int:
    return sum(size for _, size in {storages[i] for i in storages.keys() & nodes})
