"""Parameters are validated by their types, and an error names the parameter."""

import pytest


@pytest.mark.parametrize("asked", ["start=-1", "start=many", "sort=size", "q=" + "x" * 501])
def test_what_is_no_question_is_told_with_its_name(client, asked):
    [run] = client.get("/api/v1/runs").json()["runs"]
    name = asked.partition("=")[0]
    for prefix in ("/api/v1", ""):
        answer = client.get(f"{prefix}/runs/{run['id']}?{asked}")
        assert answer.status_code == 422
        assert f"{name}: " in (answer.json()["error"] if prefix else answer.text)


def test_numbers_of_a_path_are_numbers(client, ids):
    at = f"/api/v1/checkpoints/{ids['step_00000700']}/leaves"
    assert client.get(f"{at}/0").status_code == 200
    assert client.get(f"{at}/first").status_code == 422
    assert client.get(f"{at}/{10**40}").status_code in (404, 422)


def test_the_schema_says_what_may_be_asked(client):
    schema = client.get("/api/v1/openapi.json").json()
    asked = schema["paths"]["/api/v1/checkpoints/{checkpoint_id}/treemap"]["get"]
    parameters = {one["name"]: one for one in asked["parameters"]}
    assert parameters["checkpoint_id"]["in"] == "path" and parameters["checkpoint_id"]["required"]
    bounds = {"type": "integer", "minimum": 10, "maximum": 100_000, "default": 20_000}
    assert bounds.items() <= parameters["count"]["schema"].items()
