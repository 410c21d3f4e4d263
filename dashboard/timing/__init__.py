"""Pages about time: where the time of one save went, and how saves of a run changed from step to step.

It may import `pages` and `store`. Start at `routes`. Of one save, `model` builds the page and the data of its charts,
and `diagnosis` says why it was slow; of a run, `trends` builds the page and its charts from the reduced timings of
`store`, and `diagnosis` finds what is slow again and again.
"""
