"""Optimizers of torch and of other libraries, restored: as `torch.save` and `load_state_dict` give them, to the bit.

Each is trained, saved, restored and trained on, beside a copy that torch restores. What cannot be saved is refused by
name. Restored are a fresh optimizer, one that was trained otherwise, and one that goes back to before its first step.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import treeckpt as tc
from treeckpt import training

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*create_graph=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
]

Make = Callable[[nn.Module], Any]


class Net(nn.Module):
    """Layers of several shapes, one of which no batch uses."""

    def __init__(self, *, flat: bool = False, unused: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7, bias=not flat), nn.Linear(7, 3, bias=not flat)
        self.norm, self.conv = (None, None) if flat else (nn.LayerNorm(7), nn.Conv1d(1, 2, 3))
        self.unused = nn.Linear(2, 2) if unused and not flat else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.norm is None or self.conv is None:
            return self.last(hidden.relu()).square().mean()
        return self.last(self.norm(hidden).relu()).square().mean() + self.conv(x[:, None]).square().mean() / 9


class Kind(NamedTuple):
    """An optimizer, and how it is trained."""

    make: Make
    create_graph: bool = False
    closure: bool = False
    """Whether its step is given a closure that computes the gradients anew."""
    loss_closure: bool = False
    """Whether its step is given a closure that returns the loss alone."""
    net: Callable[[], nn.Module] = Net


def _seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def _model(kind: Kind, seed: int) -> nn.Module:
    _seed(seed)
    return kind.net()


def _train(kind: Kind, model: nn.Module, optimizer: Any, steps: range) -> None:
    """Trains on batches that depend on the numbers of the steps alone; ends in the mode in which to save."""
    if not steps:
        return
    getattr(optimizer, "train", lambda: None)()
    dtype = next(model.parameters()).dtype
    for step in steps:
        _seed(100 + step)
        x = torch.randn(6, 5).to(dtype)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x)
            loss.backward(create_graph=kind.create_graph)
            return loss

        if hasattr(optimizer, "fused_backward"):
            optimizer.fused_backward(model(x), 0.01)
        elif hasattr(optimizer, "clip_main_grads"):
            optimizer.zero_grad()
            optimizer.backward(model(x), update_main_grads=True)
            optimizer.step()
        else:
            loss = closure()
            given: Any = closure if kind.closure else (lambda loss=loss: loss.detach()) if kind.loss_closure else None
            optimizer.step(given) if given else optimizer.step()
    getattr(optimizer, "eval", lambda: None)()


def _difference(a: Any, b: Any, path: str = "") -> str:
    """Returns where two trees differ, "" where nowhere; an empty state of a parameter is as none."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if hasattr(a, "__tensor_flatten__") and hasattr(b, "__tensor_flatten__"):
            parts, others = a.__tensor_flatten__()[0], b.__tensor_flatten__()[0]
            return _difference([getattr(a, p) for p in parts], [getattr(b, p) for p in others], path)
        if (a.dtype, a.shape) != (b.dtype, b.shape) or (a.numel() > 1 and a.stride() != b.stride()):
            return f"{path}: {a.dtype} {a.shape} {a.stride()}, {b.dtype} {b.shape} {b.stride()}"
        return "" if torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b))) else path
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = ({k: v for k, v in one.items() if v != {} or type(k) is not int} for one in (a, b))
        if a.keys() != b.keys():
            return f"{path}: {list(a)}, {list(b)}"
        return next((found for key in a if (found := _difference(a[key], b[key], f"{path}/{key}"))), "")
    if isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        return next(
            (found for i, pair in enumerate(zip(a, b, strict=True)) if (found := _difference(*pair, f"{path}/{i}"))), ""
        )
    if type(a) is type(b) and type(a).__module__.startswith("pytorch_optimizer."):
        return _difference(vars(a), vars(b), path)
    return "" if type(a) is type(b) and (a is b or a == b or a != a) else f"{path}: {a!r:.40}, {b!r:.40}"


def _states(model: nn.Module, optimizer: Any) -> Any:
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


