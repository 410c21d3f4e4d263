"""Parts of checkpoints: who gives what, who wins, what `strict` says of the rest, and what the report names."""

from __future__ import annotations

import errno
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import treeckpt as tc
from treeckpt import rules as R
from treeckpt._io.storage.store import FETCH_MEMORY, StoreTraits
from treeckpt._loading.read_batch import MEMORY, BatchOptions, ReadBatch


def store_of(tree: Any) -> tc.MemoryStore:
    store = tc.MemoryStore()
    tc.save(store, tree)
    return store


def full(value: float, n: int = 2) -> np.ndarray:
    return np.full(n, value)


# one checkpoint: the truth table of strict ------------------------------------------------------------------------
PARTS = ("sparse", "dense", "extra")
SAVED = {"sparse": {"ids": full(1), "rows": full(2)}, "dense": {"w": full(3)}, "extra": {"step": full(4)}}


@pytest.mark.parametrize("into", [False, True], ids=["load", "load_into"])
@pytest.mark.parametrize("strict", [True, False, "missing"])
@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("unexpected", [True, False])
@pytest.mark.parametrize("selected", [None, "sparse", "exclude sparse"])
def test_strict_is_about_all_parts_alike_and_only_those_that_are_asked_for(
    into: bool, strict: bool | str, missing: bool, unexpected: bool, selected: str | None
) -> None:
    """A difference inside of what is asked for is an error by `strict`; outside of it, it is none."""
    store = store_of(SAVED)
    for part in PARTS:
        like: dict[str, Any] = {name: {key: full(0) for key in leaves} for name, leaves in SAVED.items()}
        if missing:
            like[part]["new"] = full(-1)
        if unexpected:
            del like[part]["w" if part == "dense" else "step" if part == "extra" else "rows"]
        options: dict[str, Any] = {"strict": strict}
        if selected == "sparse":
            options["select"] = "sparse"
        elif selected:
            options["exclude"] = ["sparse"]
        asked = selected is None or (part == "sparse") == (selected == "sparse")
        reports: list[tc.LoadReport] = []

        def load(like: Any = like, options: Any = options, reports: Any = reports) -> Any:
            if into:
                reports.append(tc.load_into(store, like, **options))
                return like
            return tc.load(store, like, on_report=reports.append, **options)

        if strict and asked and (missing or (unexpected and strict is True)):
            with pytest.raises(tc.MismatchError, match=part) as caught:
                load()
            assert ("not asked for" in str(caught.value)) == (unexpected and strict is True)
            assert all((leaf == (-1 if key == "new" else 0)).all() for x in like.values() for key, leaf in x.items())
            continue
        found = load()
        assert reports[0].missing == ((f"{part}/new",) if missing and asked else ())
        assert bool(reports[0].unexpected) == (unexpected and asked)
        for name, leaves in found.items():
            taken = selected is None or (name == "sparse") == (selected == "sparse")
            for key, leaf in leaves.items():
                expected = SAVED[name][key] if taken and key != "new" else full(-1 if key == "new" else 0)
                assert leaf.tolist() == expected.tolist(), f"{name}/{key}"


def test_what_is_excluded_comes_back_as_an_ellipsis_without_like() -> None:
    found = tc.load(store_of(SAVED), select=["sparse", "dense"], exclude="*/rows")
    assert found["sparse"]["rows"] is ... and found["extra"]["step"] is ... and found["dense"]["w"].tolist() == [3, 3]
    assert found["sparse"]["ids"].tolist() == [1, 1]


def test_exclusion_goes_by_whole_steps_and_by_the_names_after_rules() -> None:
    store = store_of({"fc.weight": full(1), "fc.weight_g": full(2), "old": full(3)})
    found = tc.load(store, exclude="fc.weight", rename={"old": "new"})
    assert found["fc.weight"] is ... and found["fc.weight_g"].tolist() == [2, 2] and found["new"].tolist() == [3, 3]
    assert tc.load(store, exclude="new", rename={"old": "new"})["new"] is ...


