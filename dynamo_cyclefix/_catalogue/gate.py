"""The version gate: does a torch version belong to those that a target affects?"""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from dynamo_cyclefix._errors import Refused


def is_affected(version: str, affected: SpecifierSet) -> bool:
    """Tell whether ``version`` may have the mistake.

    A local version (``+cu130``) and a post-release count as their release.  A pre-release of either
    bound (a nightly, a release candidate, a vendor's ``2.9.0a0+...``) was cut somewhere on the way
    to it, so it may be affected: the function's own code then has the last word.

    Args:
        version: what ``torch.__version__`` says.
        affected: the affected versions (PEP 440).

    Raises:
        Refused: ``version`` is not a PEP 440 version.
    """
    try:
        parsed = Version(version)
    except InvalidVersion:
        raise Refused(
            f"torch says its version is {version!r}, expected a PEP 440 version (2.13.0+cpu)"
        ) from None
    base = parsed.base_version
    return all(
        specifier.contains(base)
        or (
            parsed.is_prerelease
            and specifier.operator == "<"
            and Version(specifier.version) == Version(base)
        )
        for specifier in affected
    )