def _restored_otherwise(kind: Kind, path: Path, saved_at: int, trained: int | None) -> str:
    """Returns how a restored training differs from the one that torch restores.

    Args:
        saved_at: steps before the save.
        trained: steps of another training before the restore; None for the same objects, which go back.
    """
    model = _model(kind, 0)
    optimizer = kind.make(model)
    _train(kind, model, optimizer, range(saved_at))
    torch.save(_states(model, optimizer), path / "c.pt")
    try:
        tc.save(path / "c", training.state(model, optimizer, rng=False), overwrite=True)
    except tc.TreeError as error:
        return f"refused: {error.path}"
    on = range(saved_at, saved_at + 3)

    def again(seed: int) -> tuple[nn.Module, Any]:
        other = _model(kind, 0 if trained is None else seed)
        one = kind.make(other)
        _train(kind, other, one, on if trained is None else range(trained))
        return other, one

    by_torch, by_us = again(1), again(2)
    saved = torch.load(path / "c.pt", weights_only=False)
    by_torch[0].load_state_dict(saved["model"])
    by_torch[1].load_state_dict(saved["optimizer"])
    torch.save(_states(*by_us), path / "before.pt")  # some tensors cannot be copied
    before = torch.load(path / "before.pt", weights_only=False)
    try:
        report = training.restore(path / "c", *by_us, rng=False)
    except tc.MismatchError as error:
        changed = _difference(before, _states(*by_us))
        return f"changed by a failed restore: {changed}" if changed else f"refused: {error}"
    if report.missing or report.unexpected or report.ignored:
        return f"report: {report}"
    if difference := _difference(_states(*by_torch), _states(*by_us)):
        return f"restored: {difference}"
    for pair in (by_torch, by_us):
        _train(kind, *pair, on)
    return _difference(_states(*by_torch), _states(*by_us))


MODES = {"fresh": (3, 0), "trained": (3, 2), "before the first step": (0, None)}


def _all_as_torch(kinds: dict[str, Kind], path: Path, mode: str, refused: frozenset[str]) -> None:
    found: dict[str, str] = {}
    for name, kind in kinds.items():
        try:
            result = _restored_otherwise(kind, path, *MODES[mode])
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        if result and not (
            name in refused and result.startswith(("refused: optimizer/", "refused: param_groups/values/"))
        ):
            found[name] = result
    assert not found, "\n".join(f"{name}: {what}" for name, what in found.items())


def _groups(model: nn.Module, matrices: dict[str, Any], others: dict[str, Any]) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim == 2], **matrices},
        {"params": [p for p in parameters if p.ndim != 2], **others},
    ]


def _kinds_of_pytorch_optimizer() -> Iterator[tuple[str, Kind]]:
    library = pytest.importorskip("pytorch_optimizer")
    projected = {"rank": 2, "update_proj_gap": 2, "scale": 1.0, "projection_type": "std"}
    for name in library.get_supported_optimizers():
        cls = library.load_optimizer(name)
        arguments = inspect.signature(cls).parameters
        options = {key: value for key, value in (("num_data", 6), ("num_iterations", 20)) if key in arguments}

        def make(model: nn.Module, name: str = name, cls: Any = cls, options: Any = options) -> Any:
            if name == "magma":
                return cls(torch.optim.AdamW(model.parameters(), lr=0.01))
            if name in ("muon", "adamuon", "adago", "normuon", "muonclip"):
                return cls(_groups(model, {"use_muon": True}, {"use_muon": False}))
            if name in ("galore", "apollo", "fira", "conda", "alice"):
                return cls(_groups(model, projected, {}))
            first = next(iter(inspect.signature(cls).parameters))
            return cls(model if first == "model" else model.parameters(), **options)

        yield (
            name,
            Kind(
                make,
                create_graph=name in ("adahessian", "sophiah"),
                closure=name in ("lbfgs", "bsam"),
                loss_closure=name in ("alig",),
                # some take matrices alone, one averages all parameters
                net=partial(Net, flat=name in ("spectralsphere", "adalomo"), unused=name != "splus"),
            ),
        )


NEED_MORE = frozenset(("demo", "distributedmuon"))
"""Need another library, or a process group."""
FAIL_THEMSELVES = frozenset(("adashift",))
"""Fail in their first steps."""
OBJECTS = frozenset(("apollo", "conda", "fira", "galore", "scalableshampoo"))
"""Have objects in their state that no file without pickles holds."""


ADD_TO_GROUPS = frozenset(("asgd", "rose", "scionlight", "sgdw"))
"""Their steps add entries to groups and leave no state of parameters by which a first step is known."""
HAVE_STATE_BEFORE = frozenset(("adammini", "sara", "spam"))
"""Have a part of the state of parameters before the first step."""


@pytest.mark.parametrize("mode", MODES)
def test_those_of_pytorch_optimizer(tmp_path: Path, mode: str) -> None:
    kinds = {name: kind for name, kind in _kinds_of_pytorch_optimizer() if name not in NEED_MORE | FAIL_THEMSELVES}
    assert len(kinds) > 120
    back = ADD_TO_GROUPS | HAVE_STATE_BEFORE if MODES[mode][1] is None else frozenset[str]()
    _all_as_torch(kinds, tmp_path, mode, OBJECTS | back)


