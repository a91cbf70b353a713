"""A packet relay in the cable of a host, to test how the kernel's TCP copes with a bad network."""

from collections.abc import Callable, Sequence
from pathlib import Path

from helpers.control import Program


def why_not() -> str | None:
    """Return why this machine cannot run a packet relay, or ``None`` if it can."""
    return None if Path("/dev/net/tun").exists() else "no packet relay: /dev/net/tun is missing"


class PacketRelay:
    """A running packet relay; see `inside/packet_relay.py`.

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
        """Set the impairment of all further packets. Settings that are not given are switched off."""
        self._running().ask("set", **how)

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the packet counts of the direction from the host (``"up"``) and of the direction to it
        (``"down"``).

        Each has ``taken``, ``lost``, ``repeated``, ``overtaken`` (by later ones) and ``delivered``.
        """
        return self._running().ask("counts")

    def close(self) -> None:
        """Remove the relay from the cable. Idempotent."""
        if self._program is not None:
            self._program.close()
            self._program = None
            self._put_back()

    def _running(self) -> Program:
        assert self._program is not None, "it is closed"
        return self._program
