"""The level of loggers when ``LOGLEVEL`` is not set."""


def get_log_level() -> str:
    """The name of the level."""
    return "WARNING"
