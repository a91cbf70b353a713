"""What runs inside a worker without its script asking for it.

``hook/sitecustomize.py`` records uncaught exceptions, ``error_file.py`` is the writer it shares with
``@record``. The agent needs only what makes environments.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elasticrs.warm import Preload

TOKEN_VARIABLE = "ELASTICRS_TOKEN"
"""The secret that the agents of a job share, unless a setting of the rendezvous gives one."""

_HERE = os.path.dirname(os.path.abspath(__file__))
_HOOK = os.path.join(_HERE, "hook")
_WARM = os.path.join(_HERE, "warm")


def inherited_environment() -> dict[str, str]:
    """What workers inherit of this process's environment: all but the token, which only agents need."""
    return {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}


def hook_environment(env: dict[str, str]) -> dict[str, str]:
    """The environment with which a worker, if it is a Python program, records its uncaught exceptions.

    Args:
        env: the worker's environment; left as it is. ``ELASTICRS_TRACEBACKS=0`` in it switches the hook off.

    Returns:
        A copy in which ``PYTHONPATH`` starts with the directory of the hook, which takes itself out again.
    """
    worker_env = dict(env)
    # A directory with a colon in its name cannot be an entry of PYTHONPATH.
    if env.get("ELASTICRS_TRACEBACKS") == "0" or os.pathsep in _HOOK:
        return worker_env
    entries = [_HOOK]
    if "PYTHONPATH" in env:
        # Python takes an empty variable as none, an empty entry as the working directory: so the name of the
        # hook stands for the empty value, and is recognised there.
        entries.append(env["PYTHONPATH"] or _HOOK)
    worker_env["PYTHONPATH"] = os.pathsep.join(entries)
    return worker_env


def warm_environment(env: dict[str, str], preload: Preload, core: str) -> dict[str, str]:
    """Return the environment of a nursery: a process that imports modules and then forks the workers. See
    ``warm/nursery.py``.

    Args:
        env: variables that all workers have in common, from :func:`hook_environment`.
        preload: modules to import.
        core: path of the file of ``elasticrs._core``.
    """
    import json

    entries = [entry for entry in (env.get("PYTHONPATH") or _HOOK).split(os.pathsep) if entry != _HOOK]
    settings = {name: getattr(preload, name) for name in ("steps", "is_explicit", "folders")}
    return {
        **env,
        "PYTHONPATH": os.pathsep.join([_WARM, *entries]),
        "ELASTICRS_WARM": json.dumps(settings),
        "ELASTICRS_WARM_CORE": core,
    }
