#!/bin/sh
# Runs this machine's member of an etcd of three (or one, or five) machines, in which the agents of jobs meet:
#
#   sh member.sh FOLDER HOST HOST HOST     on each of the machines, with the same list; FOLDER keeps the member's data
#
# ETCD_HOST is this machine's name in the list, by default its host name. Ports 2379 and 2380 are not protected: let
# only the nodes reach them, or add certificates (https://etcd.io/docs, "Transport security").
set -eu
folder=$1
shift
self=${ETCD_HOST:-$(hostname)}
cluster=
for host; do cluster="$cluster,$host=http://$host:2380"; done
exec etcd --name "$self" --data-dir "$folder" --initial-cluster "${cluster#,}" --pre-vote \
    --listen-client-urls http://0.0.0.0:2379 --advertise-client-urls "http://$self:2379" \
    --listen-peer-urls http://0.0.0.0:2380 --initial-advertise-peer-urls "http://$self:2380" \
    --auto-compaction-mode=revision --auto-compaction-retention=10000 --logger=zap --log-level=warn
