"""Pages about one checkpoint: its tree, its leaves and their values, its shards, and their treemap.

It may import `pages` and `store`. Start at `routes`; each other module builds the data of one page.
"""
