"""Pages about time: where the time of one save went, and how saves of a run changed from step to step.

It may import `pages` and `store`. Start at `routes`; `model` builds the page of a save, `charts` the
data of its charts.
"""
