"""Trees: containers taken apart into leaves with paths, and put together again; specs of leaves; keyed tables.

It imports `core.sharding` and `errors`. Start with `flatten` and `structure`.
"""
