#!/bin/bash
# Node check that queries a daemon that serves NVIDIA's nvhcd.proto on a Unix socket.
# Usage: --node-check 'bash nvhcd.sh SOCKET'
# The node is unfit if the daemon's check exits with a code other than 0. If the daemon does not answer, or
# cannot run its check, the node counts as fit.
reply=$(printf '\0\0\0\0\0' | curl -sf --max-time 50 --http2-prior-knowledge --unix-socket "$1" -H 'te: trailers' \
    -H 'content-type: application/grpc' --data-binary @- http://localhost/nvhcd.HealthCheckService/RunHealthCheck |
    tail -c +6 | tr -c '\20[:print:]' ' ')
case $reply in $'\20'*) # the response begins with field 2, the exit code, because field 1, "success", is not set
    echo "the check failed: $reply"
    exit 1 ;;
esac
