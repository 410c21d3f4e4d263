"""States of optimizers in parts: the names of `torch.distributed.checkpoint.optimizer`."""

from torch.distributed.checkpoint.optimizer import *  # pyright: ignore[reportWildcardImportFromLibrary]
