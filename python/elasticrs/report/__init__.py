"""Text for people: the console, the wording of messages, and short forms of tracebacks."""
