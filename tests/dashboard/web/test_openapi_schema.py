"""Every address of the API answers as its schema says, for random parameters with real ids and invented ones."""

import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.helpers.samples import FILES, write_checkpoint, write_mixed_run
from treeckpt_dashboard.web.app import create_app

HEADERS = {"Host": "127.0.0.1"}


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    run = write_mixed_run(tmp_path_factory.mktemp("schema") / "run")
    write_checkpoint(run / "step_00000700", step=700, metadata={"note": "x"}, files=FILES)
    return create_app([run])


@pytest.fixture(scope="module")
def known(app):
    """Values of parameters that lead somewhere."""
    library = app.state.library
    [run] = library.runs
    checkpoints = [checkpoint_id for checkpoint_id, _ in library.checkpoints(run)]
    good = [checkpoint_id for checkpoint_id, info in library.checkpoints(run) if info.leaves is not None]
    return {
        "run_id": [run.id],
        "checkpoint_id": checkpoints + 6 * good,
        "number": [0, 0, 0, 1, 9],
        "a": good,
        "b": good,
    }


def test_no_question_makes_an_error_of_the_server(app, known):
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_asgi("/api/v1/openapi.json", app, headers=HEADERS)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == len(app.openapi()["paths"]) >= 14
    checks = pytest.importorskip("schemathesis.checks")
    wanted = [checks.not_a_server_error, checks.response_schema_conformance, checks.content_type_conformance]
    answered = set()
    for operation in operations:
        ask(operation, known, answered, wanted)
    assert {status for _, status in answered} <= {200, 202, 400, 404, 405, 422}
    assert {path for path, status in answered if status == 200} >= {o.path for o in operations if "{" not in o.path}
    assert sum(status == 200 for _, status in answered) >= len(operations) - 2  # random questions seldom fit all


def ask(operation, known, answered, checks):
    @settings(max_examples=8, deadline=None, database=None, phases=[Phase.generate], derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(operation.as_strategy())
    def questions(case):
        pick = random.Random(repr((operation.path, case.query, case.path_parameters)))
        for asked in (case.path_parameters or {}, case.query or {}):
            for name in asked:
                if name in known and pick.random() < 0.85:
                    asked[name] = pick.choice(known[name])
        response = case.call(headers=HEADERS)
        answered.add((operation.path, response.status_code))
        case.validate_response(response, checks=checks)

    questions()
