#!/bin/sh
# Train on two hosts. Run the same line on both, and on a third one if that is to take over when one is lost:
#
#   sh two_hosts.sh c10d node1:29400 train.py              the agent of node1 hosts the store; the job ends with it
#   sh two_hosts.sh etcd etcd1:2379,etcd2:2379 train.py    they meet in an etcd that is there: any host may be lost
#
# JOB is the job's name, NPROC the number of workers on each host, ELASTICRS_TOKEN a secret that keeps strangers out.
set -eu

if [ $# -lt 3 ]; then
    echo "usage: $0 c10d|etcd ENDPOINTS SCRIPT [ARGUMENT...]" >&2
    exit 2
fi
store=$1
endpoints=$2
shift 2
case $store in
    c10d) set -- --rdzv-backend c10d "$@" ;;
    etcd) set -- --rdzv-backend etcd "$@" ;;
    *)
        echo "$0: $store is neither c10d nor etcd" >&2
        exit 2
        ;;
esac
# With one host the job starts when no second one has come for 30 s; one that comes later is taken in.
exec elasticrun --nnodes 1:2 --nproc-per-node "${NPROC:-1}" --max-restarts 3 \
    --rdzv-id "${JOB:-example}" --rdzv-endpoint "$endpoints" "$@"
