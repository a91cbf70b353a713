"""An attempt: what was recorded of it, and the pure function that leads from one attempt to the next."""
