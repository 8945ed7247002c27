"""Loads the installed torch for the commands that tell what is patched in it."""

from __future__ import annotations

import importlib

from dynamo_cyclefix._catalogue import toml as _catalogue
from dynamo_cyclefix._errors import CatalogueError, CommandError, PatchError


def load_torch() -> None:
    """Import every target module that the installed torch has.

    Raises:
        CommandError: with 1 in strict mode where a patch could not be applied; with 2 where torch
            cannot be imported, or the catalogue is damaged.
    """
    try:
        _import_all()
    except PatchError as error:
        raise CommandError(str(error), 1) from error
    except CatalogueError as error:
        raise CommandError(str(error)) from error


def _import_all() -> None:
    try:
        importlib.import_module("torch._dynamo")
    except PatchError:
        raise
    except Exception as error:
        raise CommandError(
            f"torch cannot be imported ({error}); install the torch that you deploy"
        ) from error
    failed = sorted(_catalogue.load().modules)
    # Not every release has every module, and some can be imported only after others.
    for _ in range(2):
        modules, failed = failed, []
        for module in modules:
            try:
                importlib.import_module(module)
            except PatchError:
                raise
            except Exception:
                failed.append(module)
