"""A worker for randomized tests with several agents. It records its identity in a file, and sometimes
misbehaves.

`$LEDGER` is a file that all workers append to: `BEGIN pid=... started=... agent=... round=...` and so on,
`DAEMON` likewise for a process that left its session, `EXIT pid=... code=...` before it ends by itself.
It exits 0 as soon as there is a file named `$DONE`; SIGUSR1 and SIGUSR2 as in `ranks.py`.
`$SEED` and the round decide how it misbehaves, unless `$DONE` is there already.
"""

import os
import random
import signal


def started(pid):
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[19]


NAMES = {
    "agent": "AGENT",
    "round": "ELASTICRS_ROUND",
    "rank": "RANK",
    "world": "WORLD_SIZE",
    "group": "GROUP_RANK",
    "restart": "TORCHELASTIC_RESTART_COUNT",
    "max": "TORCHELASTIC_MAX_RESTARTS",
    "master": "MASTER_PORT",
}
ledger = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def tell(word, **fields):
    os.write(
        ledger, (" ".join([word, *(f"{name}={value}" for name, value in fields.items())]) + "\n").encode()
    )


def leave(code):
    tell("EXIT", pid=os.getpid(), code=code)
    os._exit(code)


mine = {signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, mine)
# Exit on SIGINT without a traceback, which would appear in the agents' output.
signal.signal(signal.SIGINT, signal.SIG_DFL)
who = {name: os.environ[variable] for name, variable in NAMES.items()}
tell("BEGIN", pid=os.getpid(), started=started(os.getpid()), **who)
chance = random.Random(f"{os.environ['SEED']} {who['agent']} {who['round']} {who['rank']}")
is_over = os.path.exists(os.environ["DONE"])
if chance.random() < 0.15:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
if chance.random() < 0.15 and os.fork() == 0:
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    tell("DAEMON", pid=os.getpid(), started=started(os.getpid()), **who)
    signal.alarm(60)
    signal.pause()
if not is_over and chance.random() < 0.1:
    leave(chance.choice((0, 0, 1)))
while True:
    got = signal.sigtimedwait(mine, 0.05)
    if got is not None:
        leave(0 if got.si_signo == signal.SIGUSR1 else 1)
    if os.path.exists(os.environ["DONE"]):
        leave(0)
