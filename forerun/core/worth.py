"""How much a draft in another process should do for a sequence. On a shared machine one that does not pay slows
the target all the same.

While it pays it is asked for all it may hold. While it does not it rests, and every few passes is asked for
a few nodes: one that comes true brings it back.
"""

from __future__ import annotations

PAYS = 0.1
"""Tokens that drafted nodes must save, per token that the target commits without them; a live draft on the same
machine costs about as much."""

DECAY = 0.85
START, MOST = 0.4, 1.0
"""The gain assumed at first (some nine passes to prove itself), and the most that is remembered of a good time."""

REST = 6
"""Passes without drafting between two probes."""

PROBE = 12
"""Nodes of a probe, some steps of a draft: a hint comes a pass late, or two over a slow network, and what it says must
reach beyond those. A draft that knows itself to be useless stops after one step of them."""

SILENT, WRONG = 1, 2
"""What a pass of a probe costs of its credit: nothing came to be checked (hints arrive a pass late, or more), or
all that came was wrong."""

CREDIT, RAISED_CREDIT = 4, 6
"""Of a probe, and after every pass in which it comes true."""

ENOUGH = 4 * PROBE
"""Nodes from which on a probe is the whole again."""


class HintWorth:
    """Three states: it pays, it rests, or it is probed with `_asked` nodes."""

    __slots__ = ("_asked", "_gain", "_left")

    def __init__(self) -> None:
        self._gain = START  # decayed mean, while it pays
        self._asked: int | None = None  # nodes; None: it pays, 0: it rests
        self._left = 0  # passes of the rest, or credit of the probe

    @property
    def pays(self) -> bool:
        return self._asked is None

    def want(self, most: int) -> int:
        """Nodes to ask for now; `most` is what a draft that pays would be asked for."""
        return most if self._asked is None else min(most, self._asked)

    def passed(self, accepted: int, committed: int, checked: int) -> None:
        """A pass checked `checked` nodes of a draft, accepted `accepted` of them and committed `committed` tokens."""
        if self._asked is None:
            gain = accepted / max(1, committed - accepted)
            self._gain = min(DECAY * self._gain + (1.0 - DECAY) * gain, MOST)
            if self._gain < PAYS:
                self._rest()
        elif accepted:
            self._raise(accepted)
        elif self._asked == 0:
            self._left -= 1
            if self._left == 0:
                self._asked, self._left = PROBE, CREDIT
        else:
            self._left -= WRONG if checked else SILENT
            if self._left <= 0:
                self._rest()

    def _rest(self) -> None:
        self._asked, self._left = 0, REST

    def _raise(self, accepted: int) -> None:
        """A probe came true (or a hint that arrived in the rest): it is asked for more, and needs more to end."""
        self._asked = max(self._asked or 0, PROBE) * (1 + accepted)
        self._left = RAISED_CREDIT
        if self._asked >= ENOUGH:
            self._asked, self._gain = None, START
