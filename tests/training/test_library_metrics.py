"""Metrics of torchmetrics and observers of quantization inside modules come back as torch.save gives them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import treeckpt as tc
from treeckpt import training

from .jobs import same_tensors

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def _metrics() -> dict[str, Any]:
    m = pytest.importorskip("torchmetrics")
    return {
        "CatMetric": m.CatMetric,
        "MeanMetric": m.MeanMetric,
        "MaxMetric": m.MaxMetric,
        "SumMetric": m.SumMetric,
        "RunningMean": lambda: m.RunningMean(window=3),
        "MeanSquaredError": m.MeanSquaredError,
        "Pearson": m.PearsonCorrCoef,
        "Spearman": m.SpearmanCorrCoef,
        "PR curve": lambda: m.PrecisionRecallCurve(task="binary"),
        "PR curve, binned": lambda: m.PrecisionRecallCurve(task="binary", thresholds=5),
        "AUROC": lambda: m.AUROC(task="binary"),
        "Accuracy": lambda: m.Accuracy(task="binary"),
        "ConfusionMatrix": lambda: m.ConfusionMatrix(task="binary"),
        "collection": lambda: m.MetricCollection(
            {"auroc": m.AUROC(task="binary"), "curve": m.PrecisionRecallCurve(task="binary"), "mean": m.MeanMetric()}
        ),
        "groups": lambda: m.MetricCollection([m.Accuracy(task="binary"), m.Precision(task="binary")], prefix="val/"),
        "MinMax": lambda: m.MinMaxMetric(m.Accuracy(task="binary")),
        "Bootstrapper": lambda: m.BootStrapper(m.MeanMetric(), num_bootstraps=3),
        "Tracker": lambda: m.MetricTracker(m.MeanMetric(), maximize=True),
        "Classwise": lambda: m.ClasswiseWrapper(m.Accuracy(task="multiclass", num_classes=2, average=None)),
        "Multioutput": lambda: m.MultioutputWrapper(m.MeanSquaredError(), 1),
        "composition": lambda: m.MeanMetric() + m.SumMetric(),
    }


NAMES = [
    "CatMetric", "MeanMetric", "MaxMetric", "SumMetric", "RunningMean", "MeanSquaredError", "Pearson", "Spearman",
    "PR curve", "PR curve, binned", "AUROC", "Accuracy", "ConfusionMatrix", "collection", "groups", "MinMax",
    "Bootstrapper", "Tracker", "Classwise", "Multioutput", "composition",
]  # fmt: skip


def _fed(name: str, *, steps: int, persistent: bool) -> nn.Module:
    torch.manual_seed(steps)
    metric = _metrics()[name]()
    model = nn.ModuleDict({"layer": nn.Linear(2, 2), "metric": metric})
    if persistent:
        for one in metric.modules():
            if hasattr(one, "persistent"):
                one.persistent(True)
    if name == "Tracker":
        metric.increment()
    for step in range(steps):
        scores, labels = torch.rand(6, generator=torch.Generator().manual_seed(step)), torch.tensor([0, 1, 0, 1, 1, 0])
        if name in ("Pearson", "Spearman"):
            metric.update(scores, scores.square() + labels)
        elif name == "Multioutput":
            metric.update(scores[:, None], labels[:, None].float())
        elif name == "Classwise":
            metric.update(torch.stack([1 - scores, scores], 1), labels)
        elif name == "collection":
            for key in ("auroc", "curve"):
                metric[key].update(scores, labels)
            metric["mean"].update(scores)
        else:
            try:
                metric.update(scores, labels)
            except (TypeError, ValueError, RuntimeError):
                metric.update(scores)
    return model


@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "as it is"])
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_metric_goes_on_as_with_torch(tmp_path: Path, name: str, steps: int, persistent: bool) -> None:
    model = _fed(name, steps=3, persistent=persistent)
    torch.save(model.state_dict(), tmp_path / "torch.pt")
    tc.save(tmp_path / "c", training.state(model, rng=False))
    for source in (tmp_path / "c", training.state(model, rng=False)):
        expected, fresh = (_fed(name, steps=steps, persistent=persistent) for _ in range(2))
        expected.load_state_dict(torch.load(tmp_path / "torch.pt"))
        training.restore(source, fresh, rng=False)
        assert same_tensors(dict(fresh.state_dict()), dict(expected.state_dict()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert _result(fresh["metric"]) == _result(expected["metric"])


def _result(metric: Any) -> str:
    try:
        return repr(metric.compute())
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize(
    "kind", ["PerChannelMinMax", "MovingAveragePerChannelMinMax", "Histogram", "FakeQuantize", "qat", "quantized"]
)
def test_observers_and_quantized_layers_come_back(tmp_path: Path, kind: str) -> None:
    from torch.ao import quantization as q
    from torch.ao.quantization import observer

    def make(*, used: bool) -> nn.Module:
        torch.manual_seed(used)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        if kind in ("qat", "quantized"):
            model.train(kind == "qat")
            model.qconfig = q.get_default_qat_qconfig("x86") if kind == "qat" else q.get_default_qconfig("x86")
            model = q.prepare_qat(model) if kind == "qat" else q.prepare(model)
        elif kind == "FakeQuantize":
            model.append(
                q.FakeQuantize(
                    observer.MovingAveragePerChannelMinMaxObserver,
                    ch_axis=0,
                    dtype=torch.qint8,
                    quant_min=-128,
                    quant_max=127,
                    qscheme=torch.per_channel_symmetric,
                )
            )
        else:
            model.append(getattr(observer, f"{kind}Observer")())
        if used:
            model(torch.randn(3, 4))
        return q.convert(model) if kind == "quantized" else model

    model = make(used=True)
    try:
        tc.save(tmp_path / "c", training.state(model, rng=False))
    except tc.TreeError:
        assert kind == "quantized", "quantised tensors cannot be stored"
        return
    for source in (tmp_path / "c", training.state(model, rng=False)):
        fresh = make(used=False)
        training.restore(source, fresh, rng=False)
        assert same_tensors(dict(fresh.state_dict()), dict(model.state_dict()))
