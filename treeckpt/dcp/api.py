"""The exception of calls that fail on some ranks: the names of `torch.distributed.checkpoint.api`."""

from torch.distributed.checkpoint.api import *  # pyright: ignore[reportWildcardImportFromLibrary]
