"""What goes wrong, and when: each world has some kinds of faults, so that all combinations come up."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from tests.faults.world.disks import ENDLESS, Node
from tests.faults.world.hosts import FOLDER, Host
from tests.faults.world.ledger import flipped
from tests.faults.world.network import Server

if TYPE_CHECKING:
    from tests.faults.world.running import World

KINDS = ("kill", "kill at a call", "power", "rot", "thief", "outage", "amnesia", "jump", "calls", "network", "folder")

SPOILS = ("cut", "flip", "swap", "absent")
NETWORK = ("error", "late", "lost", *SPOILS)


class Nemesis:
    """Does harm every now and then.

    Args:
        world: to be harmed.
        random: what decides.
    """

    def __init__(self, world: World, random: Random) -> None:
        self.world, self._random = world, random
        self.kinds = [kind for kind in KINDS if random.random() < 0.45]
        self._pause = random.choice((0.05, 0.1, 0.4))
        if random.random() < 0.4:
            world.network.rates = {fault: random.choice((0.0, 0.02, 0.1)) for fault in NETWORK}
            world.network.rates |= {fault: random.choice((0.0, 0.1, 0.5)) for fault in SPOILS}
        if random.random() < 0.2:
            world.system_faults.slow = 0.001
            world.system_faults.flips = random.choice((0.0, 0.02))
            world.system_faults.short = random.choice((0.0, 0.1))
        self._do: dict[str, Callable[[], None]] = {
            "kill": self._kill,
            "kill at a call": self._kill_at,
            "power": lambda: random.choice(world.hosts).power_lost(random),
            "rot": self._rot,
            "thief": self._steal,
            "outage": self._outage,
            "amnesia": self._forget,
            "jump": self._jump,
            "calls": self._calls,
            "network": self._network,
            "folder": self._folder,
        }

    def work(self) -> None:
        """A task."""
        while not self.world.calm:
            self.world.scheduler.sleep(self._random.expovariate(1 / self._pause))
            if self.kinds and not self.world.calm:
                self._do[self._random.choice(self.kinds)]()
                self.world.check()

    def heal(self) -> None:
        """All is well from now on."""
        world = self.world
        for server in world.servers:
            server.state, server.slow, server.away = "up", 1.0, set()
        world.network.rates = {}
        faults = world.system_faults
        faults.rate = faults.slow = faults.short = faults.flips = 0.0
        for host in world.hosts:
            host.disk.capacity_bytes = ENDLESS
            root = host.disk.find(FOLDER)
            for name in [] if root is None else [name for name, node in root.names.items() if node.kind != "dir"]:
                del root.names[name]  # a power loss may have brought it back
            for process in host.processes:
                process.kill_at = 0

    # -- processes --------------------------------------------------------------------------------------------------

    def _some(self) -> Any:
        there = [process for host in self.world.hosts for process in host.processes]
        return self._random.choice(there) if there else None

    def _kill(self) -> None:
        process = self._some()
        if process is not None:
            process.host.kill(process)

    def _kill_at(self) -> None:
        process = self._some()
        if process is not None:
            process.kill_at = self._random.randrange(1, 60)

    def _jump(self) -> None:
        host = self._random.choice(self.world.hosts)
        self.world.ledger.fault("clock jump", host.name)
        host.jumped += self._random.choice((-3600.0, -1.0, -0.05, 0.05, 1.0, 3600.0, 1e6))

    # -- disks ------------------------------------------------------------------------------------------------------

    def _rot(self) -> None:
        """Bits flip, ends are cut off, entries take each other's place: in a folder or on a server."""
        how = self._random.choice(("flip", "flip", "flip", "cut", "swap"))
        place = self._random.choice([*self.world.hosts, *self.world.stores])
        if isinstance(place, Server):
            self._rot_of_server(place, how)
        else:
            self._rot_of_folder(place, how)

    def _rot_of_server(self, server: Server, how: str) -> None:
        paths = list(server.objects)
        if not paths:
            return
        one, other = self._random.choice(paths), self._random.choice(paths)
        self.world.ledger.fault(f"{how} at rest", server.name)
        data = server.objects[one]
        if how == "swap":
            server.objects[one], server.objects[other] = server.objects[other], data
            server.hurt |= {one, other}
            return
        server.objects[one] = self._changed(data, how)
        server.hurt.add(one)

    def _rot_of_folder(self, host: Host, how: str) -> None:
        entries = host.entries()
        if not entries:
            return
        one, other = (self._random.choice(list(entries)) for _ in range(2))
        self.world.ledger.fault(f"{how} at rest", host.name)
        if how == "swap":
            entries[one].data, entries[other].data = entries[other].data, entries[one].data
            host.orderly = False
        else:
            entries[one].data = self._changed(entries[one].data, how)
        for key in (one, other):
            entries[key].hurt = True
            self.world.ledger.left(host.name, key)

    def _changed(self, data: bytes, how: str) -> bytes:
        if not data:
            return b"x"
        return flipped(data, self._random) if how == "flip" else data[: self._random.randrange(len(data))]

    def _steal(self) -> None:
        """Somebody deletes or evicts entries."""
        place = self._random.choice([*self.world.hosts, *self.world.stores])
        if isinstance(place, Server):
            for path in [path for path in place.objects if self._random.random() < 0.2]:
                del place.objects[path]
        else:
            for key in [key for key in place.entries() if self._random.random() < 0.2]:
                folder = place.disk.find(f"{FOLDER}/{key[:2]}")
                if folder is not None and folder.names.pop(f"{key}.bkv", None) is not None:
                    folder.mtime_ns += 4_000_000
                    self.world.ledger.left(place.name, key)
        self.world.ledger.fault("deleted by others", place.name)

    def _folder(self) -> None:
        """Folders of a store are removed, or something else takes the place of one."""
        host = self._random.choice(self.world.hosts)
        root = host.disk.find(FOLDER)
        if root is None or not root.names:
            return
        host.orderly = False
        host.upheavals += 1
        for key in host.entries():
            self.world.ledger.left(host.name, key)
        name = self._random.choice(list(root.names))
        how = self._random.choice(("removed", "emptied", "file", "link", "all"))
        self.world.ledger.fault(f"folder {how}", host.name)
        if how == "emptied":
            root.names[name].names.clear()
        elif how == "all":
            root.names.clear()
        else:
            del root.names[name]
            if how in ("file", "link"):
                planted = root.names[name] = Node(how)
                self.world.later(0.5, lambda: root.names.pop(name) if root.names.get(name) is planted else None)

    def _calls(self) -> None:
        faults, random = self.world.system_faults, self._random
        faults.rate = random.choice((0.0, 0.01, 0.05, 0.3))
        faults.slow = random.choice((0.0, 0.0, 0.01))
        faults.short = random.choice((0.0, 0.1))
        faults.flips = random.choice((0.0, 0.01))
        host = random.choice(self.world.hosts)
        host.disk.capacity_bytes = random.choice((ENDLESS, host.capacity // 2))
        self.world.later(random.choice((0.05, 0.3)), self._calls_end)

    def _calls_end(self) -> None:
        faults = self.world.system_faults
        faults.rate = faults.slow = faults.short = faults.flips = 0.0

    # -- servers ----------------------------------------------------------------------------------------------------

    def _outage(self) -> None:
        server, random = random_server(self.world, self._random), self._random
        how = random.choice(("down", "hung", "slow", "partition"))
        self.world.ledger.fault(how, server.name)
        if how == "slow":
            server.slow = random.choice((10.0, 100.0, 1000.0))
        elif how == "partition":
            server.away = {random.choice(self.world.hosts).name}
        else:
            server.state = how

        def over() -> None:
            server.state, server.slow, server.away = "up", 1.0, set()

        self.world.later(random.choice((0.1, 1.0, 5.0)), over)

    def _forget(self) -> None:
        """A server is started anew, and has lost some of its data, or all."""
        server, part = random_server(self.world, self._random), self._random.choice((0.2, 1.0))
        self.world.ledger.fault("restarted without data", server.name)
        for path in [path for path in server.objects if self._random.random() < part]:
            del server.objects[path]
        if server is self.world.centre:
            for name in list(self.world.history.now):
                self.world.history.set(name, None)
            for region in self.world.history.regions:
                region.cut()

    def _network(self) -> None:
        before, network = self.world.network.rates, self.world.network
        network.rates = {fault: self._random.choice((0.0, 0.05, 0.3)) for fault in NETWORK}

        def over() -> None:
            network.rates = {} if self.world.calm else before

        self.world.later(self._random.choice((0.1, 1.0)), over)


def random_server(world: World, random: Random) -> Server:
    return random.choice(world.servers)
