"""A store under measurement: torch's own server, or ours. Prints its port; ends with its standard input."""

import sys


def main(which):
    if which == "torchrun":
        import torch.distributed as dist

        server = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    else:
        from elasticrs import _core

        # With a supervisor beside it, as in a job.
        supervisor = _core.Supervisor()
        server = _core.WorkerStore()
        server.serve(supervisor)
    print(server.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
