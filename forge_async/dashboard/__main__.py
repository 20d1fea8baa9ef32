"""The process beside a live run that serves its page; see ``serve.py``."""

from forge_async.dashboard.serve import serve_beside

serve_beside()
