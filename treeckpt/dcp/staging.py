"""Stagers of background saves: the names of `torch.distributed.checkpoint.staging`."""

from torch.distributed.checkpoint.staging import *  # pyright: ignore[reportWildcardImportFromLibrary]
