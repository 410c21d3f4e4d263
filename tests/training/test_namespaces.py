"""A container that is registered in a namespace of optree is saved, and restored in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import treeckpt as tc

SPACE = "treeckpt-test-namespaces"


@optree.register_pytree_node_class(namespace=SPACE)
class Ema:
    """A container with an array, a value and an object with a state."""

    def __init__(self, shadow: torch.Tensor, decay: float, inner: Any) -> None:
        self.shadow, self.decay, self.inner = shadow, decay, inner

    def tree_flatten(self) -> tuple[tuple[Any, ...], None, tuple[str, ...]]:
        return (self.shadow, self.decay, self.inner), None, ("shadow", "decay", "inner")

    @classmethod
    def tree_unflatten(cls, _: None, children: Iterator[Any]) -> Ema:
        return cls(*children)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Ema) and torch.equal(self.shadow, other.shadow)
        return same and (self.decay, self.inner) == (other.decay, other.inner)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and self.count == other.count

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Reader:
    """A loader whose state is such a container."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> Any:
        return {"at": Ema(torch.full((2,), float(self.position)), 0.0, self.position)}

    def load_state_dict(self, state: Any) -> None:
        assert isinstance(state["at"], Ema) and state["at"].shadow[0] == state["at"].inner
        self.position = state["at"].inner


class Job:
    def __init__(self, run: Path, number: int, **options: Any) -> None:
        torch.manual_seed(number)
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.extra: dict[str, Any] = {
            "ema": Ema(torch.full((3,), float(number)), number / 2, Counter(number)),
            "more": [Ema(torch.zeros(1) + number, 1.0 * number, {"a": number})],
        }
        self.held = {"ema": Ema(torch.ones(2) * number, 0.5 * number, number)}
        self.reader, self.own = Reader(number), Reader(number)
        self.second = {"ema": Ema(torch.ones(2), 0.0, torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))}
        if number:
            self.model(torch.ones(1, 2)).sum().backward()
            self.second["ema"].inner.step()
            self.optimizer.step()
        self.manager = tc.Manager(run, background=False, **options)
        self.manager.register("held", self.held)
        self.manager.register("second", self.second)
        self.manager.register_io_state("own", self.own)

    def state(self) -> Any:
        return tc.training.state(self.model, self.optimizer, loader=self.reader, extra=self.extra)

    def same(self, other: Job) -> bool:
        moments = [one.second["ema"].inner.state_dict()["state"] for one in (self, other)]
        return (
            self.extra == other.extra
            and self.held == other.held
            and (self.reader.position, self.own.position) == (other.reader.position, other.own.position)
            and torch.equal(self.model.weight, other.model.weight)
            and all(torch.equal(moments[0][n]["momentum_buffer"], moments[1][n]["momentum_buffer"]) for n in (0, 1))
        )


def test_a_manager_resumes_what_it_saved_in_its_namespace(tmp_path: Path) -> None:
    saved, new = Job(tmp_path, 3, namespace=SPACE), Job(tmp_path, 0, namespace=SPACE)
    assert new.manager.resume(new.model, new.optimizer, loader=new.reader, extra=new.extra) is None
    saved.manager.save(1, saved.state())
    ema, shadow = new.extra["ema"], new.extra["ema"].shadow
    report = new.manager.resume(new.model, new.optimizer, loader=new.reader, extra=new.extra)
    assert report is not None and new.same(saved)
    assert new.extra["ema"] is not ema or new.extra["ema"].shadow is shadow
    other = Job(tmp_path, 0)  # of a manager without one
    other.manager.resume(other.model, other.optimizer, loader=other.reader, extra=other.extra, namespace=SPACE)
    assert other.same(saved)


def test_a_manager_restores_trees_of_its_namespace(tmp_path: Path) -> None:
    saved, new = Job(tmp_path, 3, namespace=SPACE), Job(tmp_path, 0, namespace=SPACE)
    saved.manager.save(1, {"extra": saved.extra})
    found = new.manager.restore({"extra": new.extra})
    assert found["extra"]["ema"].shadow.tolist() == [3.0] * 3 and new.held == saved.held
    into = Job(tmp_path, 0, namespace=SPACE)
    into.manager.restore(into={"extra": into.extra})
    assert into.extra == saved.extra


@pytest.mark.parametrize("form", ["path", "bank", "tree", "in the report"])
def test_a_training_state_is_restored_with_a_namespace(tmp_path: Path, form: str) -> None:
    saved, new = Job(tmp_path / "a", 3), Job(tmp_path / "b", 0)
    tc.save(tmp_path / "c", saved.state(), namespace=SPACE)
    source: Any = {"bank": [tmp_path / "c"], "tree": saved.state()}.get(form, tmp_path / "c")
    extra = None if form == "in the report" else new.extra
    report = tc.training.restore(source, new.model, new.optimizer, loader=new.reader, extra=extra, namespace=SPACE)
    found = report.extra if form == "in the report" else new.extra
    if form == "in the report":
        assert found["ema"].inner == {"count": 3}
        found["ema"].inner = Counter(3)
    assert found == saved.extra and new.reader.position == 3


def test_a_history_of_containers_that_grew_is_restored(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    history = [Ema(torch.ones(1) * n, 0.1 * n, n) for n in range(3)]
    tc.save(tmp_path / "c", tc.training.state(model, extra={"history": history}), namespace=SPACE)
    extra: Any = {"history": [Ema(torch.zeros(1), 0.0, 0)]}
    tc.training.restore(tmp_path / "c", model, extra=extra, namespace=SPACE)
    assert extra == {"history": history}


def test_without_the_namespace_nothing_changes(tmp_path: Path) -> None:
    saved, new = Job(tmp_path / "a", 3), Job(tmp_path / "b", 0)
    tc.save(tmp_path / "c", saved.state(), namespace=SPACE)
    before = new.model.weight.clone()
    with pytest.raises(tc.TreeckptError):
        tc.training.restore(tmp_path / "c", new.model, new.optimizer, loader=new.reader, extra=new.extra)
    assert torch.equal(new.model.weight, before) and new.extra["ema"].decay == 0
