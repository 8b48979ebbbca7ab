"""The strategies of a job (p3/plan/strategy.py): P3_STRATEGY's, of all stores, or what the script has given for one.

All workers give the same for a store, by its sha256. Rank 0's word has the text besides, before the store's first key.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Set

from p3.cluster.messages import sendable
from p3.cluster.node import Node
from p3.codecs import Ways
from p3.errors import ConfigError, DisagreementError, ProtocolError
from p3.plan import strategy as strategies
from p3.plan.key_plan import Name
from p3.plan.strategy import Cut, Strategy


class Strategies:
    def __init__(self, of_job: Strategy, num_servers: int) -> None:
        """`of_job`: Strategy(): there is none."""
        self._of_job, self._num_servers = of_job, num_servers
        self._of_stores: Dict[int, Strategy] = {}
        self._named: Set[str] = set()  # of the job's entries, those of keys that have been announced

    def take(self, node: Node, store: int, told: Mapping[str, Any]) -> None:
        """What rank 0 has told of a store. ProtocolError if it is none; DisagreementError if the job has another."""
        given = self._given(node, store, told)
        if self._of_job == Strategy():
            self._of_stores[store] = given
            return
        differing = given.difference(self._of_job)
        if differing:
            raise DisagreementError(
                "%s gives store %d the strategy %s, and P3_STRATEGY gives the job %s: they differ in %s. Leave one of "
                "them out" % (node, store, given.path, self._of_job.path, differing)
            )

    def change(self, node: Node, store: int, told: Mapping[str, Any]) -> None:
        """While the job trains, whatever the store or the job had before. ProtocolError if it is none."""
        self._of_stores[store] = self._given(node, store, told)

    def _given(self, node: Node, store: int, told: Mapping[str, Any]) -> Strategy:
        given = _read(node, store, told)
        try:
            given.require_servers(self._num_servers)
        except ConfigError as error:
            raise ProtocolError("%s set the strategy of store %d: %s" % (node, store, error)) from None
        return given

    def require_followed(self, store: int, name: Name, ways: Ways, staleness: int) -> None:
        """DisagreementError if a key that rank 0 has announced does not go by its entry."""
        try:
            self._of(store).require_followed(name, ways, staleness)
        except ConfigError as error:
            raise DisagreementError(str(error)) from None

    def _of(self, store: int) -> Strategy:
        return self._of_stores.get(store, self._of_job)

    def cut(self, store: int, name: Name, sparse: bool) -> Cut:
        """Of a key that rank 0 has announced. DisagreementError if its entry does not fit it."""
        strategy = self._of(store)
        problem = strategy.why_not(name, sparse)
        if problem:
            raise DisagreementError(problem)
        if strategy is self._of_job:
            self._named.update({str(name)} & strategy.keys.keys())
        return strategy.of(name)

    def entries_unused(self) -> List[str]:
        """Names in the job's that no key has had so far. Whoever gives a store one knows the keys, and has looked."""
        return sorted(self._of_job.keys.keys() - self._named)

    def forget(self, store: int) -> None:
        self._of_stores.pop(store, None)


def told_to_all(of_job: Strategy) -> Optional[List[str]]:
    """As `nodes` has it (messages.py)."""
    return [of_job.choices.text(), sendable(of_job.path)] if of_job.chooses else None


def read_of_job(told: Optional[List[str]]) -> Strategy:
    """What told_to_all() has told. ProtocolError if it is none."""
    if told is None:
        return Strategy()
    try:
        return strategies.parse(*told)
    except ConfigError as error:
        raise ProtocolError("the scheduler told the strategy of the job: %s" % error) from None


def _read(node: Node, store: int, told: Mapping[str, Any]) -> Strategy:
    text, path = told.get("text"), told.get("path")
    if not isinstance(text, str) or not isinstance(path, str):
        raise ProtocolError("%s set the strategy of store %d without its text" % (node, store))
    try:
        read = strategies.parse(text, path)
    except ConfigError as error:
        raise ProtocolError("%s set the strategy of store %d: %s" % (node, store, error)) from None
    if read.sha256 != told.get("sha256"):
        raise ProtocolError("%s set the strategy of store %d with the sha256 of another" % (node, store))
    return read
