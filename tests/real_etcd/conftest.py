"""Clients of etcd."""

from helpers.etcd_client import connect_etcd, relay_to

__all__ = ["connect_etcd", "relay_to"]
