"""The environment variables, read and judged in this one place.

Loaded where one of them is set, or somebody asks: most interpreters need not pay for it.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MODE = "DYNAMO_CYCLEFIX"
PATCHES = "DYNAMO_CYCLEFIX_PATCHES"
UNSEEN = "DYNAMO_CYCLEFIX_UNSEEN"
REPORT = "DYNAMO_CYCLEFIX_REPORT"
ACTIVATED_BY = "DYNAMO_CYCLEFIX_ACTIVATED_BY"

# What each may say, in any case; the first counts where it is not set, or says anything else.
_WORDS = {
    MODE: ("on", "off", "strict"),
    UNSEEN: ("refuse", "accept"),
    REPORT: ("0", "1"),
}
_KNOWN = (MODE, PATCHES, UNSEEN, REPORT, ACTIVATED_BY)
_said: "set[str]" = set()


class Settings:
    """What the variables say.

    Args:
        environment: where they are.

    Attributes:
        mode: ``"on"``, ``"off"`` or ``"strict"``.
        patches: ids of patches separated by commas, see :func:`_patcher.make`; empty if not set.
        accept_unseen: whether strict mode accepts a source that no known release has.
        report: whether to say at exit what was applied.
        activated_by: what activates, if that was ``run``; empty if not.
    """

    def __init__(self, environment: "Mapping[str, str]") -> None:
        self.mode = _word(environment, MODE)
        self.patches = environment.get(PATCHES, "").strip()
        self.accept_unseen = _word(environment, UNSEEN) == "accept"
        self.report = _word(environment, REPORT) == "1"
        self.activated_by = environment.get(ACTIVATED_BY, "").strip()


def read() -> Settings:
    """The settings of this process, as they are now; says once what is misspelt in them."""
    from os import environ

    for problem in _problems(environ):
        if problem not in _said:
            _said.add(problem)
            from dynamo_cyclefix._locking import log

            log("warning", "%s", problem)
    return Settings(environ)


def not_active() -> str:
    """Why nothing is active, in a process that has imported the package."""
    return f"not active ({MODE}={read().mode})"


def _text(environment: "Mapping[str, str]", name: str) -> str:
    return environment.get(name, "").strip().lower()


def _word(environment: "Mapping[str, str]", name: str) -> str:
    said = _text(environment, name)
    return said if said in _WORDS[name] else _WORDS[name][0]


def _problems(environment: "Mapping[str, str]") -> "Iterator[str]":
    for name, words in _WORDS.items():
        if _text(environment, name) not in ("", *words):
            yield (
                f"{name}={environment[name]!r} is unknown, expected {', '.join(words[:-1])} or"
                f" {words[-1]}; it counts as {words[0]}"
            )
    for name in environment:
        if name.startswith(MODE) and name not in _KNOWN:
            yield f"{name} is unknown and ignored, expected one of {', '.join(_KNOWN)}"
