"""Plans: what all ranks' trees hold together, which rank writes each element and where, and which bytes a load reads.

It imports `_core.tree`, `_core.sharding` and `errors`. Start with `rank_trees`, then `save_plan` and `load_plan`.
"""
