"""Code that runs in workers and in the nurseries that fork them, without an import by the user's script.

:mod:`.environment` sets the environment variables of these programs.
"""
