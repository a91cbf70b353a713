"""Code that runs in the workers, and in the nursery (the process that imports modules and forks the workers).

The user's script need not import this code: ``workers/plan.py`` sets environment variables that load it.
"""
