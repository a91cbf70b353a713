"""Alias of torch's module with the same name; see :mod:`elasticrs.rendezvous.torchs`."""

from elasticrs.rendezvous.torchs import replace_with_torchs

replace_with_torchs(__name__)
