"""Worlds larger than this machine: the real planning, agreement, commit and load planning, for simulated ranks.

A rank can only write what it holds. Without replicas, and with more ranks than rows, some write little: of 16,384 ranks
of llama 70B, dp 2048 x tp 8, the busiest writes 1.44 times the mean. With 16 copies of everything it is 1.003 times.
"""
