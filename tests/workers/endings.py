"""Ends in a different way in each attempt and succeeds in the last one. With ``succeed`` as argument, each
rank succeeds in a different way. With ``count``, only prints the numbers of ways to fail and to succeed.

Prints whether it is warm to a file of its own, and so proves that all of this has run warm.
"""

import sys

IS_WARM = "colorsys" in sys.modules

import os  # noqa: E402
import signal  # noqa: E402
from functools import partial  # noqa: E402


def wait_for_signal(signum):
    os.kill(os.getpid(), signum)
    signal.pause()


CODES = (3, -1, (1 << 40) + 7, "it cannot go on: \u00e4", ["a", {"list": None}], True)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGSEGV)
ENDINGS = [os.abort, *(partial(sys.exit, code) for code in CODES)]
ENDINGS += [partial(wait_for_signal, signum) for signum in SIGNALS]


def ending(function):
    ENDINGS.append(function)
    return function


@ending
def an_exception_with_a_cause():
    try:
        {}["no such key"]
    except KeyError as error:
        raise ValueError("text of the error: \u00e4") from error


@ending
def an_exception_on_the_way():
    try:
        {}["missing"]
    finally:
        int("no number")


@ending
def a_deep_recursion():
    def again(depth):
        return again(depth + 1) + 1

    again(0)


@ending
def depth_that_is_left():
    def dig(depth):
        try:
            return dig(depth + 1)
        except RecursionError:
            return depth

    sys.exit(f"depth {dig(0)}")


@ending
def an_exit_that_is_caught_and_raised_again():
    try:
        sys.exit(12)
    except SystemExit as error:
        print("caught", error.code)
        raise


@ending
def a_keyboard_interrupt():
    raise KeyboardInterrupt("by hand")


@ending
def sigpipe_is_an_exception():
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b".")


@ending
def exit_at_once():
    sys.stdout.write("written")
    os._exit(5)


@ending
def functions_at_exit():
    import atexit

    for number in range(3):
        atexit.register(print, "at exit", number)
    atexit.register(lambda: 1 / 0)
    raise ValueError("first")


@ending
def exit_while_exiting():
    import atexit

    atexit.register(sys.exit, 9)
    sys.exit(8)


@ending
def a_hook_of_its_own():
    previous = sys.excepthook

    def hook(kind, error, traceback):
        print("hook", kind, error)
        previous(kind, error, traceback)

    sys.excepthook = hook
    raise LookupError("for the hook")


@ending
def a_hook_that_raises():
    def hook(kind, error, traceback):
        raise RuntimeError("the hook is broken")

    sys.excepthook = hook
    raise LookupError("for the hook")


@ending
def threads():
    import threading

    def fail():
        raise ValueError("in a thread")

    def leave():
        sys.exit(7)

    for target in (fail, leave):
        thread = threading.Thread(target=target, name="named")
        thread.start()
        thread.join()
    sys.exit(11)


@ending
def a_daemon_thread():
    import threading

    threading.Thread(target=threading.Event().wait, daemon=True).start()
    sys.exit(13)


@ending
def a_thread_that_ends_last():
    import threading

    main = threading.main_thread()

    def end():
        main.join()
        print("the main thread has ended", main.is_alive())

    threading.Thread(target=end).start()
    sys.exit(14)


@ending
def a_module_that_is_missing():
    import no_such_module_at_all  # noqa: F401


@ending
def another_program():
    os.execv(
        sys.executable, [sys.executable, "-c", "import sys; print(sys.argv, sys.path[0]); sys.exit(15)", "a"]
    )


@ending
def itself():
    if os.environ.get("AGAIN"):
        print("again", sys.argv, IS_WARM)
        sys.exit(16)
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@ending
def a_fork():
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        raise ValueError("in the child")
    _, status = os.waitpid(pid, 0)
    sys.exit(20 + os.waitstatus_to_exitcode(status))


@ending
def a_process_by_fork():
    import multiprocessing

    process = multiprocessing.get_context("fork").Process(target=int, args=("no number",))
    process.start()
    process.join()
    sys.exit(20 + process.exitcode)


@ending
def a_syntax_error():
    exec(compile("def broken(:\n", "text", "exec"))


@ending
def a_warning():
    import warnings

    warnings.warn("something is deprecated", DeprecationWarning, stacklevel=1)
    warnings.warn("something is odd", stacklevel=2)
    sys.exit(17)


@ending
def destructors():
    class Loud:
        def __init__(self, name):
            self.name = name

        def __del__(self):
            print("gone", self.name)
            os.write(1, b"gone indeed\n")
            if self.name == "bad":
                raise ValueError("in a destructor")

    globals()["kept"] = Loud("a global")
    loop = Loud("a circle")
    loop.self = loop
    Loud("bad")
    sys.exit(18)


@ending
def a_file_that_nobody_closes():
    globals()["written"] = open(f"{os.environ['TORCHELASTIC_ERROR_FILE']}.stdout", "w")  # noqa: SIM115
    globals()["written"].write("still in the buffer")
    globals()["circle"] = lambda: written  # noqa: F821
    sys.exit(18)


@ending
def the_stack():
    import traceback

    traceback.print_stack()
    sys.exit(19)


@ending
def a_coroutine():
    import asyncio

    async def fail():
        await asyncio.sleep(0)
        raise ValueError("in a coroutine")

    asyncio.run(fail())


@ending
def a_base_exception():
    class PanicException(BaseException):
        pass

    raise PanicException("native")


@ending
def a_closed_output():
    sys.stdout.close()
    print("lost")


# Ways to succeed. With ``succeed`` as argument, each rank ends in a different one.
def at_the_end_of_the_script():
    print("done")


def exit_in_a_thread():
    import threading

    threading.Thread(target=sys.exit, args=(5,)).start()


def a_program_that_succeeds():
    os.execv("/bin/echo", ["echo", "from another program"])


def order_at_the_end():
    import atexit
    import threading

    atexit.register(print, "registered first")
    atexit.register(print, "registered last")
    main = threading.main_thread()

    def end():
        main.join()
        print("a thread")

    threading.Thread(target=end).start()
    try:
        sys.exit(0)
    finally:
        print("finally")


SUCCESSES = [at_the_end_of_the_script, sys.exit, partial(sys.exit, 0), partial(os._exit, 0), exit_in_a_thread]
SUCCESSES += [a_program_that_succeeds, order_at_the_end]

if sys.argv[1] == "count":
    print(len(ENDINGS), len(SUCCESSES))
    sys.exit()
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if os.path.exists(
    kept := f"{os.environ['TORCHELASTIC_ERROR_FILE']}.stdout".replace(
        f"attempt_{attempt}", f"attempt_{attempt - 1}"
    )
):
    with open(kept) as file:
        print("of the attempt before:", file.read())
if "AGAIN" not in os.environ:
    with open(f"facts/{attempt}.{rank}.json", "w") as file:
        file.write("true" if IS_WARM else "false")
ways = SUCCESSES if sys.argv[1] == "succeed" else ENDINGS
way = ways[rank if sys.argv[1] == "succeed" else attempt] if attempt < len(ways) else at_the_end_of_the_script
print("way", getattr(way, "__name__", way))
way()
