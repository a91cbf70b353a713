"""The demo: ``python -m elasticrs.demo`` runs :mod:`.demo.train` with four workers, two of which fail."""
