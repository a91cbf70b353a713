"""The elastic rendezvous: agents of several nodes meet in a coordination store and agree on rounds."""
