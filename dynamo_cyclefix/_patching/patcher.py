"""Puts rewritten code in place, takes it out again, and knows the state of every patch."""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from dynamo_cyclefix import _rewriting
from dynamo_cyclefix._catalogue import gate as _gate
from dynamo_cyclefix._catalogue import toml as _catalogue
from dynamo_cyclefix._catalogue.model import Catalogue, Patch, Target
from dynamo_cyclefix._errors import PatchError, Refused, SourceMissing
from dynamo_cyclefix._locking import lock, log
from dynamo_cyclefix._patching import cache as _cache
from dynamo_cyclefix._patching.functions import live_function, module_namespace
from dynamo_cyclefix._patching.replacement import Replacement, exchange
from dynamo_cyclefix._patching.state import State

if TYPE_CHECKING:
    from dynamo_cyclefix._patching.wrapper import Wrap


HIDDEN = "gc.freeze() may hide closures, which run torch's own code then"

Change: TypeAlias = "Replacement | Wrap"


def make(strict: bool, patches: str, accept_unseen: bool) -> Patcher:
    """Read the catalogue and select from it.

    Args:
        strict: see :class:`Patcher`.
        patches: ids separated by commas: those to apply, or, each after a ``-``, those not to.
        accept_unseen: see :class:`Patcher`.

    Raises:
        CatalogueError: the catalogue is damaged.
    """
    catalogue = _catalogue.load()
    return Patcher(catalogue, _select(catalogue, patches), strict, accept_unseen)


def _select(catalogue: Catalogue, patches: str) -> frozenset[str]:
    names = []
    for name in filter(None, map(str.strip, patches.split(","))):
        if name.removeprefix("-") in catalogue.patches:
            names.append(name)
        else:
            log(
                "warning",
                "DYNAMO_CYCLEFIX_PATCHES: unknown patch %r is ignored, expected some of %s",
                name,
                ", ".join(catalogue.patches),
            )
    wanted = {name for name in names if not name.startswith("-")}
    unwanted = {name[1:] for name in names if name.startswith("-")}
    return frozenset(catalogue.patches).intersection(wanted or catalogue.patches) - unwanted


