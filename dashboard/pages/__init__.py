"""What the pages share: JSON answers, HTML rendering, common query parameters, and the row of one checkpoint.

It may import `store`. Start at `checkpoints.checkpoint_row`, which nearly every page shows, and `answers.JsonRouter`.
"""
