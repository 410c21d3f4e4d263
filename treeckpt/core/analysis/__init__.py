"""What can be known of a checkpoint or a run from its metadata alone: outlines, differences, timings, retention.

It imports all other rooms of the core. Start with `outline` for trees and `timing_report` for timings.
"""