class Patcher:
    """Applies the patches of a catalogue to the modules of one torch.

    Args:
        catalogue: what there is to apply.
        enabled: the ids of the patches to apply.
        strict: raise :class:`PatchError` where a patch cannot be applied.
        accept_unseen: in strict mode, whether a source that no known release has will do.

    Attributes:
        modules: the names of the modules that targets live in.
        packages: the names of the packages of torch that those are in.
        waiting: those of them that are not patched yet.
        states: what became of a target, and why.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        enabled: Iterable[str],
        strict: bool = False,
        accept_unseen: bool = False,
    ) -> None:
        self.catalogue = catalogue
        self.modules = catalogue.modules
        self.packages = {name.rpartition(".")[0] for name in self.modules} - {"torch"}
        self.strict = strict
        self._accept_unseen = accept_unseen
        self.enabled = frozenset(enabled)
        self.waiting = set(self.modules)
        self._changes: dict[str, list[Change]] = defaultdict(list)
        self.states: dict[Target, tuple[State, str]] = {}
        self._failures: dict[str, str] = {}
        self._retired = False

    def catch_up(self, executed: Sequence[ModuleType] = ()) -> None:
        """Apply every patch that has targets in modules that are there, and not patched yet.

        All of them or none, whatever interrupts; a patch that is refused concerns no other.

        Args:
            executed: modules that have just been executed; with them, those that were imported
                past the finder.

        Raises:
            PatchError: in strict mode, if a patch for an affected function could not be applied.
        """
        with lock:
            if self._retired:
                return
            modules = [*executed, *self.overdue()]
            names = {module.__name__ for module in modules}
            before, states = self.changes(), dict(self.states)
            try:
                for module in modules:
                    for patch in self.catalogue.patches.values():
                        targets = [t for t in patch.targets if t.module == module.__name__]
                        if targets and patch.id in self.enabled:
                            self._patch(patch, targets, module)
                self._exchange([change for change in self.changes() if change not in before])
            except BaseException:
                self.states = states
                self._restore([change for change in self.changes() if change not in before])
                raise
            # Only now: what a signal interrupts here is caught up with later.
            self.waiting -= names
            for patch_id, name in dict.fromkeys(
                (patch_id, change.targets[0].module)
                for patch_id, change in self.changes()
                if (patch_id, change) not in before
            ):
                text = "patch %s applied to %s of torch %s"
                log("info", text, patch_id, name, torch_version())
        # What has failed may be in a module that stays imported when the import of another fails.
        if self.strict and self._failures and names & self.modules:
            failed = "; ".join(f"{patch}: {reason}" for patch, reason in self._failures.items())
            raise PatchError(
                f"torch {torch_version()} is affected and could not be patched"
                f" ({failed}); set DYNAMO_CYCLEFIX=on to go on without"
            )

    def overdue(self) -> list[ModuleType]:
        """The target modules that were executed and are not patched.

        Imports nothing, and runs no code of what else there may be in ``sys.modules``.
        """
        found = []
        for name in sys.modules.keys() & self.waiting:
            module: Any = sys.modules.get(name)
            kind = type(module)
            # A module that waits for its first use to be executed looks at every access.
            lookup = type.__getattribute__(kind, "__getattribute__")
            if issubclass(kind, ModuleType) and lookup is ModuleType.__getattribute__:
                spec = module_namespace(module).get("__spec__")
                if type(spec) is not ModuleSpec or not getattr(spec, "_initializing", False):
                    found.append(module)
        return found

    def _patch(self, patch: Patch, targets: Sequence[Target], module: ModuleType) -> None:
        try:
            if patch.id in self._failures:
                raise Refused(self._failures[patch.id])
            changes, states = self._prepare(targets, module)
            # Noted first: what is half done when a signal comes is taken back with the rest.
            self._changes[patch.id] += changes
            for change in changes:
                change.install()
            self.states.update(states)
        except Refused as error:
            self._fail(patch, targets, str(error))
            return
        except RecursionError as error:  # nested deeper than we can follow
            self._fail(patch, targets, f"RecursionError: {error}")
            return

    def _prepare(
        self, targets: Sequence[Target], module: ModuleType
    ) -> tuple[list[Change], dict[Target, tuple[State, str]]]:
        """Work out everything, change nothing."""
        version = torch_version()
        groups: dict[str, list[Target]] = defaultdict(list)
        states: dict[Target, tuple[State, str]] = {}
        for target in targets:
            if _gate.is_affected(version, target.affected):
                groups[target.outermost].append(target)
            else:
                states[target] = State.UNAFFECTED, f"torch {version} is not in {target.affected}"
        changes: list[Change] = []
        cache: _cache.Cache | None = None
        for outermost, group in groups.items():
            function = live_function(module, outermost)
            if self.runs_replacement(function):
                continue
            try:
                cache = cache or _cache.Cache(module.__name__, source_of(module))
            except SourceMissing as error:
                # Imported here: wrapt is not free, and hardly any torch lacks its source.
                from dynamo_cyclefix._patching import wrapper as _wrapper

                if _wrapper.is_fixed(function.__code__, group):
                    states |= dict.fromkeys(group, (State.FIXED, "the code deletes the exception"))
                else:
                    changes.append(_wrapper.Wrap(module, function, group))
                    states |= dict.fromkeys(group, (State.WRAPPED, str(error)))
                continue
            rewritten = cache.rewrite(function.__code__, outermost, group)
            if rewritten.is_fixed:
                states |= dict.fromkeys(group, (State.FIXED, "the code releases the exception"))
                continue
            state = State.APPLIED, ""
            if not self._is_known(rewritten.block, group[0]):
                state = State.UNSEEN, "passed every structural check"
                if self.strict and not self._accept_unseen:
                    raise Refused(
                        f"the source of {group[0].key} was not seen before;"
                        " DYNAMO_CYCLEFIX_UNSEEN=accept accepts it"
                    )
            states |= dict.fromkeys(group, state)
            changes.append(_replacement(function, rewritten, outermost, group))
        if cache is not None:
            cache.save()
        return changes, states

    def _is_known(self, block: str, target: Target) -> bool:
        known = self.catalogue.sources.get(f"{target.module}:{target.outermost}", {})
        return source_hash(block) in known

    def _exchange(self, changes: Sequence[tuple[str, Change]]) -> None:
        """Have the closures that were made earlier run the replacements too."""
        nesting = [change for _, change in changes if change.nested]
        hidden = exchange(
            [pair for change in nesting for pair in change.nested],
            [change.function for change in nesting],
        )
        for change in nesting:
            change.hidden = any(change.function is function for function in hidden)
        for patch in sorted({patch for patch, change in changes if change.hidden}):
            log("warning", f"patch %s: {HIDDEN}", patch)

    def _fail(self, patch: Patch, targets: Sequence[Target], reason: str) -> None:
        self._restore([(patch.id, change) for change in self._changes[patch.id]])
        if patch.id not in self._failures:
            self._failures[patch.id] = reason
            text = "patch %s not applied to torch %s: %s"
            log("warning", text, patch.id, torch_version(), reason)
        for target in patch.targets:
            if target in targets or target in self.states:
                self.states[target] = State.REFUSED, reason

    def _restore(self, changes: Sequence[tuple[str, Change]]) -> None:
        """All of them, whatever interrupts; then raise what did."""
        interrupt: BaseException | None = None
        failure: Exception | None = None
        pairs = [(new, old) for _, change in changes for old, new in change.nested]
        steps: list[tuple[Change | None, Callable[[], object]]] = [
            *((change, change.restore) for _, change in changes),
            # Last: by then no function makes new closures of the rewritten code.
            (None, partial(exchange, pairs)),
        ]
        kept = set()
        for what, step in steps:
            attempts = 0
            while attempts < 2:
                try:
                    step()
                    break
                except Exception as error:
                    # Memory may be short for a moment; beyond that, go on with the others.
                    attempts += 1
                    if attempts == 2:
                        failure = error
                        kept.add(what)
                except BaseException as error:  # a signal's: once
                    interrupt = error
        for patch_id, change in changes:
            if change not in kept and not (None in kept and change.nested):
                self._changes[patch_id].remove(change)
        try:
            if raised := interrupt or failure:
                raise raised
        finally:
            raised = interrupt = failure = None

    def runs_replacement(self, function: FunctionType) -> bool:
        """Whether a function is patched, and nobody has undone it."""
        return any(
            change.function is function and change.is_in_place
            for changes in self._changes.values()
            for change in changes
        )

    def changes(self) -> tuple[tuple[str, Change], ...]:
        """Every function that runs a replacement, with the id of its patch."""
        with lock:
            return tuple((i, change) for i, changes in self._changes.items() for change in changes)

    def restore(self) -> None:
        """Give every function its original code object again, and patch nothing any more."""
        with lock:
            self._retired = True
            self._restore(self.changes())


def _replacement(
    function: FunctionType, rewritten: _rewriting.Rewrite, outermost: str, group: Sequence[Target]
) -> Replacement:
    nested = []
    for target in group:
        # Methods of a class that each call makes belong together: those of earlier calls stay.
        if target.function != outermost and not _rewriting.is_method(outermost, target.function):
            old = _rewriting.nested(function.__code__, outermost, target.function)
            new = _rewriting.nested(rewritten.replacement, outermost, target.function)
            if old.co_freevars != new.co_freevars:
                raise Refused(f"the rewrite would change the free variables of {target.function}")
            nested.append((old, new))
    return Replacement(group, function, rewritten.replacement, nested)


def source_of(module: ModuleType) -> str:
    """A module's source, from whatever it was loaded from.

    Raises:
        SourceMissing: there is none that can be read.
    """
    loader = getattr(module.__spec__, "loader", None)
    try:
        source = loader.get_source(module.__name__)  # type: ignore[union-attr]
    except (AttributeError, ImportError, OSError, SyntaxError, UnicodeError) as error:
        raise SourceMissing(f"no source of {module.__name__} can be read ({error})") from error
    if not source:
        raise SourceMissing(f"{module.__name__} was installed without its source")
    return str(source)


def source_hash(block: str) -> str:
    """How a function's source is recorded: SHA-256, hexadecimal."""
    return hashlib.sha256(block.encode()).hexdigest()


def torch_version() -> str:
    """What the imported torch says its version is."""
    return str(getattr(sys.modules.get("torch"), "__version__", "unknown"))
