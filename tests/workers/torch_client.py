"""Runs clients of torch's own TCPStore, for tests of the workers' store.

Imports torch once, and forks for each line on its standard input: a child connects to the Unix socket that
was given and does what it is asked there, until the other side closes. A process each: some of torch's
bindings keep the GIL while they wait.
"""

import gc
import os
import random
import signal
import sys
from datetime import timedelta
from multiprocessing.connection import Client, Connection

import torch.distributed as dist


def serve(connection: Connection) -> None:
    own = Own()
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(own, name)(*args))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}")
        connection.send(answer)


class Own:
    """Commands that a child can execute. ``call`` calls any method of the store."""

    def connect(self, port, options):
        prefixes = options.pop("prefixes", ())
        options = {"timeout": 20.0, "is_master": False, **options}
        options["timeout"] = timedelta(seconds=options["timeout"])
        self.store = dist.TCPStore("localhost", port, **options)
        for prefix in prefixes:
            self.store = dist.PrefixStore(prefix, self.store)
        return os.getpid()

    def call(self, method, args, timeout):
        given = [] if timeout is None else [timedelta(seconds=timeout)]
        return getattr(self.store, method)(*args, *given)

    def can(self, method):
        return hasattr(self.store, method)

    def port(self):
        return self.store.port

    def clone(self):
        self.store = self.store.clone()

    def mixed(self, number, operations, seed):
        """Run random operations on this client's keys, and compare the results with a model. Return the
        amount added to the shared counter.
        """
        rng = random.Random(seed)
        store, model, queues, added = self.store, {}, {}, 0
        # torch 2.8 added queues.
        weights = WEIGHTS if hasattr(store, "queue_push") else WEIGHTS_WITHOUT_QUEUES
        for _ in range(operations):
            key = f"{number}/{rng.randrange(8)}"
            value = rng.randbytes(rng.choice((1, 10, 100, 1000)))
            action = rng.choices(ACTIONS, weights)[0]
            if action == "set":
                store.set(key, value)
                model[key] = value
            elif action == "get" and key in model:
                check(store.get(key), model[key])
            elif action == "add":
                added += 1
                store.add("shared", 1)
            elif action == "append":
                store.append(key, value)
                model[key] = model.get(key, b"") + value
            elif action == "compare_set" and key in model:
                expected = rng.choice((model[key], b"other"))
                if expected == model[key]:
                    model[key] = value
                check(store.compare_set(key, expected, value), model[key])
            elif action == "delete":
                check(store.delete_key(key), model.pop(key, None) is not None)
            elif action == "check":
                check(store.check([key]), key in model or bool(queues.get(key)))
            elif action == "multi":
                pairs = {f"{number}/{index}": rng.randbytes(8) for index in range(8)}
                store.multi_set(list(pairs), list(pairs.values()))
                model.update(pairs)
                check(store.multi_get(list(pairs)), list(pairs.values()))
            elif action == "push":
                store.queue_push(key, value)
                queues.setdefault(key, []).append(value)
            elif action == "pop" and queues.get(key):
                check(store.queue_len(key), len(queues[key]))
                check(store.queue_pop(key), queues[key].pop(0))
            elif action == "wait" and key in model:
                store.wait([key])
        for key, value in model.items():
            check(store.get(key), value)
        return added

    def process_group(self, rank, size, port):
        os.environ.update({
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        })  # fmt: skip
        dist.init_process_group("gloo", timeout=timedelta(seconds=25))
        dist.barrier()
        pair = dist.new_group([0, size - 1])
        if rank in {0, size - 1}:
            dist.barrier(pair)
        gathered = [None] * size
        dist.all_gather_object(gathered, {"rank": rank})
        dist.barrier()
        return gathered


ACTIONS = ("set", "get", "add", "append", "compare_set", "delete", "check", "multi", "wait", "push", "pop")
WEIGHTS = (20, 25, 15, 5, 5, 5, 10, 2, 5, 5, 5)
WEIGHTS_WITHOUT_QUEUES = (20, 25, 15, 5, 5, 5, 10, 2, 5, 0, 0)


def check(found, expected):
    if found != expected:
        raise AssertionError(f"{found!r} is not {expected!r}")


def main(address):
    # Let the kernel reap the children, because this process does not wait for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    for _ in iter(sys.stdin.readline, ""):
        if os.fork() == 0:
            with Client(address, "AF_UNIX") as connection:
                serve(connection)
            # Skip the interpreter's shutdown, because threads of gloo sometimes abort it (torch 2.15).
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
