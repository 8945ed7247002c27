"""The errors of the package, in a module that costs nothing to import."""


class PatchError(RuntimeError):
    """In strict mode: an affected torch could not be patched.

    Raised by the import of the target module (or by :func:`dynamo_cyclefix.activate` when that
    module is loaded already).  Not an ``ImportError``: ``try: import torch`` must not hide it.
    """


class CatalogueError(ValueError):
    """A file in ``patches/`` is malformed: names the file, the key, what was found and expected."""


class Refused(Exception):  # noqa: N818 - an outcome, not an error: the function stays as it was
    """A function was left as it was; the text says why."""


class SourceMissing(Refused):
    """Refused only because the function's source cannot be read."""


class CommandError(Exception):
    """Why a command ends as it does: the text is printed, and the process ends with the code.

    Args:
        message: what was found, what was expected and what to do next, in one line.
        exit_code: 1: what was asked does not hold; 2: it could not be found out.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
