"""Analyses of a checkpoint or a run that need its metadata only: outlines, differences, timings, retention.

It imports `_core`, `policy` and `errors`. Start with `outline` for trees and `timing_report` for timings.
"""
