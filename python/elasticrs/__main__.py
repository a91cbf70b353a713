"""Entry point ``python -m elasticrs``, which is the same as ``python -m elasticrs.launch``."""

from elasticrs.launch import main

main()
