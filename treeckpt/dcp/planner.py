"""Plans of saves and loads, and what makes them: the names of `torch.distributed.checkpoint.planner`."""

from torch.distributed.checkpoint.planner import *  # pyright: ignore[reportWildcardImportFromLibrary]
