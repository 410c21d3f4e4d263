"""The preview of a load into another mesh."""

import pytest

from treeckpt.api import inspect as read_index
from treeckpt.core.analysis.reshard_preview import parse_mesh, parse_rules, plan_reshard


def test_a_reshard_is_the_plan_of_the_core(asked, path):
    page = asked("/reshard", mesh="2x2", names="dp,tp", place="model/*: Shard(0), Shard(1)")
    mesh = parse_mesh("2x2", "dp,tp")
    plan = plan_reshard(read_index(path), mesh, parse_rules("model/*: Shard(0), Shard(1)", mesh))
    assert (page["read"], page["held"], page["planned"]) == (plan.read, plan.held, 4)
    assert [(row["rank"], row["place"], row["read"]) for row in page["rows"]] == [
        (r.rank, f"dp {r.rank // 2}, tp {r.rank % 2}", r.read) for r in plan.ranks
    ]
    assert page["cells"] == [[at, n, b] for at, r in enumerate(plan.ranks) for n, b in r.files]


def test_a_reshard_begins_with_the_mesh_of_the_save(asked):
    page = asked("/reshard")
    assert (page["mesh"], page["names"], page["problem"]) == ("2x2", "dp,tp", None)
    for preset in page["presets"]:
        found = asked("/reshard", mesh=preset["mesh"], names=preset["names"], place=preset["place"])
        assert found["problem"] is None and found["planned"] > 0


@pytest.mark.parametrize(
    "query",
    [
        {"mesh": "0"},
        {"mesh": "2", "place": "<b>"},
        {"mesh": "9999999"},
        {"mesh": "2", "names": "a,b,c"},
        {"mesh": "2", "place": "*: Shard(0), R"},
    ],
)
def test_a_target_that_is_none_is_told_on_the_page(asked, query):
    assert asked("/reshard", **query)["problem"]
    page = asked.client.get(f"{asked.page}/reshard", params=query)
    assert page.status_code == 200 and "no preview" in page.text and "<b>" not in page.text
