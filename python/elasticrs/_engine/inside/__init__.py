"""Code that runs in workers and in the nurseries that fork them, without being imported by the script.

``workers/plan.py`` sets the environment variables of these programs.
"""
