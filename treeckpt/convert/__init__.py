"""Checkpoints from elsewhere, and to elsewhere: torch.save, PyTorch DCP, safetensors, hfai, Paddle.

    tc.convert.convert("model.pt", "run/step_00000100")
    tc.convert.to_safetensors("run/step_00000100", "hub/model", subtree="model", dtype="bfloat16")

`register` adds formats of one's own.

.. include:: FORMATS.md
.. include:: SYSTEMS.md
"""

from .._core.public_names import publish
from .._foreign.source_files import SourceFiles
from ._contents import SOURCES, ConvertReport, Finding, detect
from ._conversion import (
    FORMATS,
    convert,
    to_dcp,
    to_safetensors,
    to_torch_file,
    to_treeckpt,
)
from ._register import WrittenArray, register

__all__ = [
    "FORMATS",
    "SOURCES",
    "ConvertReport",
    "Finding",
    "SourceFiles",
    "WrittenArray",
    "convert",
    "detect",
    "register",
    "to_dcp",
    "to_safetensors",
    "to_torch_file",
    "to_treeckpt",
]

publish(__name__, __all__, globals())
