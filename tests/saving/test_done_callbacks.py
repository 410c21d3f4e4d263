"""`Pending.add_done_callback`: called once the save has ended, whatever came of it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeckpt as tc
from tests.helpers.background import savers_ended
from tests.helpers.world import LONG
from treeckpt._saving.session import Pending


def test_callbacks_are_called_once_in_order_when_the_checkpoint_is_there(tmp_path: Path) -> None:
    found: list[tuple[str, bool, int]] = []
    called = threading.Event()
    pending = tc.save_async(tmp_path / "c", {"w": np.zeros(1 << 20)}, background=tc.BackgroundOptions(writer="thread"))
    for name in "ab":
        pending.add_done_callback(lambda one, name=name: found.append((name, one.done(), tc.inspect(one.path).world)))
    pending.add_done_callback(lambda _: called.set())
    assert called.wait(LONG) and found == [("a", True, 1), ("b", True, 1)]
    savers_ended()
    pending.add_done_callback(lambda one: found.append(("late", one.done(), 1)))
    assert found[2:] == [("late", True, 1)], "called at once, as the save has ended"
    assert pending.result() is not None


def test_a_callback_that_is_added_while_others_are_called_comes_behind_them() -> None:
    found, begun, added = list[str](), threading.Event(), threading.Event()
    pending = Pending("somewhere")
    pending.add_done_callback(lambda _: (begun.set(), added.wait(LONG), found.append("first")))
    pending.add_done_callback(lambda _: found.append("second"))
    ending = threading.Thread(target=pending.set_finished, args=(None, None))
    ending.start()
    assert begun.wait(LONG) and pending.done()
    pending.add_done_callback(lambda _: found.append("third"))
    pending.add_done_callback(lambda one: one.add_done_callback(lambda _: found.append("fourth")))
    added.set()
    ending.join(LONG)
    pending.add_done_callback(lambda _: found.append("fifth"))
    assert found == ["first", "second", "third", "fourth", "fifth"]


def test_callbacks_learn_of_failures_and_their_own_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    errors: list[BaseException] = []
    called = threading.Event()

    def note(pending: tc.Pending) -> None:
        try:
            pending.result()
        except tc.TreeckptError as error:
            errors.append(error)

    class Full(tc.MemoryStore):
        def publish(self, name: str, data: bytes, **options: Any) -> None:
            raise OSError(28, "No space left on device")

    with caplog.at_level(logging.ERROR, "treeckpt"):
        pending = tc.save_async(Full(), {"w": np.zeros(8)}, background=tc.BackgroundOptions(writer="thread"))
        pending.add_done_callback(lambda _: 1 / 0)
        pending.add_done_callback(note)
        pending.add_done_callback(lambda _: called.set())
        assert called.wait(LONG)
    assert len(errors) == 1 and "No space left" in str(errors[0])
    assert "a callback of the save failed" in caplog.text and "ZeroDivisionError" in caplog.text
