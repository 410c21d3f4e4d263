"""Loads, here on the format of treeckpt: the names of `torch.distributed.checkpoint.state_dict_loader`."""

from torch.distributed.checkpoint.state_dict_loader import *  # pyright: ignore[reportWildcardImportFromLibrary]

from ._calls import load
