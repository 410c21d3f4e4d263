"""Analyses of a checkpoint or a run: outlines, differences, timings, retention; and of the numbers of arrays.

It imports all other rooms of the core. Start with `outline` for trees and `timing_report` for timings.
"""
