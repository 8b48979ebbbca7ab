# distutils: language = c++
"""The relay of src/relay/: what carries the frames of a lab, and the table of its links. p3/measure/lab/relay.py is its
face.

RuntimeError says which system call failed.
"""

import os

from libc.stdint cimport uint64_t
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "<atomic>" namespace "std" nogil:
    cdef cppclass atomic[T]:
        T load() noexcept
        void store(T) noexcept


cdef extern from "relay/table.h" namespace "p3::relay" nogil:
    cdef cppclass DirectionRecord:
        atomic[double] bytes_per_s, queue_s, delay_s, loss
        atomic[uint64_t] seed, packets, bytes, dropped, lost

    cdef cppclass HostRecord:
        DirectionRecord up, down
        atomic[uint64_t] is_cut, late_ns

    cdef cppclass CTable "p3::relay::Table":
        CTable(const string&) except +
        int hosts() noexcept
        HostRecord& operator[](int) noexcept

    void make_table "p3::relay::Table::make"(const string&, int) except +


cdef extern from "relay/relay.h" namespace "p3::relay" nogil:
    cdef cppclass Relay:
        Relay(const string&, const vector[string]&) except +
        void run() except +


cdef class Table:
    """The links of a lab's hosts, numbered from 0, as all processes see them. May be used by any thread."""

    cdef CTable* table

    def __cinit__(self, path, hosts=None):
        """Of a file; with `hosts`, a new one of so many."""
        if hosts is not None:
            make_table(os.fsencode(path), hosts)
        self.table = new CTable(os.fsencode(path))

    def __dealloc__(self):
        del self.table

    def set(self, int host, direction, double bytes_per_s, double queue_s, double delay_s, double loss, uint64_t seed):
        """One direction, "up" or "down". `bytes_per_s`: 0 is no limit; `loss`: from 0 to 1."""
        cdef DirectionRecord* record = self._direction(host, direction)
        record.bytes_per_s.store(bytes_per_s)
        record.queue_s.store(queue_s)
        record.delay_s.store(delay_s)
        record.loss.store(loss)
        record.seed.store(seed)

    def cut(self, int host, bint is_cut):
        self._host(host).is_cut.store(is_cut)

    def counted(self, int host):
        """What has passed: {"up": {...}, "down": {...}, "late_s": ...}, see src/relay/table.h."""
        return {
            "up": self._counts(host, "up"), "down": self._counts(host, "down"),
            "late_s": self._host(host).late_ns.load() / 1e9,
        }  # fmt: skip

    cdef dict _counts(self, int host, direction):
        cdef DirectionRecord* record = self._direction(host, direction)
        return {
            "packets": record.packets.load(), "bytes": record.bytes.load(),
            "dropped": record.dropped.load(), "lost": record.lost.load(),
        }  # fmt: skip

    cdef HostRecord* _host(self, int host) except NULL:
        if not 0 <= host < self.table.hosts():
            raise IndexError(f"there is no host {host} among {self.table.hosts()}")
        return &self.table[0][host]

    cdef DirectionRecord* _direction(self, int host, direction) except NULL:
        cdef HostRecord* record = self._host(host)
        return &record.up if direction == "up" else &record.down


cdef class Carrier:
    """The relay itself: makes the hosts' cards, and carries what they send until the process ends."""

    cdef Relay* relay

    def __cinit__(self, table, spaces):
        """`table`: the path of its file; `spaces`: those of the hosts' network namespaces, and of its own."""
        cdef vector[string] paths = [os.fsencode(space) for space in spaces]
        self.relay = new Relay(os.fsencode(table), paths)

    def __dealloc__(self):
        del self.relay

    def run(self):
        with nogil:
            self.relay.run()
