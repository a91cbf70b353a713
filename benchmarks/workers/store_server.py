"""A store server under measurement, torch's or elasticrs's. Prints its port, and exits when its standard
input is closed.
"""

import sys


def main(which):
    if which == "torchrun":
        import torch.distributed as dist

        server = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    else:
        from elasticrs import _core

        # Run a supervisor in the same process, as in a job.
        supervisor = _core.Supervisor()
        server = _core.WorkerStore()
        server.serve(supervisor)
    print(server.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
