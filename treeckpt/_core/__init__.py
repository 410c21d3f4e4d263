"""The pure core: trees, layouts, plans and formats as functions on frozen data.

It imports numpy, msgspec, optree and ml_dtypes; no torch, no files, no clocks, no global state. Start with
`sharding.region`, then `tree.flatten`, `planning.save_plan` and `format.records`.
"""

# np.unique imports it at the first call. Two threads that make that call at once can end in a RecursionError of numpy
# 2.4: the module is complete, but not yet an attribute of numpy, whose __getattr__ then calls itself.
import numpy.ma  # noqa: F401  # pyright: ignore[reportUnusedImport]
