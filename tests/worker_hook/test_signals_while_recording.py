"""Tests for signal handlers that raise while an exception is being recorded."""

import pytest
from worker_hook.test_hook import worker

__all__ = ["worker"]

RAISES = """
    import os, signal, sys, threading

    ran = []

    def handler(signum, frame):
        ran.append(signum)
        raise RuntimeError("from the handler")

    signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGTERM, handler)
    # With it a mask of the main thread keeps no handler away: the kernel interrupts this one instead.
    threading.Thread(target=threading.Event().wait, daemon=True).start()

    def interrupt(event, args):
        if event == {event!r} and {of!r} in str(args):
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)

    sys.addaudithook(interrupt)
"""
END = """
    import atexit
    atexit.register(lambda: print(sorted(ran), signal.getsignal(signal.SIGUSR1) is handler))
    train()
"""
MOMENTS = [
    ("open", "error_file."),
    ("exec", "error_file.py"),
    ("open", ".partial"),
    ("os.rename", "error.json"),
]


@pytest.mark.parametrize(("event", "of"), MOMENTS)
def test_an_uncaught_exception_is_recorded_although_signal_handlers_raise(worker, event, of):
    train = "    def train(): raise ValueError('the cause')\n"
    done = worker.run(RAISES.format(event=event, of=of) + train + END)
    assert worker.callstack().endswith("ValueError: the cause\n")
    assert done.stdout == "[10, 15] True\n", "both handlers ran, and are installed again"
    assert "ValueError: the cause" in done.stderr
    assert "RuntimeError: from the handler" in done.stderr


@pytest.mark.parametrize(("event", "of"), MOMENTS[2:])
def test_record_writes_the_error_although_signal_handlers_raise(worker, event, of):
    train = """
    from elasticrs.multiprocessing.errors import record
    @record
    def train(): raise ValueError('the cause')
    """
    done = worker.run(RAISES.format(event=event, of=of) + train + END)
    assert worker.error()["elasticrs"]["written_by"] == "record"  # type: ignore[index]
    assert worker.callstack().endswith("ValueError: the cause\n")
    assert done.stdout == "[10, 15] True\n"


def test_recording_in_a_thread_does_not_change_signal_handlers(worker):
    source = """
        import signal, threading
        from elasticrs.multiprocessing.errors import record
        handler = lambda *args: None
        signal.signal(signal.SIGUSR1, handler)
        @record
        def train(): raise ValueError('the cause')
        thread = threading.Thread(target=train)
        thread.start(); thread.join()
        print(signal.getsignal(signal.SIGUSR1) is handler)
    """
    done = worker.run(source)
    assert done.stdout == "True\n"
    assert worker.callstack().endswith("ValueError: the cause\n")


@pytest.mark.torch
def test_the_error_is_recorded_although_torchs_data_loader_handler_raises(worker):
    source = """
        import os, signal, sys
        from torch.utils.data import DataLoader

        def end_a_loader(event, args):
            if event == "open" and ".partial" in str(args):
                process = loaders._workers[0]
                os.kill(process.pid, signal.SIGKILL)
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        if __name__ == "__main__":
            loaders = iter(DataLoader(range(1000), num_workers=2))
            next(loaders)
            sys.addaudithook(end_a_loader)
            raise ValueError("the cause")
    """
    done = worker.run(source)
    assert "DataLoader worker" in done.stderr, "torch's handler has raised"
    assert worker.callstack().endswith("ValueError: the cause\n")
