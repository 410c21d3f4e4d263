"""Retention policies as text: parsed, written back, refused."""

import pytest

from treeckpt.policy import KeepError, keep_text, parse_keep


@pytest.mark.parametrize("text", ["", "all", "last:3", "every:1000 last:2", "period:3600", "steps:1;2;30",
                                  "best:loss:min:2", "best:val:max:1", "best:val:loss:min:2",
                                  "total:3:loss:min:1"])  # fmt: skip
def test_policies_read_back_as_they_were_written(text):
    assert keep_text(parse_keep(text)) == text
    assert parse_keep(text.replace(" ", ",")) == parse_keep(text.replace(" ", "+")) == parse_keep(text)


NO_POLICIES = [
    "last", "last:0", "last:-1", "last:x", "every:1e9", "period:nan", "period:-1", "best:", "steps:", "steps:²", "keep",
    "all:1", "all " * 20, "last:" + "9" * 30, "total:3", "total:1:loss", "total:2:loss:2", "total::loss",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_POLICIES)
def test_what_is_no_policy_is_refused(serve, many, text):
    with pytest.raises(KeepError):
        parse_keep(text)
    assert serve(many).get("/usage", params={"keep": text}).status_code == 422
