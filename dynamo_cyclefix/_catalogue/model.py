"""What a patch is: frozen, typed objects, as the files of ``patches/`` have them.

Named tuples, since every import of torch pays for making these classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from packaging.specifiers import SpecifierSet

from dynamo_cyclefix._catalogue.gate import is_affected
from dynamo_cyclefix._rewriting import LOCALS
from dynamo_cyclefix._rewriting.edits import ANY_NAME, Edit

Key: TypeAlias = "tuple[str, str, str]"
"""A module, the qualified name of a function in it, and what holds something there."""


class Target(NamedTuple):
    """One function, and the edits to it.

    Attributes:
        module: the dotted name of the module that defines it.
        function: its qualified name in that module; ``<locals>`` steps into a nested function,
            and from there a dot into a class.
        edits: what is changed in it, in this order.
        affected: the torch versions whose function makes the mistake (PEP 440).
        needs_source: whether nothing but the edits will do where the source is missing.
        others: what else no longer keeps anything: attributes (a class, a name) and globals (no
            class, a name); ``*`` is any name.
    """

    module: str
    function: str
    edits: tuple[Edit, ...]
    affected: SpecifierSet
    needs_source: bool = False
    others: tuple[Key, ...] = ()

    @property
    def outermost(self) -> str:
        """The qualified name of the function that is live as a module's or class's attribute."""
        return self.function.partition(f".{LOCALS}.")[0]

    @property
    def key(self) -> str:
        """How messages name the target."""
        return f"{self.module}:{self.function}"

    def holders(self) -> Iterator[tuple[str, str]]:
        """The functions and names that hold nothing any more with the edits; ``*`` is any name."""
        for edit in self.edits:
            for nested, name in edit.holders():
                yield f"{self.function}.{LOCALS}.{nested}" if nested else self.function, name


class Patch(NamedTuple):
    """One backport: everything that is applied, or left, together.

    Attributes:
        id: the name by which it is switched on and off.
        title: one line for a table.
        why: what the user loses without it.
        upstream: where PyTorch fixed or discusses it; empty where it has not.
        targets: the functions, in the order of the file.
    """

    id: str
    title: str
    why: str
    upstream: str
    targets: tuple[Target, ...]


def covering_patch(covered: Mapping[Key, str], key: Key) -> str | None:
    """The id of the patch for a name, from what :meth:`Catalogue.covering` gives."""
    module, function, _ = key
    return covered.get(key) or covered.get((module, function, ANY_NAME))


class Explained(NamedTuple):
    """A place that the scan lists and no patch covers, with the reason."""

    module: str
    function: str
    name: str
    reason: str


class Kept(NamedTuple):
    """What a call keeps alive and no patch lets go of, with the reason.

    Attributes:
        scenarios: the names of the scenarios that show it.
        holder: the attribute or global that keeps it, for the audit; ``None`` where none is known.
        affected: the torch versions on which they show it (PEP 440).
        reason: why no patch lets go of it.
    """

    scenarios: tuple[str, ...]
    holder: Key | None
    affected: SpecifierSet
    reason: str


class Catalogue(NamedTuple):
    """All patches; the sources their functions are known to have; what the scan need not report.

    Attributes:
        patches: by id, in the order of the file names.
        sources: for ``module:outermost function``, the SHA-256 of each source seen and the releases
            that have it.
        explained: sites that stay open on purpose.
        kept: what stays alive on purpose.
    """

    patches: Mapping[str, Patch]
    sources: Mapping[str, Mapping[str, tuple[str, ...]]]
    explained: tuple[Explained, ...] = ()
    kept: tuple[Kept, ...] = ()

    def reason_for(self, scenario: str, release: str) -> str:
        """Why a scenario goes on keeping something alive; empty if it should not.

        Args:
            scenario: its name.
            release: what ``torch.__version__`` says.

        Raises:
            Refused: ``release`` is not a PEP 440 version.
        """
        found = (
            kept.reason
            for kept in self.kept
            if scenario in kept.scenarios and is_affected(release, kept.affected)
        )
        return next(found, "")

    @property
    def modules(self) -> frozenset[str]:
        """The dotted names of every module that a target lives in."""
        return frozenset(target.module for _, target in self.targets())

    def covering(self, release: str) -> dict[Key, str]:
        """The ids of the patches of a release, by the module, function and name that they cover.

        Args:
            release: what ``torch.__version__`` says.

        Raises:
            Refused: ``release`` is not a PEP 440 version.
        """
        covered: dict[Key, str] = {}
        for patch, target in self.targets():
            if is_affected(release, target.affected):
                covered |= dict.fromkeys(target.others, patch.id)
                for function, name in target.holders():
                    covered[target.module, function, name] = patch.id
        return covered

    def targets(self) -> Iterator[tuple[Patch, Target]]:
        """Every target with its patch."""
        for patch in self.patches.values():
            for target in patch.targets:
                yield patch, target
