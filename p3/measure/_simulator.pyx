# distutils: language = c++
"""The simulator of src/simulator/ as plain values: dictionaries and lists with the names of simulator/job.h go in, a
dictionary comes out. p3/measure/simulate/ is its face.

The GIL is released while it runs; calls may run at the same time. ValueError for a job that makes no sense.
"""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector


cdef extern from "simulator/job.h" namespace "p3::simulator" nogil:
    cdef enum class Congestion:
        pass

    cdef enum class Clipping:
        pass

    cdef cppclass LinkSpec:
        double bytes_per_s, burst_bytes, queue_bytes

    cdef cppclass Host:
        LinkSpec up, down

    cdef struct Layer:
        double forward_s, backward_s

    cdef struct Slice:
        int layer, key, server, part_of
        double push_bytes, value_bytes

    cdef cppclass Transport:
        double segment_bytes, packet_payload_bytes, packet_header_bytes, delay_s, ack_bytes
        Congestion congestion
        double loss
        uint64_t seed

    cdef cppclass Sender:
        cbool priorities, pushes_first
        double window_bytes

    cdef cppclass Job:
        vector[Host] hosts
        vector[int] workers, servers
        cbool local_aggregation
        vector[vector[int]] leaders
        vector[Layer] layers
        cbool releases_at_end
        vector[Slice] slices
        Clipping clipping
        double norm_bytes
        vector[vector[double]] factors
        int warmup, traced_iterations
        cbool traces_links
        Transport transport
        Sender sender

    cdef struct LinkUse:
        double bytes, busy_s, mean_queue_s, greatest_queue_s
        uint64_t segments, lost

    cdef struct Span:
        int kind, node, peer, item, round
        double begin_s, end_s

    cdef cppclass Result:
        vector[vector[double]] ends_s, waited_s
        vector[double] waited_to_clip_s
        vector[LinkUse] up, down
        vector[Span] spans
        double window_bytes
        uint64_t events

    Result c_simulate "p3::simulator::simulate"(const Job&) except +
    Result c_simulate_ring "p3::simulator::simulate_ring"(const Job&, double, double) except +


# In the order of simulator/job.h.
CONGESTION = ("none", "cubic", "bbr")
CLIPPING = ("none", "norm", "wait")
SPANS = ("forward", "backward", "wait", "push", "value", "up", "down")
FOR_CLIPPING = -1  # the item of a wait


def simulate(dict job):
    """The Result of `job`, a Job."""
    cdef Job given = _job(job)
    cdef Result result
    with nogil:
        result = c_simulate(given)
    return _as_dict(result)


def simulate_ring(dict job, double bucket_bytes, double first_bucket_bytes):
    """The same for DistributedDataParallel's ring."""
    cdef Job given = _job(job)
    cdef Result result
    with nogil:
        result = c_simulate_ring(given, bucket_bytes, first_bucket_bytes)
    return _as_dict(result)


cdef Job _job(dict given) except *:
    cdef Job job
    cdef Host host
    for up, down in given["hosts"]:
        host.up, host.down = _link(up), _link(down)
        job.hosts.push_back(host)
    job.workers, job.servers = given["workers"], given["servers"]
    job.local_aggregation, job.leaders = given["local_aggregation"], given["leaders"]
    job.layers, job.slices = given["layers"], given["slices"]
    job.releases_at_end = given["releases_at_end"]
    cdef int clipping = CLIPPING.index(given["clipping"])
    job.clipping, job.norm_bytes = <Clipping> clipping, given["norm_bytes"]
    job.factors = given["factors"]
    job.warmup, job.traced_iterations = given["warmup"], given["traced_iterations"]
    job.traces_links = given["traces_links"]

    transport = given["transport"]
    job.transport.segment_bytes = transport["segment_bytes"]
    job.transport.packet_payload_bytes = transport["packet_payload_bytes"]
    job.transport.packet_header_bytes = transport["packet_header_bytes"]
    job.transport.delay_s = transport["delay_s"]
    job.transport.ack_bytes = transport["ack_bytes"]
    cdef int congestion = CONGESTION.index(transport["congestion"])
    job.transport.congestion = <Congestion> congestion
    job.transport.loss, job.transport.seed = transport["loss"], transport["seed"]

    job.sender.priorities, job.sender.pushes_first = given["priorities"], given["pushes_first"]
    job.sender.window_bytes = given["window_bytes"]
    return job


cdef LinkSpec _link(tuple given) except *:
    cdef LinkSpec link
    link.bytes_per_s, link.burst_bytes, link.queue_bytes = given
    return link


cdef dict _as_dict(const Result& result):
    return {
        "ends_s": result.ends_s,
        "waited_s": result.waited_s,
        "waited_to_clip_s": result.waited_to_clip_s,
        "up": result.up,
        "down": result.down,
        "spans": result.spans,
        "window_bytes": result.window_bytes,
        "events": result.events,
    }
