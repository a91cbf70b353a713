"""The store in which the nodes meet: its address, sessions with it, requests to it, and etcd in its place."""
