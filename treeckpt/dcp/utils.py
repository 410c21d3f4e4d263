"""Files and results of calls on several ranks: the names of `torch.distributed.checkpoint.utils`."""

from torch.distributed.checkpoint.utils import *  # pyright: ignore[reportWildcardImportFromLibrary]
