"""Entry point of ``python -m elasticrs``, which does the same as ``python -m elasticrs.launch``."""

from elasticrs.launch import main

main()
