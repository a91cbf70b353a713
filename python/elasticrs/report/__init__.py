"""Text for people: the console, the wording of messages, and summaries of tracebacks."""
