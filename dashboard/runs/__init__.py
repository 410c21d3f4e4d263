"""Pages about runs: their checkpoints, saves in progress, disk usage, and metrics for Prometheus.

It may import `pages` and `store`. Start at `routes`; `model` builds the list of checkpoints, `summary` what they say
together and what a run can be resumed from, `finder` the search of Ctrl-K.
"""
