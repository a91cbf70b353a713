"""A relay of packets in the cable of a host: the kernel's own TCP has to cope with what it does."""

from collections.abc import Callable, Sequence
from pathlib import Path

from helpers.control import Program


def why_not() -> str | None:
    """Why there can be no such relay on this machine, or ``None``."""
    return None if Path("/dev/net/tun").exists() else "no packet relay: /dev/net/tun is missing"


class PacketRelay:
    """See `inside/packet_relay.py`.

    Args:
        prefix: to run it in the namespaces of the switch.
        ends: names of its two devices.
        seed: of its random numbers; printed, so that a failing test shows it.
        put_back: what to do with the cable when the relay has gone.
    """

    def __init__(
        self, prefix: Sequence[str], ends: tuple[str, str], seed: int, put_back: Callable[[], None]
    ) -> None:
        print(f"packet relay {ends[0]}: seed {seed}")
        self._program: Program | None = Program("packet_relay", *ends, str(seed), prefix=prefix)
        self._put_back = put_back

    def set(self, **how: float) -> None:
        """From the next packet on; what is not given is off."""
        self._running().ask("set", **how)

    def counts(self) -> dict[str, dict[str, int]]:
        """What became of the packets from the host (``"up"``) and to it (``"down"``).

        Each has ``taken``, ``lost``, ``repeated``, ``overtaken`` (by later ones) and ``delivered``.
        """
        return self._running().ask("counts")

    def close(self) -> None:
        """Take the relay out of the cable; idempotent."""
        if self._program is not None:
            self._program.close()
            self._program = None
            self._put_back()

    def _running(self) -> Program:
        assert self._program is not None, "it is closed"
        return self._program
