"""The pure core: trees, layouts, plans and formats, without torch, files or clocks."""
