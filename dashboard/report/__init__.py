"""Pages of a checkpoint or a run as one HTML file, with the drawings of the dashboard; no server, no network, no torch.

It may import the rooms of pages. Start at `page`.
"""
