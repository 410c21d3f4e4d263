"""The interface of hfai.checkpoint, without its faults."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from tests.helpers.hfai_parts import write_parts
from tests.helpers.world import errors_of, on_ranks
from treeckpt import training
from treeckpt._io.comm.comm import thread_comms
from treeckpt.training import load, save

from .jobs import net, run, same_tensors, stepped


def _job(seed: int, **order: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(seed, **order)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def test_a_model_an_optimizer_and_others(tmp_path: Path) -> None:
    model, optimizer = _job(0)
    stepped(model, optimizer)
    save(tmp_path / "c", model, optimizer, {"epoch": 3, "acc": torch.tensor([0.5]), "__version__": "mine"})
    state = load(tmp_path / "c")
    assert (state["epoch"], state["__version__"], state["acc"].tolist()) == (3, "mine", [0.5])
    fresh, again = _job(1)
    fresh.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    torch.manual_seed(3)
    expected = run(model, optimizer, 2)
    torch.manual_seed(3)
    assert run(fresh, again, 2) == expected


def test_in_place_the_order_of_parameters_does_not_matter(tmp_path: Path) -> None:
    model, optimizer = _job(0)
    stepped(model, optimizer)
    save(tmp_path / "c", model, optimizer)
    fresh, again = _job(1, order=("last", "norm", "first"))
    state = load(tmp_path / "c", fresh, again)
    assert set(state) == {"model", "optimizer"} and same_tensors(dict(state["model"]), dict(model.state_dict()))
    torch.manual_seed(3)
    expected = run(model, optimizer, 2)
    torch.manual_seed(3)
    assert run(fresh, again, 2) == expected


def test_lists_of_models_and_optimizers(tmp_path: Path) -> None:
    jobs = [_job(0), _job(1)]
    for job in jobs:
        stepped(*job)
    models, optimizers = [list(each) for each in zip(*jobs, strict=True)]
    save(tmp_path / "c", models, optimizers)
    state = load(tmp_path / "c", nthreads=0)
    for i, (model, optimizer) in enumerate(jobs):
        assert same_tensors(state["model"][i], dict(model.state_dict()))
        _fresh, again = _job(7)
        again.load_state_dict(state["optimizer"][i])
        assert same_tensors(again.state_dict(), optimizer.state_dict())
    save(tmp_path / "c", models[:1], None)
    assert "optimizer" not in load(tmp_path / "c") and isinstance(load(tmp_path / "c")["model"], dict)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([("a", 1)], "others: expected a dict or None, found list"),
        ({"model": 1}, "model: "),
        ({"optimizer": 1}, "optimizer: "),
    ],
)
def test_others_are_a_dict_without_the_names_that_are_taken(tmp_path: Path, others: Any, words: str) -> None:
    with pytest.raises(tc.TreeError, match=words):
        save(tmp_path / "c", net(), None, others)
    assert not (tmp_path / "c").exists()


def test_buffers_are_kept_non_persistent_ones_are_not_and_views_cost_what_they_show(tmp_path: Path) -> None:
    model = net()
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    model.register_buffer("window", torch.zeros(1 << 20)[:10])
    model.register_parameter("turned", nn.Parameter(torch.arange(6.0).view(2, 3).t()))
    report = save(tmp_path / "c", model)
    assert report.nbytes < 2000
    state = load(tmp_path / "c")["model"]
    assert "cache" not in state and state["turned"].tolist() == model.turned.tolist()
    assert int(state["norm.num_batches_tracked"]) == 0


def _with_empty_groups(seed: int, lr: float, names: tuple[str, ...] = ("first", "last")) -> Any:
    model = net(seed)
    optimizer = torch.optim.AdamW([{"params": []}, *({"params": getattr(model, name).parameters()} for name in names)])
    optimizer.add_param_group({"params": [], "name": "later", "lr": lr / 2})
    optimizer.param_groups[0].update(lr=lr, betas=(0.5, lr))
    return model, optimizer


def test_groups_without_parameters_keep_their_hyper_parameters(tmp_path: Path) -> None:
    model, optimizer = _with_empty_groups(0, 0.25)
    stepped(model, optimizer)
    save(tmp_path / "c", model, optimizer)
    assert same_tensors(load(tmp_path / "c")["optimizer"], optimizer.state_dict())
    fresh, again = _with_empty_groups(1, 0.5)
    again.load_state_dict(load(tmp_path / "c")["optimizer"])
    again.step()
    fresh, again = _with_empty_groups(1, 0.5, ("last", "first"))
    load(tmp_path / "c", fresh, again)
    assert [again.param_groups[i]["lr"] for i in (0, 3)] == [0.25, 0.125]
    assert again.param_groups[0]["betas"] == (0.5, 0.25)


def test_a_schedule_goes_on_for_groups_without_parameters(tmp_path: Path) -> None:
    jobs = [_with_empty_groups(0, 0.25), _with_empty_groups(1, 0.5, ("last", "first"))]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in jobs]
    tc.save(tmp_path / "c", tc.training.state(*jobs[0], scheduler=schedules[0]))
    tc.training.restore(tmp_path / "c", *jobs[1], scheduler=schedules[1])
    assert schedules[1].base_lrs == [0.25, 0.001, 0.001, 0.125]


@pytest.mark.parametrize("place", [0, 1, 2, None])
def test_a_group_without_parameters_goes_on_wherever_it_stands(tmp_path: Path, place: int | None) -> None:
    def job(seed: int, lr: float, place: int | None) -> Any:
        model = net(seed)
        groups: list[Any] = [{"params": getattr(model, name).parameters()} for name in ("first", "last")]
        if place is not None:
            groups.insert(place, {"params": [], "lr": lr})
        optimizer = torch.optim.AdamW(groups)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    *saved, schedule = job(0, 0.25, 1)
    tc.save(tmp_path / "c", tc.training.state(*saved, scheduler=schedule))
    model, optimizer, again = job(1, 0.5, place)
    report = tc.training.restore(tmp_path / "c", model, optimizer, scheduler=again)
    if place is None:
        assert report.ignored == ("param_groups/values/empty 1",)
    else:
        assert report.ignored == () and optimizer.param_groups[place]["lr"] == again.base_lrs[place] == 0.25


def test_ties_are_written_once_and_kept_as_state_dicts_keep_them(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.ModuleDict({"embedding": nn.Embedding(50, 8), "head": nn.Linear(8, 50, bias=False)})
        model["head"].weight = model["embedding"].weight
        return model

    model, fresh = make(), make()
    assert save(tmp_path / "c", model).nbytes == 50 * 8 * 4
    state = load(tmp_path / "c")["model"]
    assert list(state) == list(model.state_dict()) and state["head.weight"] is state["embedding.weight"]
    load(tmp_path / "c", fresh)
    assert fresh["head"].weight is fresh["embedding"].weight and torch.equal(fresh["head"].weight, model["head"].weight)


def test_state_of_an_optimizer_may_be_nested(tmp_path: Path) -> None:
    model, optimizer = _job(0)
    nested = {"deep": {"er": [torch.arange(3), {"n": 1}]}, "step": 2}
    optimizer.state = dict.fromkeys(model.parameters(), nested)  # pyright: ignore[reportAttributeAccessIssue]
    save(tmp_path / "c", model, optimizer)
    state = load(tmp_path / "c")["optimizer"]["state"]
    assert set(state) == set(range(6)) and all(same_tensors(state[n], nested) for n in state)


def test_ranks_share_large_tensors_by_bytes_and_buffers_are_written_once(tmp_path: Path) -> None:
    model = net()
    model.register_parameter("large", nn.Parameter(torch.arange(1.0, 1 + (1 << 20))))

    def act(comm: Any) -> Any:
        return save(tmp_path / "c", model, None, {"own": tc.PerRank(comm.rank), "n": 1}, comm)

    outcomes = on_ranks(2, act)
    assert errors_of(outcomes) == [None, None]
    nbytes = [outcome.value.nbytes for outcome in outcomes]
    assert sum(nbytes) == sum(t.nbytes for t in model.state_dict().values()) and max(nbytes) < 1.1 * min(nbytes)
    for comm, own in zip(thread_comms(3), (0, 1, 0), strict=True):
        state = load(tmp_path / "c", group=comm)
        assert (state["own"], state["n"]) == (own, 1) and same_tensors(state["model"], dict(model.state_dict()))


def test_more_ranks_than_rows_save_and_directories_above_are_made(tmp_path: Path) -> None:
    """hfai-dist_ckpt, lines 64 and 153: a tensor of fewer rows than ranks, and one whose elements are not in a row."""
    model = nn.Module()
    model.register_parameter("rows", nn.Parameter(torch.arange(35.0).view(5, 7)))
    model.register_parameter("turned", nn.Parameter(torch.arange(35.0).view(5, 7).t()))
    path = tmp_path / "new" / "deep" / "latest.pt"
    outcomes = on_ranks(8, lambda comm: save(path, model, None, None, comm))
    assert errors_of(outcomes) == [None] * 8
    assert same_tensors(dict(load(path)["model"]), dict(model.state_dict()))


def test_files_of_two_saves_do_not_mix(tmp_path: Path) -> None:
    """hfai-dist_ckpt, lines 102-104 and 117: no part of hfai says of which save it is."""
    shards: list[Path] = []
    for step in range(2):
        save(tmp_path / f"{step}", net(step), None, {"step": step})
        shards += (tmp_path / f"{step}").glob("shard-*")
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(tc.CorruptError, match=r"expected save .*, found save "):
        load(tmp_path / "1")


class Arguments(argparse.Namespace):
    """A class of the program's own, of which only a pickle can be stored."""


