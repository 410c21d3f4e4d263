"""Where credentials for S3 come from, and which of several go first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import treeckpt as tc
from tests.helpers.s3 import S3
from treeckpt._io.storage.obstore import s3_options


def aws_files(home: Path, config: str = "", credentials: str = "") -> dict[str, str]:
    (home / ".aws").mkdir()
    (home / ".aws" / "config").write_text(config)
    (home / ".aws" / "credentials").write_text(credentials)
    return {"HOME": str(home)}


KEYS = "aws_access_key_id = {0}\naws_secret_access_key = secret of {0}\n"


def test_a_profile_gives_keys_region_and_endpoint(tmp_path: Path) -> None:
    config = "[default]\nregion = eu-west-1\n[profile lab]\nregion = eu-west-2\nendpoint_url = https://s3.lab\n"
    keys = f"[default]\n{KEYS.format('a')}[lab]\n{KEYS.format('b')}aws_session_token = t\n"
    env = aws_files(tmp_path, config, keys)
    plain = {"access_key_id": "a", "secret_access_key": "secret of a", "region": "eu-west-1"}
    lab = {"access_key_id": "b", "secret_access_key": "secret of b", "session_token": "t"}
    assert s3_options("s3://b", {}, env) == plain
    assert s3_options("s3://b", {}, {**env, "AWS_REGION": "x"}) == {k: v for k, v in plain.items() if k != "region"}
    assert s3_options("s3://b", {"region": "mine"}, env) == {**plain, "region": "mine"}
    named = {**env, "AWS_PROFILE": "lab"}
    place = {"region": "eu-west-2", "endpoint_url": "https://s3.lab"}
    assert s3_options("s3://b", {}, named) == {**lab, **place}
    assert s3_options("s3://b", {}, {**named, "AWS_ACCESS_KEY_ID": "c"}) == place, "as boto3 does"


def test_given_keys_and_the_environment_go_before_a_profile(tmp_path: Path) -> None:
    env = aws_files(tmp_path, credentials=f"[default]\n{KEYS.format('a')}")
    assert s3_options("s3://b", {"access_key_id": "mine"}, env) == {"access_key_id": "mine"}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        assert s3_options("s3://b", {}, {**env, name: "x"}) == {}
    assert s3_options("s3://b", {}, {"HOME": "/nowhere"}) == {}


def test_an_endpoint_that_is_given_by_any_name_goes_before_that_of_a_profile(tmp_path: Path) -> None:
    env = aws_files(tmp_path, "[default]\nendpoint_url = https://s3.lab\n")
    for name in ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url"):
        assert s3_options("s3://b", {name: "https://mine"}, env) == {name: "https://mine"}
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        assert s3_options("s3://b", {}, {**env, name: "https://mine"}) == {}
    assert s3_options("s3://b", {}, env) == {"endpoint_url": "https://s3.lab"}


def test_a_profile_that_is_missing_or_signs_on_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = aws_files(tmp_path, "[profile sso]\nsso_session = corp\n")
    with pytest.raises(tc.StoreError, match="expected the profile other of AWS_PROFILE"):
        s3_options("s3://b", {}, {**env, "AWS_PROFILE": "other"})
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(tc.StoreError, match="or boto3 to sign on with it"):
        s3_options("s3://b", {}, {**env, "AWS_PROFILE": "sso"})


def test_a_profile_reaches_the_server(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in s3.environment():
        monkeypatch.delenv(name)
    config = f"[default]\nregion = us-east-1\nendpoint_url = http://127.0.0.1:{s3.proxy}\n"
    monkeypatch.setenv("HOME", aws_files(tmp_path, config, f"[default]\n{KEYS.format('a')}")["HOME"])
    url = s3.url()
    tc.save(url, {"n": 1})
    assert tc.load(url) == {"n": 1}


def test_an_instance_with_a_role_gives_credentials(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in s3.environment():
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nowhere")
    server = f"http://127.0.0.1:{s3.proxy}"  # it plays the instance's part too
    store = tc.ObjectStore(s3.url(), endpoint=server, metadata_endpoint=server, region="us-east-1")
    tc.save(store, {"n": 1})
    assert tc.load(store) == {"n": 1}
    assert any("security-credentials" in row["path"] for row in s3.log())


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://bucket/run/x", {"skip_signature": True}),
        ("az://container/run/x", {"account_name": "a", "account_key": "YWJj"}),
        ("abfss://container@account.dfs.core.windows.net/run/x", {"account_key": "YWJj"}),
    ],
)
def test_stores_of_other_clouds_are_opened_by_their_options(url: str, options: dict[str, object]) -> None:
    assert tc.ObjectStore(url, **options).url == url
    assert tc.ObjectRun(url.removesuffix("/x"), **options).folder("x").url == url
