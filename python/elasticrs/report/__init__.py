"""Text for the user: the agent's console, the wording of messages, and traceback summaries."""
