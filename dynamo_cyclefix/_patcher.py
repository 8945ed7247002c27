"""Puts rewritten code in place, takes it out again, and knows the state of every patch."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, TypeAlias

from dynamo_cyclefix import _catalogue, _gate, _rewrite
from dynamo_cyclefix._catalogue import Catalogue, Patch, Target
from dynamo_cyclefix._errors import PatchError, Refused, SourceMissing
from dynamo_cyclefix._swap import Swap, decorators, live_function, overrides

if TYPE_CHECKING:
    from dynamo_cyclefix._wrapper import Wrap

log = logging.getLogger("dynamo_cyclefix")


class State(str, enum.Enum):
    """What became of a patch or of one of its targets."""

    PENDING = "pending"
    APPLIED = "applied"
    UNSEEN = "applied, source not seen before"
    WRAPPED = "applied by a wrapper, source missing"
    FIXED = "fixed upstream"
    UNAFFECTED = "not affected"
    REFUSED = "not applied"
    DISABLED = "disabled"


IN_PLACE = (State.APPLIED, State.UNSEEN, State.WRAPPED)


@dataclass(frozen=True)
class TargetStatus:
    """The state of one function, and why it is that."""

    module: str
    function: str
    state: State
    reason: str


@dataclass(frozen=True)
class PatchStatus:
    """The state of a patch: that of its targets, taken together."""

    id: str
    title: str
    state: State
    reason: str
    targets: tuple[TargetStatus, ...]


Change: TypeAlias = "Swap | Wrap"


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
            log.warning(
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
        self.strict = strict
        self._accept_unseen = accept_unseen
        self.enabled = frozenset(enabled)
        self._lock = threading.RLock()
        self._waiting = set(self.modules)
        self._swaps: dict[str, list[Change]] = defaultdict(list)
        self._states: dict[Target, tuple[State, str]] = {}
        self._failures: dict[str, str] = {}
        self._retired = False

    def catch_up(self) -> None:
        """Patch the target modules that were imported past the finder.

        Raises:
            PatchError: in strict mode, see :meth:`patch_module`.
        """
        for name in tuple(self._waiting):
            module = sys.modules.get(name)
            spec = getattr(module, "__spec__", None)
            if module is not None and not getattr(spec, "_initializing", False):
                self.patch_module(module)

    def patch_module(self, module: ModuleType) -> None:
        """Apply every patch that has targets in a module that has just been executed.

        Raises:
            PatchError: in strict mode, if a patch for an affected function could not be applied.
        """
        failed: list[str] = []
        with self._lock:
            if self._retired:
                return
            for patch in self.catalogue.patches.values():
                targets = [t for t in patch.targets if t.module == module.__name__]
                if targets and patch.id in self.enabled:
                    self._patch(patch, targets, module)
                    if patch.id in self._failures:
                        failed.append(f"{patch.id}: {self._failures[patch.id]}")
            # Only now: what a signal interrupts here is caught up with later.
            self._waiting.discard(module.__name__)
        if failed and self.strict:
            raise PatchError(
                f"torch {torch_version()} is affected and could not be patched"
                f" ({'; '.join(failed)}); set DYNAMO_CYCLEFIX=on to go on without"
            )

    def _patch(self, patch: Patch, targets: Sequence[Target], module: ModuleType) -> None:
        try:
            if patch.id in self._failures:
                raise Refused(self._failures[patch.id])
            swaps, states = self._prepare(targets, module)
            self._put(patch, swaps)
        except Refused as error:
            self._fail(patch, targets, str(error))
            return
        self._states.update(states)
        if any(state in IN_PLACE for state, _ in states.values()):
            log.info(
                "patch %s applied to %s of torch %s", patch.id, module.__name__, torch_version()
            )

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
        swaps: list[Change] = []
        for outermost, group in groups.items():
            function = live_function(module, outermost)
            if any(s.function is function and s.is_in_place for s in self._all_swaps()):
                continue
            try:
                source = source_of(module)
            except SourceMissing as error:
                # Imported here: wrapt is not free, and hardly any torch lacks its source.
                from dynamo_cyclefix import _wrapper

                if _wrapper.is_fixed(function.__code__, group):
                    states |= dict.fromkeys(group, (State.FIXED, "the code deletes the exception"))
                else:
                    swaps.append(_wrapper.Wrap(module, function, group))
                    states |= dict.fromkeys(group, (State.WRAPPED, str(error)))
                continue
            rewritten = _rewrite.rewrite(source, function.__code__, outermost, group)
            if rewritten.is_fixed:
                states |= dict.fromkeys(group, (State.FIXED, "the code releases the exception"))
                continue
            state = State.APPLIED, ""
            if not self._is_known(source, function, group[0]):
                state = State.UNSEEN, "passed every structural check"
                if self.strict and not self._accept_unseen:
                    raise Refused(f"the source of {group[0].key} was not seen before")
            states |= dict.fromkeys(group, state)
            swaps.append(_swap(function, rewritten, outermost, group))
        return swaps, states

    def _is_known(self, source: str, function: FunctionType, target: Target) -> bool:
        known = self.catalogue.sources.get(f"{target.module}:{target.outermost}", {})
        return source_hash(_rewrite.block(source, function.__code__.co_firstlineno)) in known

    def _put(self, patch: Patch, swaps: Sequence[Change]) -> None:
        """All of them or none, whatever interrupts."""
        # Noted first: what is half done when a signal comes is taken back with the rest.
        self._swaps[patch.id] += swaps
        try:
            for swap in swaps:
                swap.put()
        except BaseException:
            self._take_back([(patch.id, swap) for swap in swaps])
            raise

    def _fail(self, patch: Patch, targets: Sequence[Target], reason: str) -> None:
        self._take_back([(patch.id, swap) for swap in self._swaps[patch.id]])
        if patch.id not in self._failures:
            self._failures[patch.id] = reason
            log.warning("patch %s not applied to torch %s: %s", patch.id, torch_version(), reason)
        for target in patch.targets:
            if target in targets or target in self._states:
                self._states[target] = State.REFUSED, reason

    def _take_back(self, swaps: Sequence[tuple[str, Change]]) -> None:
        """All of them, whatever interrupts; then raise what did."""
        interrupt: KeyboardInterrupt | None = None
        failure: Exception | None = None
        for patch_id, swap in swaps:
            attempts = 0
            while swap in self._swaps[patch_id]:
                try:
                    swap.take_back()
                    self._swaps[patch_id].remove(swap)
                except KeyboardInterrupt as error:
                    interrupt = error
                except Exception as error:
                    # Memory may be short for a moment; beyond that, go on with the others.
                    attempts += 1
                    if attempts == 2:
                        failure = error
                        break
        try:
            if raised := interrupt or failure:
                raise raised
        finally:
            raised = interrupt = failure = None

    def swaps(self) -> tuple[tuple[str, Change], ...]:
        """Every function that runs a replacement, with the id of its patch."""
        with self._lock:
            return tuple((i, swap) for i, swaps in self._swaps.items() for swap in swaps)

    def _all_swaps(self) -> Iterable[Change]:
        return (swap for swaps in self._swaps.values() for swap in swaps)

    def take_back(self) -> None:
        """Give every function its original code object again, and patch nothing any more."""
        with self._lock:
            self._retired = True
            self._take_back(self.swaps())

    def status(self) -> tuple[PatchStatus, ...]:
        """The state of every patch of the catalogue, as it is at this moment."""
        with self._lock:
            return tuple(self._patch_status(patch) for patch in self.catalogue.patches.values())

    def _patch_status(self, patch: Patch) -> PatchStatus:
        if patch.id not in self.enabled:
            states = [(State.DISABLED, "switched off")] * len(patch.targets)
        else:
            states = [self._target_state(target) for target in patch.targets]
        # The worst news first; a target that is not loaded yet cannot do harm.
        order = (
            State.DISABLED,
            State.REFUSED,
            State.WRAPPED,
            State.UNSEEN,
            State.APPLIED,
            State.PENDING,
            State.FIXED,
            State.UNAFFECTED,
        )
        state, reason = min(states, key=lambda found: order.index(found[0]))
        targets = tuple(
            TargetStatus(target.module, target.function, *found)
            for target, found in zip(patch.targets, states, strict=True)
        )
        return PatchStatus(patch.id, patch.title, state, reason, targets)

    def _target_state(self, target: Target) -> tuple[State, str]:
        state, reason = self._states.get(target) or self._unprepared(target)
        module = sys.modules.get(target.module)
        if state is State.UNAFFECTED and module is not None and _is_fixed(module, target):
            return State.FIXED, reason
        if state in IN_PLACE:
            try:
                if module is None:
                    raise Refused(f"{target.module} was removed from sys.modules")
                function = live_function(module, target.outermost)
                if not any(s.function is function and s.is_in_place for s in self._all_swaps()):
                    raise Refused("its code was exchanged")
            except Refused as error:
                return State.REFUSED, f"applied, but replaced since by another program: {error}"
            reasons = [reason, *overrides(module, target.function)]
            if state is not State.WRAPPED:  # where the wrapper around it is our own
                reasons += decorators(module, target.outermost)
            reason = "; ".join(filter(None, reasons))
        return state, reason

    def _unprepared(self, target: Target) -> tuple[State, str]:
        if "torch" in sys.modules and target.module not in sys.modules:
            version = torch_version()
            with contextlib.suppress(Refused):
                if not _gate.is_affected(version, target.affected):
                    return State.UNAFFECTED, f"torch {version} is not in {target.affected}"
        return State.PENDING, f"{target.module} is not imported yet"


def _swap(
    function: FunctionType, rewritten: _rewrite.Rewrite, outermost: str, group: Sequence[Target]
) -> Swap:
    nested = []
    for target in group:
        if target.function != outermost:
            old = _rewrite.nested(function.__code__, outermost, target.function)
            new = _rewrite.nested(rewritten.replacement, outermost, target.function)
            if old.co_freevars != new.co_freevars:
                raise Refused(f"the rewrite would change the free variables of {target.function}")
            nested.append((old, new))
    return Swap(group, function, function.__code__, rewritten.replacement, nested)


def _is_fixed(module: ModuleType, target: Target) -> bool:
    """Of a version outside the affected ones, tell whether that is because it has the fix."""
    try:
        function = live_function(module, target.outermost)
        return _rewrite.is_fixed(source_of(module), function.__code__, target)
    except Refused:
        return False


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
