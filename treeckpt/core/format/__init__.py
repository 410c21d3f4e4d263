"""The files of a checkpoint as data: shard headers, the index, timings and records of saves under way.

It imports `core.planning`, `core.tree`, `core.sharding` and `errors`. Start with `records` and `index`.
"""
