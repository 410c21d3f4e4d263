"""The interface of storages: the names of `torch.distributed.checkpoint.storage`."""

from torch.distributed.checkpoint.storage import *  # pyright: ignore[reportWildcardImportFromLibrary]