# several ----------------------------------------------------------------------------------------------------------
@given(st.lists(st.sets(st.sampled_from("abcde")), min_size=1, max_size=4), st.booleans(), st.data())
def test_later_checkpoints_win_leaf_by_leaf(given_: list[set[str]], into: bool, data: st.DataObject) -> None:
    stores = [store_of({key: full(i) for key in sorted(keys)} | {"all": full(i)}) for i, keys in enumerate(given_)]
    names = set[str]().union(*given_)
    masks = [data.draw(st.sets(st.sampled_from("abcde"))) & names for _ in stores]
    bank = tc.Bank([tc.From(store, exclude=sorted(mask)) for store, mask in zip(stores, masks, strict=True)])
    winner = {key: i for i, keys in enumerate(given_) for key in keys - masks[i]} | {"all": len(stores) - 1}
    like = {key: full(-1) for key in sorted(winner)}
    reports: list[tc.LoadReport] = []
    if into:
        reports.append(tc.load_into(bank, like))
        found = like
    else:
        found = tc.load(bank, like, on_report=reports.append)
    assert {key: int(leaf[0]) for key, leaf in found.items()} == winner
    whole = tc.load(bank)
    assert {key: int(leaf[0]) for key, leaf in whole.items() if leaf is not ...} == winner
    loaded = [sum(i == number for i in winner.values()) for number in range(len(stores))]
    assert [report.loaded for report in reports[0].sources] == loaded
    assert reports[0].nbytes == 16 * len(winner), "nothing is read that another one replaces"


def test_each_checkpoint_of_a_bank_has_its_own_rules() -> None:
    base = store_of({"model": {"h.0": torch.ones(4, 2), "h.1": torch.ones(4, 2), "head": torch.zeros(3)}, "step": 5})
    tuned = store_of({"net": {"qkv": torch.full((4, 2), 7.0)}, "junk": torch.ones(1)})
    like = {"model": {"l.0": torch.empty(4, 2), "q": torch.empty(2, 2), "head": torch.empty(3)}, "step": 0}
    bank = [
        tc.From(base, rename={"model/h.$L": "model/l.$L"}, exclude=["model/l.1"]),
        tc.From(tuned, select="model", transforms=[R.Split("net/qkv", ("model/q", "_"))]),
    ]
    reports: list[tc.LoadReport] = []
    found = tc.load(bank, like, on_report=reports.append)
    assert found["model"]["q"].tolist() == [[7, 7], [7, 7]] and found["step"] == 5
    assert found["model"]["l.0"].tolist() == [[1, 1]] * 4
    report = reports[0]
    assert len(report.sources) == 2 and [source.loaded for source in report.sources] == [3, 1]
    assert ("model/h.0", "model/l.0") in report.renamed and "model/l.1" not in report.unexpected
    assert str(report).count("loaded memory") >= 2
    with pytest.raises(tc.MismatchError, match="not asked for"):
        tc.load(bank, {"model": like["model"]})
    with pytest.raises(tc.MismatchError, match=r"missing in the checkpoint: more"):
        tc.load(bank, {**like, "more": 1})
    tc.load(bank, {**like, "more": 1}, strict=False, on_report=reports.append)
    assert reports[-1].missing == ("more",)
    assert tc.load(bank, {"model": {"head": torch.empty(3)}}, strict="missing")["model"]["head"].tolist() == [0, 0, 0]
    with pytest.raises(tc.MismatchError, match=r"every leaf of like .*1 missing in the checkpoint: more. Pass strict="):
        tc.load(bank, {"more": 1}, strict="missing")
    with pytest.raises(tc.MismatchError, match=r"strict: expected True or False or 'missing', found 'unexpected'"):
        tc.load(bank, {"more": 1}, strict="unexpected")  # pyright: ignore[reportArgumentType]


def test_checkpoints_with_mappings_of_two_kinds_load_as_one_tree() -> None:
    """State dicts of `torch.save` are ordered ones in some files, and plain dicts in others."""
    first, second = store_of({"m": OrderedDict(a=full(1), b=full(1))}), store_of({"m": {"b": full(2), "c": full(2)}})
    for bank, kind in (([first, second], OrderedDict), ([second, first], dict)):
        found = tc.load(bank)["m"]
        assert type(found) is kind and {key: int(leaf[0]) for key, leaf in found.items()} == {
            "a": 1, "b": 2 if kind is OrderedDict else 1, "c": 2,
        }  # fmt: skip
    with pytest.raises(tc.MismatchError, match=r"m: expected .* every checkpoint: OrderedDict of 2, found list of 1"):
        tc.load([first, store_of({"m": [full(1)]})])