def test_what_a_call_of_hfais_may_say_is_understood(tmp_path: Path) -> None:
    model = net()
    save(tmp_path / "c", model, None, {"args": Arguments(lr=0.5)}, allow_pickle=True)
    assert load(tmp_path / "c", 8, map_location="cpu", allow_pickle=True)["args"].lr == 0.5
    larger = nn.ModuleDict({"first": model.first, "norm": model.norm, "last": model.last, "new": nn.Linear(2, 2)})
    state = load(tmp_path / "c", larger, strict=False, allow_pickle=True)
    assert state["args"].lr == 0.5 and "new.weight" in state["model"]
    with pytest.raises(tc.TreeError, match=r"extra/args: .*allow_pickle=True"):
        save(tmp_path / "c", model, None, {"args": Arguments(lr=0.5)})
    save(tmp_path / "c", model, None, {"args": argparse.Namespace(lr=0.5)})
    assert load(tmp_path / "c")["args"] == argparse.Namespace(lr=0.5)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    save(tmp_path / "c", net())
    with pytest.raises(tc.MismatchError, match="nthreads"):
        load(tmp_path / "c", nthreads=-1)
    with pytest.raises(tc.MismatchError, match="model: expected the model, too, found an optimizer"):
        load(tmp_path / "c", None, torch.optim.SGD(net().parameters()))
    with pytest.raises(tc.MismatchError, match=r"model: .*found strict alone"):
        load(tmp_path / "c", strict=False)
    with pytest.raises(tc.MismatchError, match="map_location: expected a device, a dict, a function or None"):
        load(tmp_path / "c", map_location=5)
    with pytest.raises(tc.MismatchError, match=r"map_location: expected a storage or None of it, found 5"):
        load(tmp_path / "c", map_location=lambda storage, where: 5)
    with pytest.raises(tc.MismatchError, match=r"map_location: .* with a model"):
        load(tmp_path / "c", net(), map_location="cuda")
    with pytest.raises(tc.MismatchError, match=r"allow_pickle: expected False, with weights_only=True"):
        load(tmp_path / "c", weights_only=True, allow_pickle=True)
    with pytest.raises(TypeError, match=r"'encoding' is no option of training.load, nor of training.restore"):
        load(tmp_path / "c", encoding="latin1")
    with pytest.raises(tc.MismatchError, match=r"mmap: .*filled in place"):
        load(tmp_path / "c", net(), mmap=True)
    with pytest.raises(tc.MismatchError, match="replicas: expected 'same' or 'rank0'"):
        save(tmp_path / "c", net(), replicas="first")  # pyright: ignore[reportArgumentType]
    with pytest.raises(tc.TreeckptError, match=r"expected a process group of torch.distributed.*found 'world'"):
        save(tmp_path / "c", net(), group="world")
    tc.save(tmp_path / "other", {"a": 1})
    with pytest.raises(tc.MismatchError, match=r"what training.save or hfai wrote"):
        load(tmp_path / "other")


