"""Nodes that form a job: the rendezvous of several nodes, and the one of a single node."""
