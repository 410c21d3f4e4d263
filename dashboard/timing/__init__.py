"""Pages about time: where the time of one save went, and how saves of a run changed from step to step.

It may import `pages` and `store`. Start at `routes`. Of one save, `model` builds the page and the data of its
charts; of a run, `trends` does, from the reduced timings of `store`. `diagnosis` says why a save was slow, and finds
which hosts and ranks are slow again and again.
"""
