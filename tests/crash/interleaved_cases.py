"""Which interleavings are tried: who does what to which step, from what state and in what order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from tests.crash.interleaved_actions import Action
from tests.crash.interleaved_actor import SLEEP

__all__ = ["BEGIN", "STARTS", "Case", "Order", "Turn", "base_of", "draw"]

STEPS = (1, 2, 3)
"""What the runs may have. There are one or two steps before."""
LONGEST = 40
"""Operations in a row, at most, where somebody else goes on then."""
OPERATIONS = {
    **dict.fromkeys(("save", "overwrite", "delete", "repair", "rebuild"), (36, 14)),
    **dict.fromkeys(("follow", "flatten"), (60, 20)),
    **dict.fromkeys(("clean", "gc"), (60, 12)),
    **dict.fromkeys(("manager", "incremental"), (90, 22)),
    "pin": (20, 4),
    "restore": (30, 1),
    **dict.fromkeys(("load", "careless"), (6, 1)),
}
"""Operations of an action, about, and how many of them change something."""
BACK = (-7200.0, -86400.0, -30.0)
"""Seconds by which clocks are set."""
PATIENCE = (0, 3, 2000)
"""How often others may look again for what a stopped process has to do, before it goes on."""
_SHARED = (("save", 2, ""), ("follow", 1, ""), ("follow", 2, ""), ("follow", 1, ""), ("follow", 2, ""))
"""Behind them step 2 shares a file of step 1."""
STARTS: dict[str, tuple[tuple[str, int, str], ...]] = {
    "two": (("save", 1, ""), ("save", 2, "")),
    "one": (("save", 2, ""),),
    "killed": (("save", 2, ""), ("save", 1, r"index\.json")),
    "half": (("save", 1, ""), ("save", 2, ""), ("overwrite", 1, r"index\.json")),
    "replaced": (("save", 1, ""), ("save", 2, ""), ("overwrite", 1, r"(remove|DELETE) .*shard")),
    **{
        f"deleting {count}": (("save", 1, ""), ("save", 2, ""), ("delete", 1, f"{count}"))
        for count in (4, 6, 8, 10, 12, 14, 16, 18)
    },
    "no index": (("save", 1, ""), ("save", 2, ""), ("lose index", 1, "")),
    "torn": (("save", 1, ""), ("save", 2, ""), ("tear index", 1, "")),
    "long": (("save", 1, ""), ("save", 2, ""), ("lengthen", 1, "")),
    "shared": _SHARED,
    "shared by two": (*_SHARED, ("follow", 3, "")),
    "shared and flattened": (*_SHARED, ("flatten", 2, "")),
    "half flattened": (*_SHARED, ("flatten", 2, r"index\.json")),
    "origin replaced": (*_SHARED, ("overwrite", 1, "")),
    "origin deleted": (*_SHARED, ("delete", 1, "")),
    **{f"deleting origin {count}": (*_SHARED, ("delete", 1, f"{count}")) for count in (6, 12, 18, 24, 30)},
    "half shared": (*_SHARED, ("follow", 3, r"index\.json")),
    "shared and lost": (*_SHARED, ("lose index", 2, "")),
    "origin lost": (*_SHARED, ("lose index", 1, "")),
}
"""What has happened in the run before: (action, step, where it was killed: a number of operations, or what the next
one would be)."""
_PAIRS = (
    *("overwrite+clean", "overwrite+gc", "overwrite+delete", "overwrite+overwrite", "overwrite+manager"),
    *("save+clean", "save+save", "save+delete", "save+gc", "clean+clean", "clean+delete", "delete+delete"),
    *("manager+manager", "manager+clean", "manager+delete", "repair+clean", "repair+overwrite", "repair+delete"),
    *("repair+save", "repair+repair", "pin+clean", "pin+delete", "load+overwrite", "load+delete", "restore+clean"),
    *("restore+manager",),
)
_SHARING_PAIRS = (
    *("follow+delete", "follow+delete", "follow+clean", "follow+gc", "follow+overwrite", "follow+follow"),
    *("follow+flatten", "follow+save", "follow+manager", "follow+repair", "follow+load"),
    *("incremental+incremental", "incremental+delete", "incremental+clean", "incremental+flatten", "incremental+gc"),
    *("incremental+follow", "incremental+restore", "incremental+load"),
    *("flatten+delete", "flatten+clean", "flatten+overwrite", "flatten+flatten", "flatten+load", "flatten+repair"),
    *("load+delete", "load+clean", "restore+clean", "overwrite+delete", "delete+delete", "delete+clean", "save+delete"),
    *("rebuild+delete", "repair+clean", "rebuild+clean"),
)
_ALL = (
    "overwrite",
    "overwrite",
    "save",
    "clean",
    "clean",
    "gc",
    "delete",
    "manager",
    "repair",
    "pin",
    "load",
    "restore",
)


class Case(msgspec.Struct, frozen=True):
    number: int
    start: str
    actions: tuple[Action, ...]
    order: str
    """"uniform": each operation by a process drawn anew; "few": long runs, changed at a few moments; "frozen": one is
    stopped at an operation until the others have ended, or wait."""
    frozen: tuple[int, int, int]
    """Who is stopped, at which of its operations, and how often others may look again meanwhile."""
    only_changes: bool
    """Whether they stop only before operations that change something."""
    killed: tuple[int, int] | None
    """Who is killed, and at which of its operations."""
    clock: tuple[int, float] | None = None
    """After how many operations all clocks are set, and by how many seconds."""

    @property
    def kind(self) -> str:
        return " x ".join(sorted(action.what for action in self.actions))


def draw(number: int, whats: Sequence[str] = (), *, far: bool = False, sharing: bool = False) -> Case:
    """The case of a number, of these actions if some are given.

    Args:
        far: one process is always stopped.
        sharing: in a run whose checkpoints share files.
    """
    chance = random.Random(number)
    drawn = chance.choice(_SHARING_PAIRS if sharing else _PAIRS).split("+")
    if chance.random() < 0.3:
        drawn = [*drawn, chance.choice((*_ALL, "follow", "incremental", "flatten") if sharing else _ALL)]
    whats = whats or drawn
    start = _start(chance, whats) if not sharing else _shared_start(chance, whats)
    actions = tuple(
        Action(what, _step(chance, what, start), 100 + at, chance.choice((0.0, 0.0, 3600.0)))
        for at, what in enumerate(whats)
    )
    clock = None
    if sharing:
        actions = tuple(msgspec.structs.replace(action, **_of_sharing(chance, action)) for action in actions)
        clock = (chance.randrange(60), chance.choice(BACK)) if chance.random() < 0.3 and not far else None
    count = len(actions)
    only_changes = chance.random() < 0.5
    length = {what: OPERATIONS[what][only_changes] for what in whats}
    dying, stopped = chance.randrange(count), chance.randrange(count)
    killed = (dying, chance.randrange(length[whats[dying]])) if chance.random() < 0.2 else None
    order = chance.choice(("uniform", "few", "few", "frozen", "frozen")) if not far else "frozen"
    frozen = stopped, chance.randrange(length[whats[stopped]]), chance.choice(PATIENCE)
    return Case(number, start, actions, order, frozen, only_changes, killed, clock)


def _start(chance: random.Random, whats: Sequence[str]) -> str:
    if {"repair", "rebuild"} & {*whats} and chance.random() < 0.8:
        return chance.choice(("no index", "torn", "long"))
    if chance.random() < 0.55:
        return "two"
    return chance.choice([name for name in STARTS if name not in ("no index", "torn", "long")])


def _shared_start(chance: random.Random, whats: Sequence[str]) -> str:
    if {"repair", "rebuild"} & {*whats} and chance.random() < 0.6:
        return chance.choice(("shared and lost", "origin lost"))
    starts = [name for name, done in STARTS.items() if done[: len(_SHARED)] == _SHARED]
    return "shared" if chance.random() < 0.4 else chance.choice([name for name in starts if not name.endswith("lost")])


def _of_sharing(chance: random.Random, action: Action) -> dict[str, int]:
    """What is drawn of an action anew: `follow` has a base, a reader step 2, and some save other frozen values."""
    step, seed = action.step, action.seed + 100 * (chance.random() < 0.15)
    if action.what in ("follow", "incremental"):
        step = chance.choice((1, 2, 3, 3, 3))
    elif action.what in ("load", "flatten"):
        step = chance.choice((1, 2, 2, 2))
    elif action.what in ("repair", "rebuild"):
        step = chance.choice((1, 2))
    return {"step": step, "seed": seed, "base": base_of(step, chance.choice((1, 2))) if action.what == "follow" else 0}


def base_of(step: int, drawn: int = 2) -> int:
    """The step that an incremental save of a step follows: of step 3 one that is drawn."""
    return drawn if step == 3 else 3 - step


def _step(chance: random.Random, what: str, start: str) -> int:
    """Mostly step 1, which the policies keep no longer once another one was saved after it."""
    if what in ("clean", "gc", "restore"):
        return 0
    if what in ("save", "manager", "incremental"):
        return chance.choice((1, 3) if start != "one" else (1, 1, 3))
    return chance.choice((1, 1, 1, 2)) if what not in ("repair", "rebuild") else 1


BEGIN = "begin"
"""In the place of the operation of a process that has not begun."""


class Turn(msgspec.Struct):
    """A process, or a thread of one, that could go on."""

    actor: int
    what: str
    done: int
    """Operations of that process so far."""
    place: int
    """Its place in the list of all turns."""
    single: bool = False
    """Whether it can go on for one operation only."""


class Order:
    """Says who goes on, and for how many operations."""

    def __init__(self, case: Case) -> None:
        self.case, self.chance = case, random.Random(-case.number - 1)
        self.current, self.changes = -1, self.chance.randrange(1, 4)
        self.longest = LONGEST // 4 if case.only_changes else LONGEST
        self.left = self.chance.randrange(1, self.longest)
        self.released = case.order != "frozen"
        self.alone = self.chance.random() < 0.7
        self.looked, self.kept = 0, False

    @property
    def stopping(self) -> bool:
        """Whether a process is kept stopped now."""
        return self.kept and not self.released

    def choose(self, turns: Sequence[Turn]) -> tuple[Turn, int]:
        pool = list(turns)
        who, at, patience = self.case.frozen
        if not self.released:
            mine = [turn for turn in pool if turn.actor == who]
            if mine and mine[0].what == BEGIN and self.alone:
                return mine[0], 1
            if mine and mine[0].what != BEGIN and mine[0].done >= at:
                self.kept = True
                others = [turn for turn in pool if turn.actor != who]
                waiting = not any(turn.what != SLEEP for turn in others)
                self.looked += waiting
                self.released = not others or self.looked > patience
                pool = pool if self.released else others
            elif mine and self.alone:
                return mine[0], max(1, at - mine[0].done)
        awake = [turn for turn in pool if turn.what != SLEEP]
        pool = awake if awake and self.chance.random() < 0.95 else pool
        return self._few(pool) if self.case.order != "uniform" else self._uniform(pool)

    def _uniform(self, pool: Sequence[Turn]) -> tuple[Turn, int]:
        return self.chance.choice(pool), self.chance.choice((1, 1, 1, 2, 4))

    def _few(self, pool: Sequence[Turn]) -> tuple[Turn, int]:
        same = [turn for turn in pool if turn.actor == self.current]
        if same and self.left <= 0 and self.changes > 0:
            self.changes -= 1
            same = []
            pool = [turn for turn in pool if turn.actor != self.current] or list(pool)
        if not same:
            same = [self.chance.choice(pool)]
            self.current, self.left = same[0].actor, self.chance.randrange(1, self.longest)
        turn = self.chance.choice(same)
        count = 1 if turn.single else max(1, self.left) if self.changes else LONGEST
        self.left -= count
        return turn, count
