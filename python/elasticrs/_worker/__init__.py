"""Code that runs inside workers and nurseries without being imported by the user's script.

``hook/sitecustomize.py`` records uncaught exceptions. ``error_file.py`` is the writer that it shares with
``@record``. ``nursery/nursery.py`` imports modules and forks workers (``--warm``). The environments in which
these programs start are made in :mod:`elasticrs.workers.environment`.
"""
