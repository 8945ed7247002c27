"""What can become of a patch, in one place: the code, the words for people, which is worse."""

from __future__ import annotations

import enum


class State(str, enum.Enum):
    """What became of a patch or of one of its targets; the worst comes first.

    Its value is the code that JSON has, see ``docs/json.md``.

    Attributes:
        words: what people read instead.
    """

    words: str

    DISABLED = "disabled", "disabled"
    REFUSED = "refused", "not applied"
    WRAPPED = "applied-wrapper", "applied by a wrapper, source missing"
    UNSEEN = "applied-unseen", "applied, source not seen before"
    APPLIED = "applied", "applied"
    # A target that is not loaded yet cannot do harm.
    PENDING = "pending", "pending"
    FIXED = "fixed-upstream", "fixed upstream"
    UNAFFECTED = "not-affected", "not affected"

    # To mypy `State(code)`, which looks a member up, is a call of this: hence the default.
    def __new__(cls, code: str, words: str = "") -> State:
        state = str.__new__(cls, code)
        state._value_ = code
        state.words = words
        return state

    @property
    def in_place(self) -> bool:
        """Whether what the patch puts in place is there."""
        return self in (State.WRAPPED, State.UNSEEN, State.APPLIED)

    @property
    def rank(self) -> int:
        """Its place in the order: 0 is the worst."""
        return list(State).index(self)
