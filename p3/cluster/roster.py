"""The nodes that have joined, as the scheduler knows them."""

from __future__ import annotations

from typing import Dict, Iterable, List, Optional, Set, Tuple

from p3.cluster import messages
from p3.cluster.connections import channel
from p3.cluster.connections.frames import LinkShare
from p3.cluster.journal import Outbox
from p3.cluster.node import Node
from p3.cluster.rendezvous import label_of
from p3.cluster.watching.view import Reports


class Entry:
    """A node that has joined: its control connection and what is known of its life."""

    def __init__(self, stream: Optional[channel.Stream], join: Optional[dict]) -> None:
        """Without a stream: it had joined the scheduler that was here before, and is to come back. `join` None: nobody
        has this place yet."""
        self.stream, self.join = stream, join
        self.untold = Outbox()  # while it is not here
        self.noted = 0  # messages of its that are in the journal
        self.node: Optional[Node] = None  # once ranks are given
        self.ready = False
        self.watched = False
        self.last_heard = 0.0  # when its last heartbeat came, and the round that it had completed by then
        self.last_round = 0
        self.link = LinkShare(0.0, 0.0)  # as its last heartbeat has told
        self.reports = Reports()  # for those who watch
        self.left = join is None
        self.gone = join is None  # lost; of one that has departed, `left` as well
        self.lost_servers: Set[int] = set()  # of a worker: ranks of those that it says it has lost
        self.catches_up = False  # enters a running job, and hears of nothing until it has

    def __str__(self) -> str:
        return str(self.node) if self.node else label_of(self.join)

    @property
    def hears(self) -> bool:
        return not self.left and not self.gone and not self.catches_up

    def tell(self, message: dict, encoded: bytes = b"") -> None:
        """Queues the message, if the node is there to hear it, or will come back."""
        if not self.hears:
            return
        if self.stream is not None:
            self.stream.send_encoded(encoded or messages.encode(message))
        elif messages.counts(message["kind"]):
            self.untold.add(message)

    def come_back(self, stream: channel.Stream, heard: int) -> None:
        """To the scheduler that took another one's place."""
        missed, self.untold = self.untold.after(heard), Outbox()
        self.stream = stream
        stream.send({"kind": "welcome_back", "noted": self.noted})
        for message in missed:
            stream.send(message)


class Roster:
    def __init__(self) -> None:
        self.entries: List[Entry] = []  # in the order of joining
        self.by_node: Dict[Node, Entry] = {}  # once ranks are given; with places that nobody has yet

    def assign(self, nodes: List[Node]) -> None:
        """The ranks, in the order of joining."""
        for node, entry in zip(nodes, self.entries):
            entry.node = node
            self.by_node[node] = entry

    def add_places(self, role: str, ranks: Iterable[int]) -> None:
        """That nobody has yet."""
        for rank in ranks:
            entry = Entry(None, None)
            entry.node = Node(role, rank, "nobody yet")
            self.by_node[entry.node] = entry

    def replace(self, node: Node, entry: Entry) -> None:
        """Another process is that node from here on."""
        former = self.by_node.pop(node)
        entry.node = node._replace(host=entry.join["host"])
        self.by_node[entry.node] = entry
        if former in self.entries:
            self.entries[self.entries.index(former)] = entry
        else:
            self.entries.append(entry)

    def find(self, role: str, rank: int) -> Optional[Entry]:
        return next((entry for node, entry in self.by_node.items() if (node.role, node.rank) == (role, rank)), None)

    def nodes(self, role: str) -> List[Node]:
        return sorted(node for node in self.by_node if node.role == role)

    def tell_all(self, role: str, message: dict) -> None:
        self.tell_each((node, message) for node in self.by_node if node.role == role)

    def tell_each(self, sent: Iterable[Tuple[Node, dict]]) -> None:
        """As Entry.tell(). What several get one after the other is encoded once, for jobs of many nodes."""
        before, encoded = None, b""
        for node, message in sent:
            entry = self.by_node[node]
            if message is not before and entry.stream is not None:
                before, encoded = message, messages.encode(message)
            entry.tell(message, encoded)
