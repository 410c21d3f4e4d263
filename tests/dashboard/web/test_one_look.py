"""A request looks at the directory of its checkpoint once, and hands down what it found."""

import math
from contextvars import ContextVar

import pytest

from treeckpt_dashboard.store.library import Library
from treeckpt_dashboard.web.app import ROOMS

ROUTES = [route for room in ROOMS for route in [*room.api, *room.pages]]
OF_A_CHECKPOINT = sorted({route.path for route in ROUTES if "{checkpoint_id}" in route.path})
COMPARISONS = ["/api/v1/diff", "/api/v1/diff/values", "/api/v1/diff/changes", "/diff", "/diff/changes"]


_asking: ContextVar[bool] = ContextVar("asking", default=False)
"""True in this test and in its requests; threads that earlier requests have started, as scans, have it not."""


@pytest.fixture
def looks(monkeypatch, client):
    """The names of the directories that requests looked at, one for each look: no scan of the run begins meanwhile."""
    found, look = [], Library._look
    token = _asking.set(True)
    for watch in client.app.state.library.watches.values():
        watch.refresh(wait=300)
        monkeypatch.setattr(watch, "_fresh_until", math.inf)

    def counted(self, run, folder):
        if _asking.get():
            found.append(folder.name)
        return look(self, run, folder)

    monkeypatch.setattr(Library, "_look", counted)
    yield found
    _asking.reset(token)


@pytest.mark.parametrize("path", OF_A_CHECKPOINT)
def test_every_address_of_a_checkpoint_looks_at_it_once(client, ids, looks, path):
    address = path.format(checkpoint_id=ids["step_00000700"], number=0)
    query = {"q": "weight", "larger": 1 << 10}
    client.get(address, params=query)  # the run is listed, and trees are read
    looks.clear()
    response = client.get(address, params=query)
    assert response.status_code == 200, response.text
    pages = -(-response.text.count("\n") // 100) if path.endswith(".csv") else 1  # a table has all pages
    assert looks == ["step_00000700"] * max(1, pages)


@pytest.mark.parametrize("path", COMPARISONS)
def test_a_comparison_looks_at_both_once(client, ids, looks, path):
    chosen = {"a": ids["step_00000500"], "b": ids["step_00000700"]}
    client.get(path, params=chosen)
    looks.clear()
    client.get(path, params=chosen)
    assert looks == ["step_00000500", "step_00000700"]
