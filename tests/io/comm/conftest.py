"""Stores that living ranks share have time to answer, however short the time limit of a comm is."""

from __future__ import annotations

import pytest

from tests.helpers.world import LONG
from treeckpt._io.comm import message_store


@pytest.fixture(autouse=True)
def patient_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_store, "LEAST_ANSWER_LIMIT", LONG)