def test_what_a_ported_program_catches_is_raised(tmp_path: Path) -> None:
    """hfai-dist_ckpt, lines 43-47 and 87-88: the classes of Python that hfai raises."""
    model = net()
    save(tmp_path / "c", model)
    for args in ((model, None, [("a", 1)]), ("model", None, {}), (None, None, {}), (model, "optimizer", {})):
        with pytest.raises(TypeError):
            save(tmp_path / "other", *args)
    with pytest.raises(ValueError, match="nthreads"):
        load(tmp_path / "c", nthreads=-1)


# the arguments of torch.load ------------------------------------------------------------------------------------------
def test_map_location_is_that_of_torch_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hfai-dist_ckpt, lines 73 and 96: parts that say another device, as a rank with a GPU writes them."""
    model, optimizer = _job(0)
    stepped(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:9")
        states = {"model": [model.state_dict()], "optimizer": [optimizer.state_dict()]}
        write_parts(tmp_path / "parts", states, {"acc": torch.ones(2)}, 2)
    tc.convert.convert(tmp_path / "parts", tmp_path / "ours")
    seen: list[tuple[str, int]] = []

    def on_host(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        seen.append((location, storage.nbytes()))
        return storage

    device = torch.device("cpu")
    for map_location in ("cpu", device, {"cuda:9": "cpu"}, on_host):
        state = load(tmp_path / "parts", map_location=map_location)
        assert same_tensors(state["model"], dict(model.state_dict())) and state["acc"].device == device
        assert same_tensors(state["optimizer"], optimizer.state_dict())
    assert seen == [("cuda:9", 0)]
    for map_location in (None, {"cuda:0": "cpu"}, lambda storage, location: None, "cuda:9"):
        with pytest.raises(tc.MismatchError, match=r"device of torch that is here.*found 'cuda:9'"):
            load(tmp_path / "parts", map_location=map_location)
    with pytest.raises(tc.MismatchError, match="cuda:9"):
        tc.load(tmp_path / "ours", device="original")
    found = tc.load(tmp_path / "ours", device={"cuda:9": "cpu"}.__getitem__)
    assert same_tensors(dict(found["model"]), dict(model.state_dict()))
    save(tmp_path / "own", model)
    with pytest.raises(tc.MismatchError, match="cuda:3"):
        load(tmp_path / "own", map_location={"cpu": "cuda:3"})


def test_mmap_and_weights_only_are_taken(tmp_path: Path) -> None:
    """hfai-dist_ckpt, lines 73 and 96. A file that is mapped is read when an element is."""
    model = net()
    save(tmp_path / "c", model, None, {"args": Arguments(lr=0.5)}, allow_pickle=True)
    for weights_only in (None, True, False):
        with pytest.raises(tc.MismatchError, match="allow_pickle=True"):
            load(tmp_path / "c", weights_only=weights_only)
    assert load(tmp_path / "c", weights_only=False, allow_pickle=True)["args"].lr == 0.5
    save(tmp_path / "d", model)
    state = load(tmp_path / "d", weights_only=True, mmap=True)
    assert same_tensors(dict(state["model"]), dict(model.state_dict()))
    [shard] = (tmp_path / "d").glob("shard-*")
    with shard.open("r+b") as file:
        file.seek(-4, 2)  # the file changes, and with it what is mapped
        file.write(b"\xff\xff\xff\xff")
    assert not same_tensors(dict(state["model"]), dict(model.state_dict()))


# the program as it is -------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_state_dicts_have_the_names_and_plain_tensors_of_the_program(tmp_path: Path) -> None:
    """hfai-dist_ckpt, lines 34-37 and 139: `module.` and `_orig_mod.` stand where the program has them."""
    wrapped = nn.DataParallel(net())
    wrapped.module.first = torch.compile(wrapped.module.first)  # pyright: ignore[reportAttributeAccessIssue]
    plain = torch.optim.AdamW(net().named_parameters())
    for model in (wrapped, torch.compile(net()), net()):
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
        save(fname=tmp_path / "c", model=model, optimizer=optimizer, others=None, group=None)
        state = load(fname=tmp_path / "c", nthreads=2)
        saved, expected = state["model"], model.state_dict()
        assert list(saved) == list(expected) and same_tensors(dict(saved), dict(expected))
        assert all(type(value) is torch.Tensor and not value.requires_grad for value in saved.values())
        assert saved._metadata.items() <= expected._metadata.items()
        assert same_tensors(state["optimizer"], optimizer.state_dict()), "names of parameters, too"
        model.load_state_dict(saved)
    assert plain.state_dict()["param_groups"][0]["param_names"] == state["optimizer"]["param_groups"][0]["param_names"]


def test_the_first_restart_reads_what_hfai_wrote(tmp_path: Path) -> None:
    """hfai-dist_ckpt, lines 87-133: state dicts, or in place, of one model and of several."""
    jobs = [_job(0), _job(1)]
    for job in jobs:
        stepped(*job)
    models, optimizers = [list(each) for each in zip(*jobs, strict=True)]
    for count in (1, 2):
        path = tmp_path / f"latest{count}.pt"
        states = {
            "model": [{f"module.{name}": value for name, value in model.state_dict().items()} for model in models],
            "optimizer": [optimizer.state_dict() for optimizer in optimizers],
        }
        write_parts(path, {key: each[:count] for key, each in states.items()}, {"epoch": 3, "order": [1]}, 2)
        state = load(path, map_location="cpu")
        assert (state["epoch"], state["order"]) == (3, [1]) and "__version__" not in state
        for found, expected in (("model", states["model"]), ("optimizer", states["optimizer"])):
            several = state[found] if count > 1 else [state[found]]
            assert all(same_tensors(a, b) for a, b in zip(several, expected[:count], strict=True))
        fresh = [_job(7) for _ in range(count)]
        theirs, others = [list(each) for each in zip(*fresh, strict=True)]
        state = load(path, theirs if count > 1 else theirs[0], others if count > 1 else others[0])
        assert state["epoch"] == 3
        for i in range(count):
            torch.manual_seed(3)
            losses = run(*fresh[i], 2)
            again, optimizer = _job(9)
            again.load_state_dict(models[i].state_dict())
            optimizer.load_state_dict(optimizers[i].state_dict())
            torch.manual_seed(3)
            assert run(again, optimizer, 2) == losses


def test_state_dicts_of_any_format_are_those_of_the_program(tmp_path: Path) -> None:
    model, optimizer = _job(0)
    stepped(model, optimizer)
    wrapped = nn.DataParallel(model)
    tree = {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(tree, tmp_path / "file.pt")
    write_parts(tmp_path / "parts", {"model": [tree["model"]], "optimizer": [tree["optimizer"]]}, {"epoch": 3}, 2)
    tc.convert.convert(tmp_path / "parts", tmp_path / "converted")
    tc.save(tmp_path / "tree", tree)
    for name in ("file.pt", "converted", "tree"):
        state = load(tmp_path / name)
        assert same_tensors({**state, "model": dict(state["model"])}, {**tree, "model": dict(tree["model"])})
        fresh, theirs = _job(1)
        assert load(tmp_path / name, fresh, theirs)["epoch"] == 3
        assert same_tensors(dict(fresh.state_dict()), dict(model.state_dict()))
        assert same_tensors(theirs.state_dict(), optimizer.state_dict())
    tc.save(tmp_path / "state", training.state(model, optimizer))
    with pytest.raises(tc.MismatchError, match=r"what training.save or hfai wrote"):
        load(tmp_path / "state")


def test_a_save_beside_the_parts_of_hfai_counts_once_it_is_complete(tmp_path: Path) -> None:
    """hfai-dist_ckpt, lines 62-66: one that was killed leaves files, and the parts are what is loaded."""
    model = net()
    write_parts(tmp_path / "c", {"model": [model.state_dict()], "optimizer": []}, {"epoch": 1}, 2)
    save(tmp_path / "c", model, None, {"epoch": 2})
    assert load(tmp_path / "c")["epoch"] == 2
    (tmp_path / "c" / "index.json").unlink()
    assert load(tmp_path / "c")["epoch"] == tc.load(tmp_path / "c")["epoch"] == 1
    save(tmp_path / "c", model, None, {"epoch": 3})
    assert load(tmp_path / "c")["epoch"] == 3


def test_objects_of_the_program_in_hfais_parts_are_named_and_left_out(tmp_path: Path) -> None:
    """hfai-dist_ckpt, lines 59-61: `others` of hfai may hold anything that pickles."""
    model = net()
    write_parts(tmp_path / "c", {"model": [model.state_dict()], "optimizer": []}, {"run": Arguments(lr=1), "n": 1}, 2)
    with pytest.raises(tc.TreeError, match=r"run: .*Arguments.*exclude='run'"):
        load(tmp_path / "c", weights_only=False)
    state = load(tmp_path / "c", exclude="run")
    assert state["run"] is ... and state["n"] == 1 and same_tensors(state["model"], dict(model.state_dict()))
    assert training.restore(tmp_path / "c", net(7), strict=True).ignored == ("run", "n")


def test_what_is_left_out_is_no_state_dict(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    save(tmp_path / "c", model, optimizer, {"n": 1})
    state = load(tmp_path / "c", exclude="optimizer")
    assert state["optimizer"] is ... and state["n"] == 1 and same_tensors(state["model"], dict(model.state_dict()))
    assert load(tmp_path / "c", exclude="model")["model"] is ...
    with pytest.raises(tc.MismatchError, match="globs that leave state_dicts"):
        load(tmp_path / "c", exclude="*")


def test_optimizers_may_have_parameters_outside_of_the_models(tmp_path: Path) -> None:
    """hfai-dist_ckpt, lines 187-192. hfai loses their values, which are saved beside the models here."""

    def job(seed: int) -> tuple[nn.Module, nn.Module, torch.Tensor, list[torch.optim.Optimizer]]:
        model, head = net(seed), nn.Linear(3, 2)
        alpha = torch.full((1,), float(seed), requires_grad=True)
        groups = [{"params": model.parameters()}, {"params": [*head.parameters(), alpha], "lr": 0.5}]
        return model, head, alpha, [torch.optim.AdamW(groups), torch.optim.SGD([alpha], lr=0.1, momentum=0.9)]

    model, head, alpha, optimizers = job(1)
    for _ in range(2):
        (head(model(torch.randn(6, 5))).sum() * alpha).backward()
        for optimizer in optimizers:
            optimizer.step()
    report = save(tmp_path / "c", model, optimizers)
    moments = [v for o in optimizers for s in o.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    tensors = [*model.state_dict().values(), *head.parameters(), alpha, *moments]
    assert report.nbytes == sum(tensor.nbytes for tensor in tensors), "each once"
    state = load(tmp_path / "c")
    assert list(state["model"]) == list(model.state_dict())
    assert same_tensors(state["optimizer"], [optimizer.state_dict() for optimizer in optimizers])
    fresh, other, beta, theirs = job(2)
    load(tmp_path / "c", fresh, theirs)
    assert torch.equal(beta, alpha) and beta.requires_grad and beta.is_leaf
    assert same_tensors(dict(other.state_dict()), dict(head.state_dict()))
    assert same_tensors([o.state_dict() for o in theirs], [o.state_dict() for o in optimizers])
    _model, _head, _alpha, [adamw, sgd] = job(3)
    adamw.load_state_dict(state["optimizer"][0])
    sgd.load_state_dict(state["optimizer"][1])
    assert same_tensors(sgd.state_dict(), optimizers[1].state_dict())
    with pytest.raises(tc.TreeError, match="parameters of the model that is given"):
        training.state(model, optimizers[0])
    parts = {"model": [model.state_dict()], "optimizer": [optimizer.state_dict() for optimizer in optimizers]}
    write_parts(tmp_path / "parts", parts, {}, 2)
    fresh, other, beta, theirs = job(2)
    with pytest.raises(tc.MismatchError, match=r"own parameters are not in state dicts: strict=False"):
        load(tmp_path / "parts", fresh, theirs)
    load(tmp_path / "parts", fresh, theirs, strict=False)
    assert beta.tolist() == [2.0] and same_tensors(theirs[1].state_dict(), optimizers[1].state_dict())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_buffers_that_are_sparse_are_saved_and_loaded(tmp_path: Path) -> None:
    """hfai-dist_ckpt, lines 142 and 151: they are saved as wholes, in hfai's parts as here."""

    def make(dense: torch.Tensor) -> nn.Module:
        model = net()
        model.register_buffer("coo", dense.to_sparse())
        model.register_buffer("csr", dense.to_sparse_csr())
        model.coarse = nn.Parameter(dense.to_sparse())  # pyright: ignore[reportAttributeAccessIssue]
        return model

    dense = torch.eye(4)
    dense[0, 3] = 2.0
    model = make(dense)
    save(tmp_path / "ours", model)
    write_parts(tmp_path / "parts", {"model": [model.state_dict()], "optimizer": []}, {}, 2)
    for name in ("ours", "parts"):
        fresh = make(dense.t().contiguous())
        fresh.load_state_dict(load(tmp_path / name)["model"])
        filled = make(torch.ones(4, 4))
        load(tmp_path / name, filled)
        for part in ("coo", "csr", "coarse"):
            for each in (fresh, filled):
                found = getattr(each, part)
                assert torch.equal(found.to_dense(), dense) and found.layout is getattr(model, part).layout, part


def test_torch_distributed_is_not_needed(tmp_path: Path) -> None:
    program = (
        "import sys, torch\nfrom treeckpt.training import load, save\n"
        f"save({str(tmp_path / 'c')!r}, torch.nn.Linear(2, 2), None, {{'epoch': 1}})\n"
        f"assert load({str(tmp_path / 'c')!r})['epoch'] == 1\n"
        "assert not torch.distributed.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=300)
