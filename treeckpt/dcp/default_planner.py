"""The planners that DCP uses by default: the names of `torch.distributed.checkpoint.default_planner`."""

from torch.distributed.checkpoint.default_planner import *  # pyright: ignore[reportWildcardImportFromLibrary]
