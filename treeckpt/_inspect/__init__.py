"""Analyses of a checkpoint or a run that need its metadata only: outlines, differences, timings, retention.

It imports all other rooms of the core. Start with `outline` for trees and `timing_report` for timings.
"""
