"""Saves, here on the format of treeckpt: the names of `torch.distributed.checkpoint.state_dict_saver`."""

from torch.distributed.checkpoint.state_dict_saver import *  # pyright: ignore[reportWildcardImportFromLibrary]

from ._calls import async_save, save
