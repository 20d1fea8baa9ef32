"""A page that shows a run, live or finished, out of the files in its folder; nothing else is asked or changed.

::

    run folder ──lines.py──▶ view.py: what the page shows ──app.py──▶ browser
                                                     serve.py: port, token, the process of a live run
"""
