"""Trees: containers flattened into leaves with paths, and rebuilt from them; specs of leaves; keyed tables.

It imports `_core.sharding` and `errors`. Start with `flatten` and `structure`.
"""
