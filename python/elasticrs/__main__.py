"""``python -m elasticrs``: the same as ``python -m elasticrs.launch``."""

from elasticrs.launch import main

main()
