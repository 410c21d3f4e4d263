"""The pure core: trees, layouts, plans, formats and analyses as functions on frozen data.

It imports numpy, msgspec, optree and ml_dtypes; no torch, no files, no clocks, no global state. Start with
`sharding.region`, then `tree.flatten`, `planning.save_plan` and `format.records`.
"""
