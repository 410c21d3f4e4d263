"""The page of trends over the steps of a run."""

from tests.helpers.samples import write_run


def test_trends_are_the_complete_checkpoints_by_step(client, serve, tmp_path, run):
    [found] = client.get("/api/v1/runs").json()["runs"]
    page = client.get(f"/api/v1/runs/{found['id']}/trends").json()
    assert page["step"] == [100, 200, 700] and page["world"] == [4, 4, 4]
    newest = found["checkpoints"][0]
    assert page["ids"][-1] == newest["id"] and page["seconds"][-1] == page["blocked"][-1] == newest["seconds"]
    assert 0.4 < page["dedupe"][-1] < 0.8  # tp holds most of the state twice
    text = client.get(f"/runs/{found['id']}/trends").text
    assert f"diff?a={page['ids'][1]}&amp;b={page['ids'][2]}" in text
    empty = serve(tmp_path)
    [none] = empty.get("/api/v1/runs").json()["runs"]
    assert "no complete checkpoint" in empty.get(f"/runs/{none['id']}/trends").text
    assert client.get("/api/v1/runs/nothing/trends").status_code == 404


def test_trends_are_listed_100_at_a_time(serve, tmp_path):
    write_run(tmp_path, steps=tuple(range(1, 104)), tree={"x": 1}, world=1)
    client = serve(tmp_path)
    [run] = client.get("/api/v1/runs").json()["runs"]
    assert client.get(f"/api/v1/runs/{run['id']}/trends").json()["next"] == 100
    assert client.get(f"/runs/{run['id']}/trends?start=100").text.count('<th scope="row">') == 3
