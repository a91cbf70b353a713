"""Default level of loggers, used if ``LOGLEVEL`` is not set."""


def get_log_level() -> str:
    """Return the name of the default log level."""
    return "WARNING"
