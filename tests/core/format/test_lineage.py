"""The lineage of any history of saves, rollbacks and deletions is what the history says."""

from hypothesis import given
from hypothesis import strategies as st

from treeckpt._core.format.lineage import MAX_SEQUENCE, Lineage, LineageOrder, SavedCheckpoint, next_lineage

SAVE, BACK, DELETE = "save", "back", "delete"
EVENTS = st.lists(
    st.tuples(st.just(SAVE), st.integers(1, 3))
    | st.tuples(st.just(BACK), st.integers(0, 20))
    | st.tuples(st.just(DELETE), st.integers(0, 20)),
    max_size=40,
)


class History:
    """A run as it really went: every save knows its parent."""

    def __init__(self) -> None:
        self.disk: dict[int, SavedCheckpoint] = {}
        self.parents: dict[str, str] = {}
        self.head: SavedCheckpoint | None = None
        self.saved: list[str] = []

    def save(self, ahead: int) -> None:
        step = (self.head.step if self.head else 0) + ahead
        save_id = f"{len(self.saved):016x}"
        self.parents[save_id] = self.head.save_id if self.head else ""
        self.disk[step] = self.head = SavedCheckpoint(step, save_id, next_lineage(self.disk.values(), self.head, step))
        self.saved.append(save_id)

    def ancestors(self, save_id: str) -> set[str]:
        found: set[str] = set()
        while save_id:
            found.add(save_id)
            save_id = self.parents[save_id]
        return found


@given(EVENTS)
def test_the_newest_was_saved_last_and_its_ancestors_alone_are_on_its_lineage(events):
    history = History()
    for what, number in events:
        there = sorted(history.disk.values())
        if what == SAVE:
            history.save(number)
            assert history.head is not None and history.head.lineage.follows == history.parents[history.head.save_id]
        elif there and what == BACK:
            history.head = there[number % len(there)]
        elif there and len(there) > 1:
            del history.disk[there[number % len(there)].step]
        marks = list(history.disk.values())
        if not marks:
            continue
        order = LineageOrder(marks)
        newest = order.newest()
        assert newest is not None and newest.save_id == max(
            mark.save_id for mark in marks if order.position(mark).present
        )
        if newest.save_id == history.saved[-1]:
            present = {mark.save_id for mark in marks if order.position(mark).present}
            assert present == history.ancestors(newest.save_id) & {mark.save_id for mark in marks}


@given(EVENTS)
def test_a_save_is_newer_than_all_that_is_there(events):
    history = History()
    for what, number in events:
        there = sorted(history.disk.values())
        if what == SAVE or not there:
            history.save(number)
            newest = LineageOrder(history.disk.values()).newest()
            assert newest is not None and newest.save_id == history.saved[-1]
        elif what == BACK:
            history.head = there[number % len(there)]
        else:
            del history.disk[there[number % len(there)].step]


@given(st.sets(st.integers(0, 50)), st.integers(0, 60))
def test_without_records_the_order_is_that_of_the_steps(steps, new):
    marks = [SavedCheckpoint(step, f"{step:016x}") for step in steps]
    order = LineageOrder(marks)
    assert sorted(marks, key=order.position) == sorted(marks)
    assert all(order.position(mark) == (True, mark.step, mark.step) for mark in marks)
    lineage = next_lineage(marks, None, new)
    lower = [step for step in steps if step < new]
    assert lineage.follows == (f"{max(lower):016x}" if lower else "")
    order = LineageOrder([*(mark for mark in marks if mark.step != new), SavedCheckpoint(new, "n" * 16, lineage)])
    assert order.newest() == SavedCheckpoint(new, "n" * 16, lineage)
    assert {mark.step for mark in marks if not order.position(mark).present} == {s for s in steps if s > new}


def test_an_ordinary_run_counts_by_its_steps_and_abandons_nothing():
    history = History()
    for _ in range(5):
        history.save(10)
    assert [mark.sequence for mark in history.disk.values()] == [10, 20, 30, 40, 50]
    assert all(mark.lineage is not None and not mark.lineage.abandoned for mark in history.disk.values())


def test_a_sequence_at_the_limit_stays_sound():
    marks = [SavedCheckpoint(1, "a" * 16, Lineage(MAX_SEQUENCE - 1))]
    lineage = next_lineage(marks, None, 2)
    assert lineage.is_sound() and LineageOrder(
        [*marks, SavedCheckpoint(2, "b" * 16, lineage)]
    ).newest() == SavedCheckpoint(2, "b" * 16, lineage)


def test_a_save_counts_on_from_the_highest_sequence_or_from_its_step():
    marks = [SavedCheckpoint(5, "a" * 16, Lineage(9)), SavedCheckpoint(7, "b" * 16, Lineage(8))]
    for step, sequence in ((6, 10), (9, 10), (10, 10), (11, 11)):
        assert next_lineage(marks, None, step).sequence == sequence
    away = SavedCheckpoint(5, "c" * 16, Lineage(20))
    assert next_lineage(marks, away, 6) == Lineage(21, "c" * 16, ((8, 8),))
    assert next_lineage([], None, 0) == Lineage(0)


def test_numbers_of_a_lineage_are_rising_and_in_bounds():
    for sound in (
        Lineage(0),
        Lineage(MAX_SEQUENCE - 1),
        Lineage(5, "", ((0, 0), (2, 3))),
        Lineage(5, "", ((1, 2), (2, 3))),
    ):
        assert sound.is_sound()
    for other in (Lineage(-1), Lineage(MAX_SEQUENCE), Lineage(5, "", ((-1, 0),)), Lineage(5, "", ((2, 1),))):
        assert not other.is_sound()
    assert not Lineage(5, "", ((4, 5), (1, 2))).is_sound()
