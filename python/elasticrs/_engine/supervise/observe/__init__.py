"""Records what happens: messages for the user, events, metrics, health, and the report of the job."""
