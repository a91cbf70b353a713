"""``python -m elasticrs``: the same as ``python -m elasticrs.launch``."""

import sys

from elasticrs.launch import main

sys.exit(main())
