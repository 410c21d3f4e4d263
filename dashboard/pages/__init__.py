"""What the pages share: routers, HTML rendering, and the row of one checkpoint.

It may import `store`. Start at `checkpoints.checkpoint_row`, which nearly every page shows, and `answers.PageRouter`.
"""
