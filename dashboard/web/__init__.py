"""The web server and the ASGI application.

It may import every room of the dashboard. Start at `app.create_app`; `server.serve` runs it, and limits how long a
connection may wait; `security.RequestGuard` checks every request before the application sees it.
"""
