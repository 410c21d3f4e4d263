"""Checkpoints of DCP from files of `torch.save`, and back: the names of `torch.distributed.checkpoint.format_utils`."""

from torch.distributed.checkpoint.format_utils import *  # pyright: ignore[reportWildcardImportFromLibrary]
