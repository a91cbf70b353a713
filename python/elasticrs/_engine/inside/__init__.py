"""Code that runs inside workers, and inside the nurseries that fork them, without being imported by the
user's script.

``hook/sitecustomize.py`` records uncaught exceptions. ``error_file.py`` writes the error file for this hook
and for ``@record``. ``nursery/nursery.py`` imports modules and forks workers (``--warm``). The environment
variables of these programs are set in :mod:`.environment`.
"""
