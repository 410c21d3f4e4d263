"""Checkpoints from elsewhere, and to elsewhere: torch.save, PyTorch DCP, safetensors, hfai, Paddle.

    tc.convert.convert("model.pt", "run/step_00000100")
    tc.convert.to_safetensors("run/step_00000100", "hub/model", subtree="model", dtype="bfloat16")

.. include:: FORMATS.md
.. include:: SYSTEMS.md
"""

from .._core.public_names import publish
from ._contents import SOURCES, ConvertReport, Finding, detect
from ._conversion import (
    FORMATS,
    convert,
    to_dcp,
    to_safetensors,
    to_torch_file,
    to_treeckpt,
)

__all__ = [
    "FORMATS",
    "SOURCES",
    "ConvertReport",
    "Finding",
    "convert",
    "detect",
    "to_dcp",
    "to_safetensors",
    "to_torch_file",
    "to_treeckpt",
]

publish(__name__, __all__, globals())
