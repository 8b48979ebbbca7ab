"""How long a script has waited for new values, by keys and by groups of layers; as far as its front end sees it."""

from __future__ import annotations

import threading
from typing import Dict, Optional

from p3.worker.groups import groups
from p3.worker.key import Key


class Waits:
    """Of one session. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_names: Dict[str, float] = {}  # seconds, by the names of keys; in the order in which they came
        self._groups: Dict[str, str] = {}  # of these names

    def expect(self, key: Key) -> None:
        """Whoever waits for this key will say so."""
        with self._lock:
            self._of_names.setdefault(str(key.name), 0.0)

    def note(self, key: Key, seconds: float) -> None:
        name = str(key.name)
        with self._lock:
            self._of_names[name] = self._of_names.get(name, 0.0) + seconds

    def by_group(self) -> Optional[Dict[str, float]]:
        """None if nobody says how long it waits."""
        with self._lock:
            if not self._of_names:
                return None
            if len(self._groups) != len(self._of_names):
                self._groups = groups(list(self._of_names))
            found = dict.fromkeys(self._groups.values(), 0.0)
            for name, seconds in self._of_names.items():
                found[self._groups[name]] += seconds
            return found