def test_a_bank_is_checked_as_a_whole_before_anything_is_written() -> None:
    first, second = store_of({"a": full(1)}), store_of({"b": full(2, n=3)})
    mine = {"a": full(0), "b": full(0)}
    with pytest.raises(tc.MismatchError, match=r"shape \(2,\)"):
        tc.load_into([first, second], mine)
    assert mine["a"].tolist() == [0, 0]


def test_a_missing_checkpoint_is_an_error_unless_it_is_optional(tmp_path: Path) -> None:
    store = store_of({"a": full(1)})
    with pytest.raises(tc.CheckpointNotFound):
        tc.load([store, tmp_path / "none"])
    found = tc.load([store, tc.From(tmp_path / "none", optional=True)], {"a": full(0)})
    assert found["a"].tolist() == [1, 1]
    with pytest.raises(tc.TreeckptError, match="one checkpoint at least"):
        tc.load([])
    with pytest.raises(tc.TreeckptError, match="rules on each checkpoint"):
        tc.load([store], transforms=R.Drop("a"))


def test_values_and_fills_come_from_the_checkpoint_that_gives_them() -> None:
    bank = tc.Bank([store_of({"n": 1, "w": full(1)}), tc.From(store_of({"n": 2}), transforms=R.Fill("bias", 9))])
    mine: dict[str, Any] = {"n": 0, "w": full(0), "bias": full(0, 3)}
    tc.load_into(bank, mine)
    assert mine["n"] == 2 and mine["bias"].tolist() == [9, 9, 9] and mine["w"].tolist() == [1, 1]


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("text", [False, True], ids=["arrays", "values in shards"])
@pytest.mark.parametrize("method", ["load", "load like", "load_into"])
def test_a_source_that_cannot_be_read_is_named_and_no_other(method: str, text: bool, broken: int) -> None:
    class Failing(tc.MemoryStore):
        def fail(self, *_: Any, **__: Any) -> Any:
            raise OSError(errno.EIO, "injected")

    value: Any = "text" * (1 << 20) if text else full(1, 1 << 16)
    stores = [Failing(f"source{number}") for number in range(2)]
    for number, store in enumerate(stores):
        tc.save(store, {f"w{number}": value, "list": []})
    failing: Any = stores[broken]
    failing.read_into = failing.read_parts = failing.mapped = failing.fail
    like: dict[str, Any] = {f"w{number}": "" if text else full(0, 1 << 16) for number in range(2)} | {"list": []}
    with pytest.raises(tc.StoreError, match="injected") as caught:
        if method == "load_into":
            tc.load_into(tc.Bank(stores), like)
        else:
            tc.load(tc.Bank(stores), like=like if "like" in method else None)
    assert str(caught.value).startswith(f"memory://source{broken}"), str(caught.value)


def test_each_source_is_read_with_the_memory_of_its_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    class Far(tc.MemoryStore):
        @property
        def traits(self) -> StoreTraits:
            return StoreTraits(far=True)

    memory: dict[str, list[int]] = {}

    def note(batch: ReadBatch, options: BatchOptions) -> None:
        memory.setdefault(batch.checkpoint.url, []).append(options.memory)

    monkeypatch.setattr(ReadBatch, "prepare", note)
    monkeypatch.setattr(ReadBatch, "put", note)
    stores = [tc.MemoryStore("near"), Far("far"), tc.MemoryStore("last")]
    for number, store in enumerate(stores):
        tc.save(store, {f"w{number}": full(number)})
    usual = dict(zip(("memory://near", "memory://far", "memory://last"), (MEMORY, FETCH_MEMORY, MEMORY), strict=True))
    for nbytes_given, expected in ((None, usual), (1 << 20, dict.fromkeys(usual, 1 << 20))):
        tree = {f"w{number}": full(-1) for number in range(3)}
        tc.load_into(tc.Bank(stores), tree, read=tc.ReadOptions(memory=nbytes_given))
        assert memory == {url: [nbytes, nbytes] for url, nbytes in expected.items()}
        memory.clear()
