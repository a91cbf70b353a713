#!/bin/sh
# Reports that it runs, and does nothing for an hour in as little memory as can be.
echo "ready $RANK $TORCHELASTIC_RESTART_COUNT $$ 0" >"$BENCH_REPORTS"
exec sleep 3600
