"""Default level of loggers, used if ``LOGLEVEL`` is not set."""


def get_log_level() -> str:
    """The name of the level."""
    return "WARNING"
