"""The web server and the ASGI application.

It may import every room of the dashboard. Start at `app.create_app`; `server.serve` runs it, `security.Guard` checks
every request before the application sees it, and `connections` limits how long a connection may wait.
"""
