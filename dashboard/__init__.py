"""The dashboard: web pages about runs and checkpoints. Each page is also JSON under /api/v1. It only reads.

    web/         the server, the application, the checks before every request
    report/      a checkpoint or a run as one HTML file, with the drawings of the pages
    runs/        pages: runs and their checkpoints, saves in progress, disk usage, metrics for Prometheus
    checkpoint/  pages: the tree of a checkpoint, a leaf, its values, statistics of all arrays, the shards, the treemap
    timing/      pages: where the time of a save went, trends over the steps of a run
    compare/     pages: the difference of two checkpoints, what changed most, the preview of a load into another mesh
    pages/       what pages share: JSON and HTML answers, the row of a checkpoint
    store/       which runs and checkpoints exist, what they hold, the cache of that, and jobs in other processes
    templates/   one Jinja2 template a page
    static/      JavaScript modules, style sheets, and libraries of others in vendor/

Imports go down this list; the four rooms of pages do not import each other. No torch, no requests to other servers.
Start at `web/app.py` for the routes, or at the `routes.py` of a room for one page.
"""
