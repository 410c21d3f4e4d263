"""What the server's start leaves for later: routes are made with the first request, rich is not imported."""

import os
import subprocess
import sys

from starlette.testclient import TestClient

from treeckpt_dashboard.web.app import ROOMS, create_app


def _made():
    return [route.path for room in ROOMS for route in [*room.api, *room.pages] if "route" in vars(route.endpoint)]


def test_parameters_of_an_address_are_read_with_its_first_request(run):
    for room in ROOMS:
        for route in [*room.api, *room.pages]:
            vars(route.endpoint).pop("route", None)
    client = TestClient(create_app([run]), base_url="http://127.0.0.1:8265")
    assert _made() == []
    assert client.get("/usage").status_code == 200
    assert client.get("/usage", params={"start": "x"}).status_code == 422
    assert _made() == ["/usage"]
    assert client.post("/live").status_code == 405


def test_the_server_is_imported_without_what_prints_tables():
    code = (
        "import sys, treeckpt._cli.main, treeckpt_dashboard.web.server\n"
        "assert not {'torch', 'rich', 'pydantic.v1'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
