"""A worker that prints its identity, and then reacts to signals.

SIGUSR1: exit 0. SIGUSR2: exit 1. SIGTERM and SIGINT end it as usual; not if STUBBORN is set.
If `$DONE` is set: exit 0, too, as soon as there is a file of this name.
"""

import os
import signal

NAMES = {
    "rank": "RANK",
    "local": "LOCAL_RANK",
    "world": "WORLD_SIZE",
    "group": "GROUP_RANK",
    "groups": "GROUP_WORLD_SIZE",
    "role_rank": "ROLE_RANK",
    "role_world": "ROLE_WORLD_SIZE",
    "restart": "TORCHELASTIC_RESTART_COUNT",
    "round": "ELASTICRS_ROUND",
    "master": "MASTER_ADDR",
    "port": "MASTER_PORT",
    "run": "TORCHELASTIC_RUN_ID",
}

mine = {signal.SIGUSR1, signal.SIGUSR2}
if "STUBBORN" in os.environ:
    mine |= {signal.SIGTERM, signal.SIGINT}
# Block these signals and wait for them. Python would run a handler late if the signal arrived just before a
# system call.
signal.pthread_sigmask(signal.SIG_BLOCK, mine)
told = " ".join(f"{name}={os.environ.get(variable, '-')}" for name, variable in NAMES.items())
# Write the line with a single system call, because all workers share the pipe.
os.write(1, f"READY pid={os.getpid()} host={os.uname().nodename} {told}\n".encode())
while True:
    got = signal.sigtimedwait(mine, 0.05 if "DONE" in os.environ else 3600)
    if got is None:
        if os.path.exists(os.environ.get("DONE", "")):
            os._exit(0)
    elif got.si_signo in {signal.SIGUSR1, signal.SIGUSR2}:
        os._exit(0 if got.si_signo == signal.SIGUSR1 else 1)
    else:
        os.write(1, f"IGNORED {got.si_signo} pid={os.getpid()}\n".encode())