@pytest.mark.parametrize("mode", MODES)
def test_wrappers_of_pytorch_optimizer(tmp_path: Path, mode: str) -> None:
    library = pytest.importorskip("pytorch_optimizer")

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    kinds = {
        "lookahead": Kind(lambda m: library.Lookahead(adam(m), k=2, pullback_momentum="pullback")),
        "orthograd": Kind(lambda m: library.OrthoGrad(adam(m))),
        "trac": Kind(lambda m: library.TRAC(adam(m))),
        "schedule-free": Kind(lambda m: library.ScheduleFreeWrapper(adam(m))),
        "sam": Kind(lambda m: library.SAM(m.parameters(), torch.optim.AdamW), closure=True),
        "wsam": Kind(lambda m: library.WSAM(m, m.parameters(), torch.optim.AdamW), closure=True),
        "looksam": Kind(lambda m: library.LookSAM(m.parameters(), torch.optim.AdamW), closure=True),
        "friendly sam": Kind(lambda m: library.FriendlySAM(m.parameters(), torch.optim.AdamW), closure=True),
        "lookahead of lion": Kind(lambda m: library.Lookahead(library.Lion(m.parameters()), k=2)),
        "masters": Kind(lambda m: library.SafeFP16Optimizer(adam(m)), net=lambda: Net().bfloat16()),
    }
    _all_as_torch(kinds, tmp_path, mode, frozenset())


def _kinds_of_torch() -> dict[str, Kind]:
    optim = torch.optim
    found: dict[str, Kind] = {}
    for cls in (one for one in vars(optim).values() if isinstance(one, type) and issubclass(one, optim.Optimizer)):
        if cls in (optim.Optimizer, optim.SparseAdam):
            continue
        name, arguments = cls.__name__, inspect.signature(cls).parameters
        flat = cls is optim.Muon
        variants: dict[str, dict[str, Any]] = {"": {}}
        variants |= {
            way: {way: True} for way in ("foreach", "fused", "maximize", "amsgrad", "centered") if way in arguments
        }
        if "capturable" in arguments:
            variants["for loop"] = {"foreach": False}
        if "momentum" in arguments:
            variants["momentum"] = {"momentum": 0.9}
        if cls in (optim.Adam, optim.AdamW, optim.SGD):
            variants["tensor rate"] = {"lr": torch.tensor(0.01), "foreach": False}
        for way, options in variants.items():
            if way == "fused" and "fused" not in str(inspect.getsource(cls)):
                continue

            def make(model: nn.Module, cls: Any = cls, options: Any = options) -> Any:
                return cls(model.parameters(), **copy.deepcopy(options))

            def grouped(model: nn.Module, cls: Any = cls, options: Any = options) -> Any:
                options = copy.deepcopy(options)
                return cls(_groups(model, {"name": "all"}, {"name": "all", "lr": 0.003}), **options)

            net = partial(Net, flat=flat)
            closure = cls is optim.LBFGS
            found[f"{name} {way}"] = Kind(make, closure=closure, net=net)
            if not closure and not flat:
                found[f"{name} {way} in groups"] = Kind(grouped, net=net)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_those_of_torch(tmp_path: Path, mode: str) -> None:
    kinds = _kinds_of_torch()
    assert len(kinds) > 60
    _all_as_torch(kinds, tmp_path, mode, frozenset())


class Wide(nn.Module):
    """Layers that are large enough for moments of few bits, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 128), nn.Linear(128, 128), nn.Linear(128, 64)
        self.unused = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)).relu()).square().mean()


@pytest.mark.parametrize("mode", MODES)
def test_those_of_bitsandbytes(tmp_path: Path, mode: str) -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    with_momentum = ("SGD", "SGD8bit", "LARS", "LARS8bit")
    names = [
        name + bits
        for name in ("Adam", "AdamW", "Lion", "SGD", "AdEMAMix", "Adagrad", "LAMB", "LARS", "RMSprop", "PagedAdamW")
        for bits in ("", "8bit")
    ]

    def make(model: nn.Module, name: str) -> Any:
        options = {"momentum": 0.9} if name in with_momentum else {}
        return getattr(optim, name)(model.parameters(), lr=0.01, **options)

    _all_as_torch({name: Kind(partial(make, name=name), net=Wide) for name in names}, tmp_path, mode, frozenset())


@pytest.mark.parametrize("mode", MODES)
def test_those_of_torchao(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optim = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # of their steps takes a minute
    names = ["Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8", "_AdamW"]

    def make(model: nn.Module, name: str) -> Any:
        return getattr(optim, name)(model.parameters(), lr=0.01)

    kinds = {name: Kind(partial(make, name=name), net=Wide) for name in names}
    _all_as_torch(kinds, tmp_path, mode, frozenset())
