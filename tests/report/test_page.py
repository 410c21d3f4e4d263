"""A report is one page that holds what it says, runs nothing of a checkpoint's, and stays small."""

import base64
import hashlib
import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treeckpt as tc
from tests.helpers.corruption import flip
from tests.helpers.samples import write_checkpoint, write_mixed_run, write_run
from treeckpt._cli.main import main
from treeckpt._core.html import el, joined, table
from treeckpt._core.text import bytes_text
from treeckpt._io.storage import checkpoint
from treeckpt._report import report
from treeckpt._runs.discovery import scan
from treeckpt.errors import CheckpointNotFound
from treeckpt_dashboard.report.page import CHILDREN, NODES

ATTACK = "</script><img src=x onerror=alert(1)>\u202e"


class Elements(HTMLParser):
    """Every element and attribute of a page, and whether they are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.names, self.open, self.attributes = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def words_of(text):
    """A page without its scripts, sheets and data, in which any word may stand."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = write_mixed_run(tmp_path_factory.mktemp("report") / "gpt")
    write_checkpoint(run / "step_00000700", step=700, metadata={"note": ATTACK})
    return run


def test_a_report_of_a_run_shows_every_checkpoint_and_the_newest_one(run, tmp_path, capsys):
    target = tmp_path / "r.html"
    assert main(["report", str(run), "--html", str(target)]) == 0
    assert "needs nothing else" in capsys.readouterr().out
    text = target.read_text(encoding="utf-8")
    for part in ("step_00000300", "damaged", "Sizes", "Where large arrays lie", "Time of the save", "Stragglers",
                 "Tree", "Shards", "layers.0.attention.qkv.weight", "rank 2, 5.1× the median"):  # fmt: skip
        assert html.escape(part) in text, part
    elements = Elements(text)
    assert elements.names.count("svg") == 2 and elements.names.count("canvas") == 3 and len(text) < 400_000
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_a_report_decodes_each_index_once_and_counts_what_files_take(run, tmp_path, monkeypatch):
    decoded = []
    decode = checkpoint.decode_index
    monkeypatch.setattr(checkpoint, "decode_index", lambda *given: decoded.append(1) or decode(*given))
    complete = next(info for info in scan(run) if info.status == "complete")
    decoded.clear()
    page = report(complete.path)
    assert len(decoded) == 1 and complete.save_id in page
    decoded.clear()
    assert "step_00000003" in report(write_run(tmp_path / "run", steps=(1, 2, 3))) and len(decoded) == 3
    files = [file for info in scan(run) if info.status != "foreign" for file in Path(info.path).iterdir()]
    assert bytes_text(sum(file.stat().st_size for file in files)) in report(run)


def test_a_report_asks_for_nothing_and_runs_no_script_but_its_own(run):
    text = report(run / "step_00000700")
    elements = Elements(text)
    assert not {"img", "link", "iframe", "object", "base"} & set(elements.names) and elements.names.count("script") == 1
    assert not [v for k, v in elements.attributes if k in ("src", "href", "style") or k.startswith("on")]
    [policy] = [v for k, v in elements.attributes if k == "content" and "default-src" in v]
    script = re.search(r"<script>(.*?)</script>", text, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"'sha256-{digest}'" in policy
    assert ATTACK not in text and "\u202e" not in text and html.escape("</script><img") in text
    assert "Permission to use, copy, modify" in script, "the licence of the library that lays out treemaps"


def test_bad_checkpoints_have_reports_that_say_what_they_are(run):
    assert "No space left on device" in report(run / "step_00000400")
    assert "damaged" in report(run / "step_00000500") and "damaged" in report(run / "step_00000600")
    with pytest.raises(CheckpointNotFound):
        report(run / "logs")


def test_a_report_says_which_checkpoints_a_verification_has_found_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("TREECKPT_CACHE", str(tmp_path / "cache"))
    for step in (1, 2):
        index = write_checkpoint(tmp_path / "run" / f"step_{step:08d}", step=step)
    assert "damaged" not in words_of(report(tmp_path / "run"))
    shard = tmp_path / "run" / "step_00000002" / index.file_list[0].name
    shard.write_bytes(flip(shard.read_bytes(), shard.stat().st_size - 9))
    assert main(["verify", str(tmp_path / "run")]) == 1
    for path in (tmp_path / "run", tmp_path / "run" / "step_00000002"):
        assert f"damaged: {shard.name}: bytes " in report(path)
    assert "complete, intact" in report(tmp_path / "run")
    assert "damaged" not in words_of(report(tmp_path / "run/step_00000001"))


def test_a_report_stays_small_whatever_is_in_the_checkpoint(tmp_path):
    tree = {f"k{n:05d}": {"a": n, "b": [n] * 3} for n in range(3000)}
    write_checkpoint(tmp_path / "c", tree)
    text = report(tmp_path / "c")
    assert f"and {3000 - CHILDREN:,} more" in text and len(text) < 1_000_000
    assert Elements(text).names.count("details") <= NODES


def test_a_report_needs_neither_torch_nor_what_serves_the_dashboard(run):
    code = (
        "import sys\nfrom treeckpt._report import report\n"
        f"assert len(report({str(run)!r})) > 10_000\n"
        "assert not {'torch', 'jinja2', 'fastapi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_trace_is_written_from_the_command_line(run, tmp_path, capsys):
    assert main(["trace", str(run / "step_00000700"), "--out", str(tmp_path / "t.json")]) == 0
    assert len([e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]) == 33
    assert main(["trace", str(run / "logs"), "--out", str(tmp_path / "u.json")]) == 1
    assert not (tmp_path / "u.json").exists()


@given(st.text(), st.text())
def test_text_stays_text_in_markup(child, attribute):
    parsed = Elements(el("p", child, el("br"), class_=attribute))
    assert parsed.names == ["p", "br"] and len(parsed.attributes) == 1
    assert Elements(joined([table((child,), [(attribute,)])])).names.count("td") == 1


def test_notebooks_show_indexes_reports_and_managers_with_names_as_text(tmp_path):
    with tc.Manager(tmp_path / "run<b>", background=False) as manager:
        saved = manager.save(3, {ATTACK: np.zeros((300, 7), np.float32), "n": 1})
        index = tc.inspect(manager.path(3))
        reports = []
        tc.load(manager.path(3), {"n": 0, "other": 1}, strict=False, on_report=reports.append)
        shown = [thing._repr_html_() for thing in (index, saved, reports[0], manager)]
    for text in shown:
        assert "<img" not in text and "<b>" not in text and "\u202e" not in text
        Elements(text)
    assert "[300, 7]" in shown[0] and "publish" in shown[1]
    assert "missing" in shown[2] and "unexpected" in shown[2]
    assert "step_00000003" in shown[3] and "complete" in shown[3]
