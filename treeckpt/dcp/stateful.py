"""The protocol of objects with a state dict: the names of `torch.distributed.checkpoint.stateful`."""

from torch.distributed.checkpoint.stateful import *  # pyright: ignore[reportWildcardImportFromLibrary]
