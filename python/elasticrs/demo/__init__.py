"""The demo: ``python -m elasticrs.demo`` runs a small training with four workers, two of which fail."""
