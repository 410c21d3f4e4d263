"""Pages that compare: two checkpoints with each other, and the mesh of a save with another one that would load it.

It may import `pages` and `store`. Start at `routes`; `diff`, `changes` and `reshard` each build the data of one page.
"""
