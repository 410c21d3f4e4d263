"""Numbers in arrays: elements as text, statistics, what is unusual, what changed most, and pictures.

It imports `sharding` only. Start with `moments`.
"""
