"""Workers with a machine each, for as long as a context lasts: network namespaces of Linux on shaped links. Needs root.

Every machine has one link to a switch, shaped in both directions by ``tc tbf``. All of it, the switch too, lives in
namespaces of its own that processes hold: nothing touches this machine's network, and when this process ends, in
whatever way, its pipes to the holders close, they end, and the kernel takes namespaces and links away.
"""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from isgq.bandwidth import Link
from isgq.core.errors import OptionError
from isgq.launch import launch

_T = TypeVar("_T")

INTERFACE = "link0"
_NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET
_BURST = 1e-4  # seconds of the link that may pass at once; at least 4 kB, which a full packet needs
_PORT = 29400
_LARGEST = 250  # machines, as addresses are 10.7.0.1 and so on


@dataclass(frozen=True)
class Machine:
    """A machine.

    Attributes:
        address: of its interface, in the network of all.
        holder: the process that holds its namespace.
    """

    address: str
    holder: int

    def enter(self) -> None:
        """Let this thread, and those that it starts, see the machine's network instead of its own.

        Raises:
            OSError: it is gone, or this process may not.
        """
        with Path(f"/proc/{self.holder}/ns/net").open() as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), _NETWORK_NAMESPACE):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace of {self.address}")


@dataclass(frozen=True)
class Counters:
    """What an interface has counted, frames with their headers from Ethernet up.

    Attributes:
        sent: bytes.
        received: bytes.
        packets_sent: packets.
        packets_received: packets.
    """

    sent: int
    received: int
    packets_sent: int
    packets_received: int

    @staticmethod
    def read() -> "Counters":
        """Those of the machine that this thread has entered.

        ``/sys/class/net`` has the same numbers, but shows the network of whoever has mounted it.
        """
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        [line] = [line for line in lines if line.strip().startswith(f"{INTERFACE}:")]
        fields = [int(field) for field in line.partition(":")[2].split()]
        return Counters(fields[8], fields[0], fields[9], fields[1])

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(*(a - b for a, b in zip(vars(self).values(), vars(before).values(), strict=True)))


def reason_against() -> str:
    """Why there can be no machines here; empty if there can be."""
    try:
        for words in ("unshare -n true", "ip -V", "tc -V", "nsenter -V"):
            _run(words)
    except (OSError, OptionError) as error:
        return f"network namespaces need Linux, root, unshare, nsenter, ip and tc: {error}"
    return ""


@contextmanager
def machines(workers: int, link: Link) -> Iterator[Sequence[Machine]]:
    """So many machines on links of that bandwidth; the link's latency is not added.

    Args:
        workers: how many.
        link: of each machine.

    Raises:
        OptionError: too many, or a command failed.
    """
    if not 1 <= workers <= _LARGEST:
        raise OptionError(f"workers={workers} must be 1 to {_LARGEST}, one for each machine")
    burst = max(4096, round(_BURST * link.bytes_per_second))
    shape = f"root tbf rate {round(8 * link.bytes_per_second)}bit burst {burst} latency 1s"
    holders: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(workers + 1):
            holders.append(_hold())
        switch, *rest = [f"nsenter -t {holder.pid} -n" for holder in holders]
        _run(f"{switch} ip link add switch type bridge")
        _run(f"{switch} ip link set switch up")
        found = []
        for rank, inside in enumerate(rest):
            holder, address = holders[rank + 1].pid, f"10.7.0.{rank + 1}"
            _run(f"{switch} ip link add port{rank} type veth peer name {INTERFACE} netns {holder}")
            for side, name in ((switch, f"port{rank}"), (inside, INTERFACE)):
                _run(f"{side} tc qdisc add dev {name} {shape}")
                _run(f"{side} sysctl -qw net.ipv6.conf.{name}.disable_ipv6=1", must=False)  # it would chatter
            _run(f"{switch} ip link set port{rank} master switch up")
            _run(f"{inside} ip address add {address}/24 dev {INTERFACE}")
            _run(f"{inside} ip link set {INTERFACE} up")
            _run(f"{inside} ip link set lo up")
            found.append(Machine(address, holder))
        yield found
    finally:
        for process in holders:
            process.kill()
            process.communicate()


def launch_on(
    found: Sequence[Machine], work: Callable[..., _T], args: Sequence[Any] = (), timeout: float = 60.0
) -> list[_T]:
    """The same as :func:`isgq.launch.launch`, with a rank on each machine.

    Args:
        found: the machines.
        work: see there.
        args: see there.
        timeout: see there.
    """
    return launch(_work_on, len(found), args=(found, work, args, timeout), timeout=timeout)


def _work_on(found: Sequence[Machine], work: Callable[..., _T], args: Sequence[Any], timeout: float) -> _T:
    """One rank: it moves to its machine and meets the others there."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    found[rank].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{found[0].address}:{_PORT}",
        rank=rank,
        world_size=len(found),
        timeout=timedelta(seconds=timeout),
    )
    dist.barrier()
    return work(*args)


def _hold() -> "subprocess.Popen[bytes]":
    """A process in a new network namespace, which ends when this one does; returns once it is inside."""
    pipe = subprocess.PIPE
    holder = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo && exec cat"], stdin=pipe, stdout=pipe)
    assert holder.stdout is not None
    holder.stdout.readline()
    return holder


def _run(command: str, must: bool = True) -> None:
    """A command, and OptionError if it must succeed and does not."""  # noqa: DOC501
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if must and done.returncode:
        raise OptionError(f"{command!r} failed: {done.stderr.strip() or done.returncode}")
