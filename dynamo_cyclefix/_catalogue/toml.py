"""The patch catalogue: the files of ``patches/`` as frozen, typed objects.

Named tuples, since every import of torch pays for making these classes.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from dynamo_cyclefix import __version__, _store
from dynamo_cyclefix._errors import CatalogueError

if sys.version_info >= (3, 11):
    from importlib.resources.abc import Traversable
else:
    from importlib.abc import Traversable

LOCALS = "<locals>"
_SOURCES = "sources.json"

T = TypeVar("T")


class Target(NamedTuple):
    """One function that holds an exception.

    Attributes:
        module: the dotted name of the module that defines it.
        function: its qualified name in that module; ``<locals>`` steps into a nested function.
        names: the parameters and locals (cells too) that hold the exception.
        helpers: nested functions that close over one of ``names`` and must take it as a parameter.
        closures: nested functions (``<lambda>`` too) that close over one of ``names`` and may go on
            doing so, because none of them outlives the call.
        affected: the torch versions whose function makes the mistake (PEP 440).
        own_args: the function is an exception's ``__init__`` that hands one of ``names``, the
            exception itself, to ``super().__init__``: its ``args`` must not hold it.
    """

    module: str
    function: str
    names: tuple[str, ...]
    helpers: tuple[str, ...]
    closures: tuple[str, ...]
    affected: SpecifierSet
    own_args: bool = False

    @property
    def outermost(self) -> str:
        """The qualified name of the function that is live as a module's or class's attribute."""
        return self.function.partition(f".{LOCALS}.")[0]

    @property
    def key(self) -> str:
        """How messages and the record of known sources name the target."""
        return f"{self.module}:{self.function}"


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


class Explained(NamedTuple):
    """A place that the scan lists and no patch covers, with the reason."""

    module: str
    function: str
    name: str
    reason: str


class Catalogue(NamedTuple):
    """All patches; the sources their functions are known to have; what the scan need not report.

    Attributes:
        patches: by id, in the order of the file names.
        sources: for ``module:outermost function``, the SHA-256 of each source seen and the releases
            that have it.
        explained: sites that stay open on purpose.
    """

    patches: Mapping[str, Patch]
    sources: Mapping[str, Mapping[str, tuple[str, ...]]]
    explained: tuple[Explained, ...] = ()

    @property
    def modules(self) -> frozenset[str]:
        """The dotted names of every module that a target lives in."""
        return frozenset(target.module for _, target in self.targets())

    def targets(self) -> Iterator[tuple[Patch, Target]]:
        """Every target with its patch."""
        for patch in self.patches.values():
            for target in patch.targets:
                yield patch, target


def directory() -> Traversable:
    """Where ``patches/`` is: inside an installed package, or beside it in a checkout."""
    inside = resources.files("dynamo_cyclefix").joinpath("patches")
    return inside if inside.is_dir() else Path(__file__).parents[2] / "patches"


def load(folder: Traversable | None = None) -> Catalogue:
    """Read every patch file.

    Args:
        folder: the directory of the files; that of the package by default.

    Raises:
        CatalogueError: a file is unreadable or malformed, an id or a function occurs twice, or
            there is no file.
    """
    folder = directory() if folder is None else folder
    try:
        files = sorted(
            (file for file in folder.iterdir() if file.name.endswith(".toml")),
            key=lambda file: file.name,
        )
        texts = {file.name: file.read_text(encoding="utf-8") for file in files}
        recorded = folder.joinpath(_SOURCES)
        sources = json.loads(recorded.read_text("utf-8")) if recorded.is_file() else {}
    except (OSError, ValueError) as error:
        raise CatalogueError(f"patches: cannot be read ({error}); reinstall the package") from error
    patches: dict[str, Patch] = {}
    explained: list[Explained] = []
    for name, content in _parsed(texts).items():
        table = _Table(name, content)
        sites = table.tables("explained", required=False)
        for site in sites:
            explained.append(Explained(*(site.text(k) for k in Explained._fields)))
            site.finish()
        if sites and "id" not in table.content:
            table.finish()
            continue
        patch = _patch(table)
        if patch.id in patches:
            raise CatalogueError(f"patches/{name}: key 'id': found {patch.id!r} a second time")
        patches[patch.id] = patch
    try:
        known = {key: {h: tuple(r) for h, r in seen.items()} for key, seen in sources.items()}
    except (AttributeError, TypeError):
        raise CatalogueError(
            f"patches/{_SOURCES}: found something else than, for each function, releases by the"
            " SHA-256 of their source, as expected; reinstall the package"
        ) from None
    catalogue = Catalogue(patches, known, tuple(explained))
    _check_owners(catalogue)
    return catalogue


def _parsed(texts: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The files' TOML, by file name; parsed only if they are not those of the last time."""
    parsed: dict[str, dict[str, Any]]
    seen, parsed = _store.read("patches", __version__.encode()) or (None, {})
    if seen == texts:
        return parsed
    # Imported here: with the parsing, it costs a third of what a start costs us.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    parsed = {}
    for name, text in texts.items():
        try:
            parsed[name] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise CatalogueError(f"patches/{name}: found invalid TOML ({error})") from error
    _store.write("patches", (texts, parsed), __version__.encode())
    return parsed


