"""Adapters of PEFT that are not active are named where `frozen=False` leaves them out: with PEFT itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from treeckpt import training


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(data))


@pytest.mark.slow
def test_a_second_adapter_is_named_where_it_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["layer"], modules_to_save=["head"])
    model = peft.get_peft_model(Model(), config)
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["layer"], modules_to_save=["head"], use_dora=True))
    training.state(model, rng=False)
    assert not caplog.records
    saved = training.state(model, rng=False, frozen=False)["model"]
    assert len(saved) == 4 and all("default" in name for name in saved)
    [record] = caplog.records
    assert "not active: second (5 parameters: " in record.message and "lora_magnitude_vector.second" in record.message
    model.set_adapter("second")
    training.state(model, rng=False, frozen=False)
    assert "not active: default" in caplog.records[-1].message and len(caplog.records) == 2
