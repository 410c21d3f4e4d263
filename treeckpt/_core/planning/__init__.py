"""Plans: what all ranks' trees hold together, and which bytes each rank writes or reads.

It imports `_core.tree`, `_core.sharding` and `errors`. Start with `rank_trees`, then `save_plan` and `load_plan`.
"""