@functools.cache
def _specifier(text: str) -> SpecifierSet:
    return SpecifierSet(text)


def _check_owners(catalogue: Catalogue) -> None:
    if not catalogue.patches:
        raise CatalogueError("patches: found no patch file (*.toml), expected at least one")
    owners: dict[tuple[str, str], str] = {}
    for patch, target in catalogue.targets():
        owner = owners.setdefault((target.module, target.outermost), patch.id)
        if owner != patch.id:
            raise CatalogueError(
                f"patch {patch.id!r}: key 'function': found {target.key}, which patch {owner!r}"
                " rewrites too; expected one patch for a function"
            )


def _patch(table: _Table) -> Patch:
    default = table.specifier("affected")
    targets = []
    for entry in table.tables("targets"):
        targets.append(
            Target(
                module=entry.text("module"),
                function=entry.text("function"),
                names=entry.texts("names"),
                helpers=entry.texts("helpers", required=False),
                closures=entry.texts("closures", required=False),
                affected=entry.specifier("affected", default),
                own_args=entry.flag("own_args"),
            )
        )
        entry.finish()
    patch = Patch(
        id=table.text("id"),
        title=table.text("title"),
        why=table.text("why"),
        upstream=table.text("upstream", required=False),
        targets=tuple(targets),
    )
    table.finish()
    return patch


class _Table:
    """One TOML table, read key by key, so that each error can say where it is."""

    def __init__(self, where: str, content: dict[str, Any]) -> None:
        self.where = where
        self.content = content
        self._read: set[str] = set()

    def _error(self, key: str, found: object, expected: str) -> CatalogueError:
        return CatalogueError(
            f"patches/{self.where}: key {key!r}: found {found!r}, expected {expected}"
        )

    def _get(self, key: str, kind: type[T], expected: str, required: bool = True) -> T:
        self._read.add(key)
        if key not in self.content:
            if not required:
                return kind()
            raise CatalogueError(f"patches/{self.where}: key {key!r}: missing, expected {expected}")
        value = self.content[key]
        if not isinstance(value, kind) or (required and not value):
            raise self._error(key, value, expected)
        return value

    def text(self, key: str, required: bool = True) -> str:
        return self._get(key, str, "a non-empty string", required).strip()

    def texts(self, key: str, required: bool = True) -> tuple[str, ...]:
        expected = "a list of non-empty strings"
        values = self._get(key, list, expected, required)
        if not all(isinstance(value, str) and value for value in values):
            raise self._error(key, values, expected)
        return tuple(values)

    def flag(self, key: str) -> bool:
        return self._get(key, bool, "true or false", required=False)

    def specifier(self, key: str, default: SpecifierSet | None = None) -> SpecifierSet:
        if default is not None and key not in self.content:
            return default
        value = self.text(key)
        try:
            return _specifier(value)
        except InvalidSpecifier:
            raise self._error(key, value, "a PEP 440 specifier such as '>=2.5,<2.15'") from None

    def tables(self, key: str, required: bool = True) -> list[_Table]:
        expected = f"one or more [[{key}]] tables"
        values = self._get(key, list, expected, required)
        if not all(isinstance(value, dict) for value in values):
            raise self._error(key, values, expected)
        return [_Table(f"{self.where} [[{key}]] {i}", v) for i, v in enumerate(values, 1)]

    def finish(self) -> None:
        """Refuse keys that nobody reads: they are misspelt."""
        if unknown := sorted(set(self.content) - self._read):
            raise CatalogueError(
                f"patches/{self.where}: key {unknown[0]!r}: unknown, expected one of"
                f" {', '.join(sorted(self._read))}"
            )
