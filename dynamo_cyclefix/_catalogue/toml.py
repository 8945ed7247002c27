"""Reads the patch files and the record of known sources."""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from dynamo_cyclefix import __version__, _store
from dynamo_cyclefix._catalogue.model import Catalogue, Explained, Kept, Key, Patch, Target
from dynamo_cyclefix._errors import CatalogueError
from dynamo_cyclefix._rewriting.edits import KINDS, Edit

if sys.version_info >= (3, 11):
    from importlib.resources.abc import Traversable
else:
    from importlib.abc import Traversable

_SOURCES = "sources.json"

T = TypeVar("T")


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
    kept: list[Kept] = []
    for name, content in _parsed(texts).items():
        table = _Table(name, content)
        sites = table.tables("explained", required=False)
        for site in sites:
            explained.append(Explained(*(site.text(k) for k in Explained._fields)))
            site.finish()
        entries = table.tables("kept", required=False)
        for entry in entries:
            holder = entry.text("holder", required=False)
            found = Kept(
                scenarios=entry.texts("scenarios"),
                holder=_key(holder) if holder else None,
                affected=entry.specifier("affected", SpecifierSet()),
                reason=entry.text("reason"),
            )
            kept.append(found)
            entry.finish()
        if (sites or entries) and "id" not in table.content:
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
    catalogue = Catalogue(patches, known, tuple(explained), tuple(kept))
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
    needs_source = table.flag("needs_source")
    targets = []
    for entry in table.tables("targets"):
        target = Target(
            module=entry.text("module"),
            function=entry.text("function"),
            edits=tuple(map(_edit, entry.tables("edits"))),
            affected=entry.specifier("affected", default),
            needs_source=needs_source,
            others=tuple(map(_key, entry.texts("holders", required=False))),
        )
        entry.finish()
        targets.append(target)
    patch = Patch(
        id=table.text("id"),
        title=table.text("title"),
        why=table.text("why"),
        upstream=table.text("upstream", required=False),
        targets=tuple(targets),
    )
    table.finish()
    return patch


def _key(text: str) -> Key:
    """``module:Class.attribute`` or ``module:global``."""
    module, _, path = text.partition(":")
    owner, _, name = path.rpartition(".")
    return module, owner, name


def _edit(table: _Table) -> Edit:
    kind = next(iter(table.content), "")
    if kind not in KINDS:
        raise CatalogueError(
            f"patches/{table.where}: found {kind!r} first, expected a kind of edit:"
            f" {', '.join(KINDS)}"
        )
    edit: Edit = KINDS[kind].read(table)
    table.finish()
    return edit


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
        expected = "a non-empty string"
        value = self._get(key, str, expected, required)
        if required and not value.strip():
            raise self._error(key, value, expected)
        return value.strip()

    def texts(self, key: str, required: bool = True) -> tuple[str, ...]:
        expected = "a list of non-empty strings"
        values = self._get(key, list, expected, required)
        if not all(isinstance(value, str) and value for value in values):
            raise self._error(key, values, expected)
        return tuple(dict.fromkeys(values))

    def pairs(self, key: str) -> tuple[tuple[str, str], ...]:
        expected = "a table of non-empty strings"
        values = self._get(key, dict, expected, required=False)
        if not all(isinstance(value, str) and value for value in values.values()):
            raise self._error(key, values, expected)
        return tuple(values.items())

    def choice(self, key: str, choices: Sequence[str]) -> str:
        value = self.text(key, required=False) or choices[0]
        if value not in choices:
            raise self._error(key, value, f"one of {', '.join(map(repr, choices))}")
        return value

    def statement(self, key: str, required: bool = True) -> str:
        value = self.text(key, required)
        if len(self._parsed(key, value)) != (1 if value else 0):
            raise self._error(key, value, "one statement of Python")
        return value

    def place(self, key: str) -> str:
        value = self.text(key)
        match self._parsed(key, value):
            case [ast.Expr(value=ast.Attribute() | ast.Subscript())]:
                return value
        raise self._error(key, value, "an attribute or an item, such as 'self.stack'")

    def _parsed(self, key: str, value: str) -> list[ast.stmt]:
        try:
            return ast.parse(value).body
        except SyntaxError:
            raise self._error(key, value, "one statement of Python") from None

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
