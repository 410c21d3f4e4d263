"""Parts of planners: the names of `torch.distributed.checkpoint.planner_helpers`."""

from torch.distributed.checkpoint.planner_helpers import *  # pyright: ignore[reportWildcardImportFromLibrary]
