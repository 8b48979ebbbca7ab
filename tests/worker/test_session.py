"""A session with NumPy alone: embedded, and as a worker of a real job."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from processes import clean_environment

from p3.errors import ConfigError
from p3.plan.strategy import Cut, Strategy
from p3.settings import Settings

_core = pytest.importorskip("p3._core", reason="the extension is not built")
session_module = pytest.importorskip("p3.worker.session")
Session = session_module.Session
P3Error = _core.P3Error

SGD = {"name": "sgd", "momentum": 0.0, "clip_gradient": -1.0, "multi_precision": False}


@pytest.fixture
def session():
    with Session.open(Settings()) as opened:
        yield opened


def run_python(text, **settings):
    env = clean_environment(**settings)
    return subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=60)


def test_embedded_it_is_rank_0_of_1(session):
    assert (session.rank, session.num_workers, session.num_servers) == (0, 1, 1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "uint8", "int8", "int64"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 40000)])
def test_without_an_optimizer_the_sum_lands(session, dtype, shape):
    key, landing = session.declare("w", shape, dtype), np.full(shape, 9, dtype)
    session.init(key, np.full(shape, 5, dtype), landing).wait(30)
    assert (landing == 5).all()
    session.pushpull(key, np.full(shape, 3, dtype), landing).wait(30)
    assert (landing == 3).all()


def test_the_optimizer_runs_on_the_server(session):
    session.set_optimizer(0, SGD)
    key, landing = session.declare("w", (2,), np.float32), np.zeros(2, np.float32)
    session.init(key, np.float32([1, 2]), landing).wait(30)
    session.pushpull(key, np.float32([1, 1]), landing, lr=0.5).wait(30)
    assert landing.tolist() == [0.5, 1.5]


def test_stores_are_numbered_and_have_their_own_keys_and_optimizers(session):
    assert [session.new_store() for _ in range(3)] == [0, 1, 2]
    session.set_optimizer(1, SGD)
    landings = []
    for store in (0, 1):
        key, landing = session.declare("w", (1,), "float32", store), np.zeros(1, np.float32)
        session.init(key, np.float32([1]), landing).wait(30)
        session.pushpull(key, np.float32([2]), landing, lr=0.25).wait(30)
        landings.append(landing[0])
    assert landings == [2.0, 0.5]


def test_a_key_declared_again_is_the_same_key(session):
    key = session.declare("w", [2, 3], np.float32)
    assert session.declare("w", (2, 3), np.dtype("float32")) is key
    assert (key.name, key.shape, key.dtype, key.store) == ("w", (2, 3), "float32", 0)


@pytest.mark.parametrize("shape, dtype", [((3, 2), "float32"), ((2, 3), "float64")])
def test_a_key_declared_otherwise_names_both(session, shape, dtype):
    session.declare("w", (2, 3), "float32")
    with pytest.raises(ValueError) as caught:
        session.declare("w", shape, dtype)
    text = "key 'w' was declared with shape (2, 3) and type float32; it cannot become %s and %s" % (shape, dtype)
    assert text in str(caught.value)
    session.check()  # the job goes on


def test_a_key_has_options_of_its_own_in_place_of_its_stores(session):
    session.set_option(0, "compression", {"type": "int8"})
    own = {"compression": {"type": "bf16"}, "value_compression": {"type": "int8"}}
    of_store, of_key = session.declare("v", (2, 3), "float32"), session.declare("w", (2, 3), "float32", options=own)
    whole = session.declare("x", (2, 3), "float32", options={"compression": None})
    assert [(one.axes.codec, one.axes.value_codec) for one in (of_store, of_key, whole)] == [
        ({"type": "int8"}, {}), ({"type": "bf16"}, {"type": "int8"}), ({}, {})
    ]  # fmt: skip
    assert session.declare("w", (2, 3), "float32", options=own) is of_key
    with pytest.raises(ValueError, match="key 'w' was declared with the options .*'bf16'.*; they cannot become {}"):
        session.declare("w", (2, 3), "float32")
    sums = []
    for key in (of_store, of_key, whole):
        landing = np.zeros(key.shape, np.float32)
        session.init(key, landing.copy(), landing).wait(30)
        session.pushpull(key, np.full(key.shape, 0.5, np.float32), landing).wait(30)
        sums.append(landing[0, 0])
    as_int8 = np.float32(0.49996948)  # 127 scales, of which each is a bfloat16
    assert sums == [as_int8, as_int8, 0.5]


def test_norms_come_before_other_keys_and_settle_no_option(session):
    norm = session.declare_norm(2)
    session.set_option(2, "reduction", {"type": "mean"})
    session.declare("w", (2, 3), "float32", 2)
    assert session.declare_norm(2) is norm
    session.declare("w", (2, 3), "float32", 3)
    with pytest.raises(ValueError, match="store 3 has keys already; the one of norms is declared before them"):
        session.declare_norm(3)
    with pytest.raises(ValueError, match="store 2 has keys already; its compression"):
        session.set_option(2, "compression", {"type": "fp16"})


def test_that_a_key_is_compressed_is_said_once_for_each_way_of_a_store(session, caplog):
    int8 = {"compression": {"type": "int8"}}
    both = {"compression": {"type": "bf16"}, "value_compression": {"type": "int8"}}
    for store in (0, 1):
        for name, shape, options in (
            ("v", (2, 3), int8), ("w", (2, 3), int8), ("x", (2, 3), both), ("plain", (2, 3), {"compression": None}),
            ("bias", (3,), {"value_compression": {"type": "int8"}}), ("none", (2, 3), None),
        ):  # fmt: skip
            session.declare(name, shape, "float32", store, options=options)
    said = [record.getMessage().split(": ", 1)[1] for record in caplog.records if record.levelname == "WARNING"]
    lossy = "is compressed, {'type': '%s'}. That is lossy: training differs from uncompressed"
    assert said == [
        text % store + " " + lossy % codec
        for store in (0, 1)
        for text, codec in (
            ("key 'v' of store %d, and others so,", "int8"), ("key 'x' of store %d, and others so,", "bf16"),
            ("what comes back of key 'x' of store %d, and others so,", "int8"),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("options, said", [
    ({"compression": {"type": "int9"}}, "key 'w': compression: type is 'int9'; it must be one of"),
    ({"optimizer": {"name": "sgd"}}, "key 'w': option 'optimizer' is of stores; a key has compression, value_compr"),
    ({"compression": {"type": "dgc", "ratio": 0.1, "warmup_steps": 0, "clip_norm": 0.0, "masking": True},
      "value_compression": {"type": "int8"}}, "key 'w': compression of what comes back .* and dgc exclude each other"),
    ({"compression": "int8"}, "worker 0.*: key 'w': compression: the value must be a dict like {.*}, not 'int8'"),
    ({"value_compression": 0}, "key 'w': value_compression: the value must be a dict like {'type': .*}, not 0"),
    ("int8", r"key 'w': options is 'int8'; it must be a dict, by name, as {'compression': {'type': 'int8'}}"),
])  # fmt: skip
def test_options_that_a_key_cannot_have_are_refused_by_its_name(session, options, said):
    with pytest.raises(ValueError, match=said):
        session.declare("w", (2, 3), "float32", options=options)
    session.declare("w", (2, 3), "float32")


def test_1_and_one_are_different_keys(session):
    assert session.declare(1, (2,), "float32").handle != session.declare("1", (3,), "float32").handle
    assert session.declare(np.int64(1), (2,), "float32").name == 1


@pytest.mark.parametrize("dtype", ["bool", "complex64", np.uint16, None])
def test_other_types_are_refused(session, dtype):
    with pytest.raises(ValueError, match="cannot be synchronised"):
        session.declare("w", (1,), dtype)


@pytest.mark.parametrize("reduction", ["average", "mean"])
def test_integers_cannot_be_averaged(session, reduction):
    session.set_option(0, "reduction", {"type": reduction})
    with pytest.raises(ValueError, match=r"'w': a type of whole numbers \(int32\) .* Put the key into another store"):
        session.declare("w", (1,), "int32")
    session.declare("w", (1,), "int32", 1)
    session.declare("v", (1,), "bfloat16")


def test_a_negative_length_is_refused(session):
    with pytest.raises(ValueError, match="negative length"):
        session.declare("w", (2, -1), "float32")


def test_an_array_of_another_size_is_refused_and_nothing_is_written(session):
    key, landing = session.declare("w", (4,), "float32"), np.full(4, 7, np.float32)
    said = r"key 'w': the value has shape \(3,\) and type float32; it must have \(4,\) and float32"
    with pytest.raises(ValueError, match=said):
        session.init(key, np.zeros(3, np.float32), landing)
    assert (landing == 7).all()


@pytest.mark.parametrize("gradient, said", [
    (np.ones((2, 3), "int32"), r"key 'w': the gradient has shape \(2, 3\) and type int32; it must have \(2, 3\) and f"),
    (np.ones((2, 3), ">f4"), r"the gradient has shape \(2, 3\) and type >f4; it must have"),
    (np.ones(3), r"the gradient has shape \(3,\) and type float64; it must have"),
    (np.ones((3, 2), "float32"), r"the gradient has shape \(3, 2\) and type float32; it must have \(2, 3\)"),
    (memoryview(np.ones((2, 3), "int32")), "the gradient has shape .* and type int32; it must have"),
])  # fmt: skip
def test_an_array_that_has_the_bytes_of_another_is_refused(session, gradient, said):
    key, landing = session.declare("w", (2, 3), "float32"), np.full((2, 3), 7, "float32")
    session.init(key, landing.copy(), landing).wait(30)
    with pytest.raises(ValueError, match=said):
        session.pushpull(key, gradient, landing)
    if gradient.nbytes == landing.nbytes:
        with pytest.raises(ValueError, match=said.replace("gradient", "landing array")):
            session.skip(key, gradient)
    assert (landing == 7).all()
    for same in (np.float32([1, 2, 3, 4, 5, 6]), np.float32([[[1, 2, 3]], [[4, 5, 6]]]), memoryview(landing.copy())):
        session.pushpull(key, same, landing).wait(30)
        assert landing.tobytes() == same.tobytes()
    session.pushpull(key, landing, landing).wait(30)


def test_rows_that_have_the_bytes_of_others_are_refused(session):
    key, landing = session.declare("w", (5, 2), "float32", sparse=True), np.zeros((5, 2), "float32")
    session.init(key, landing.copy(), landing).wait(30)
    with pytest.raises(ValueError, match=r"the array of rows has shape \(1, 2\) and type int32; it must have"):
        session.pushpull(key, (np.int64([3]), np.ones((1, 2), "int32")), landing)


def test_a_failure_names_its_worker_once():
    with Session.open(Settings()) as opened:
        opened.fail("the script ended with ValueError: %s: key 'w' is gone" % opened.label)
        text = str(opened.core.error)
    assert text == "worker 0 (this process): the script ended with ValueError: key 'w' is gone"


def test_an_option_cannot_be_exchanged(session):
    half = dict(SGD, momentum=0.5)
    assert session.option(0, "optimizer") is None
    session.set_option(0, "optimizer", half)
    session.declare("w", (1,), "float32")
    session.set_option(0, "optimizer", half)  # the same again
    with pytest.raises(ValueError) as caught:
        session.set_optimizer(0, SGD)
    assert str(caught.value) == (
        "worker 0 (this process): store 0 has the optimizer %s already; it cannot become %s: make a new store"
        % (half, SGD)
    )
    assert (session.option(0, "optimizer"), session.option(1, "optimizer")) == (half, None)


@pytest.mark.parametrize("description", [{}, {"name": "gradient ascent"}, dict(SGD, momentum="much"), "sgd", None])
def test_an_option_that_makes_no_sense_is_refused(session, description):
    with pytest.raises(ValueError, match="optimizer"):
        session.set_optimizer(0, description)
    assert session.option(0, "optimizer") is None
    session.set_optimizer(0, SGD)  # and leaves no trace


@pytest.mark.parametrize("name, value", [("compression", {"type": "fp16"}), ("reduction", {"type": "average"})])
def test_what_the_first_key_settles_cannot_be_set_after_it(session, name, value):
    session.declare("w", (1,), "float32", store=1)
    with pytest.raises(ValueError, match="store 1 has keys already; its %s .* before the first init" % name):
        session.set_option(1, name, value)
    assert session.option(1, name) is None
    session.set_optimizer(1, SGD)  # an optimizer may come later
    session.check()


def test_a_strategy_comes_before_a_stores_first_key_and_stays(session):
    given = Strategy(Cut(slice=4))
    store = session.new_store(given)
    session.set_strategy(store, given._replace(path="elsewhere"))  # the same again
    with pytest.raises(ValueError, match="store 0 has the strategy .* already; it cannot become"):
        session.set_strategy(store, Strategy())
    with pytest.raises(ConfigError, match="the strategy s.json: server 1 is named, but the job has 1 server"):
        session.set_strategy(1, Strategy(Cut((1,)), path="s.json"))
    with pytest.raises(ValueError, match="option 'strategy' is unknown"):
        session.set_option(1, "strategy", {"sha256": given.sha256})
    session.set_strategy(2, None)
    key, _ = session.declare("w", (10,), "float32", store), session.declare("w", (10,), "float32", 2)
    assert session.keys.wait_for(key).plan.slice_elements == 4
    with pytest.raises(ValueError, match="store 2 has keys already; its strategy .* must be set before the first init"):
        session.set_strategy(2, given)
    landing = np.zeros(10, np.float32)
    session.init(key, landing.copy(), landing).wait(30)
    session.release(store)
    assert session.new_store() == store
    assert session.keys.wait_for(session.declare("w", (10,), "float32", store)).plan.slice_elements == 50000


def test_a_strategy_that_no_message_holds_goes_another_way(session):
    many = {"%06d" % number + "x" * 40: Cut(slice=1) for number in range(70_000)}
    with pytest.raises(ValueError, match="the strategy s.json of store 0 has more than 4 MiB: give it by P3_STRATEGY"):
        session.set_strategy(0, Strategy(keys=many, path="s.json"))


@pytest.mark.parametrize("sparse", [False, True])
def test_the_first_push_settles_the_optimizer(session, sparse):
    key, landing = session.declare("w", (1,), "float32", store=1, sparse=sparse), np.zeros(1, np.float32)
    gradient = np.ones(1, np.float32)
    if sparse:
        session.init(key, gradient, landing).wait(30)
        session.pushpull(key, (np.zeros(1, np.int64), gradient), landing).wait(30)
    else:
        session.init(key, gradient, landing).wait(30)
        session.pushpull(key, gradient, landing).wait(30)
    with pytest.raises(ValueError, match="gradients were pushed to store 1 already; set its optimizer .* first push"):
        session.set_optimizer(1, SGD)
    assert session.option(1, "optimizer") is None
    session.set_optimizer(2, SGD)  # another store's is no matter of these pushes
    session.check()


@pytest.mark.parametrize("name, value", [("compression", {"type": "fp16"}), ("reduction", {"type": "average"})])
def test_an_option_of_a_store_is_no_matter_of_another_stores_keys(session, name, value):
    session.declare("w", (1,), "float32", store=1)
    session.set_option(2, name, value)
    session.declare("w", (1,), "float32", store=2)
    session.set_option(2, name, value)
    assert (session.option(1, name), session.option(2, name)) == (None, value)
    session.check()


def test_the_servers_counters_tell_what_they_did(session):
    (before,) = session.server_counters()
    key, landing = session.declare("w", (1000,), "float32"), np.zeros(1000, np.float32)
    session.init(key, np.ones(1000, np.float32), landing).wait(30)
    session.pushpull(key, np.ones(1000, np.float32), landing).wait(30)
    (after,) = session.server_counters()
    assert after["label"] == "server 0 (this process)"
    assert after["bytes_received"] - before["bytes_received"] >= 8000  # the first value, a gradient
    assert after["cpu_s"] >= before["cpu_s"] > 0
    assert after.keys() == before.keys() > session.counters().keys() - {"local"}


def test_a_released_store_leaves_nothing_and_its_number_is_the_next_stores(session):
    first, other = session.new_store(), session.new_store()
    session.declare("w", (2,), "float32", other)
    for life in range(3):
        session.set_optimizer(first, SGD)
        key = session.declare("w", (3 + life,), "float32", first)
        rows = session.declare("rows", (4, 2), "float32", first, sparse=True)
        landing, of_rows = np.ones(3 + life, np.float32), np.ones((4, 2), np.float32)
        session.wait([session.init(key, landing, landing), session.init(rows, of_rows, of_rows)])
        session.wait([session.pushpull(key, landing.copy(), landing, lr=0.5)])
        assert landing.tolist() == [0.5] * (3 + life)
        session.orders.announce(first, ["w"])
        session.repartition(rows, 3)  # no round will begin it
        assert [counters["keys"] for counters in session.server_counters()] == [4]
        session.release(first)
        assert [(counters["keys"], counters["value_bytes"]) for counters in session.server_counters()] == [(1, 8)]
        assert session.orders.of(first) == [] and session.option(first, "optimizer") is None
        with pytest.raises(ValueError, match="key 'w' is gone: its store 0 was released"):
            session.pushpull(key, landing, landing)
        with pytest.raises(ValueError, match="there is no key with handle"):
            session.init(key, landing, landing)
        assert session.new_store() == first
    session.release(other)
    session.release(first)
    assert (session.new_store(), session.new_store(), session.new_store()) == (first, other, other + 1)


def test_a_store_with_an_operation_under_way_is_not_released(session):
    key = session.declare("w", (3,), "float32")
    gradient = np.ones(3, np.float32)
    session.wait([session.init(key, gradient, gradient)])
    pending = session.pushpull(key, gradient, np.empty_like(gradient), gated=True)
    with pytest.raises(ValueError, match="store 0 cannot be released: key 'w' has operations under way"):
        session.release(0)
    session.ready(key, 3)
    session.wait([pending])
    session.release(0)


def test_an_order_arrives_with_a_new_version(session):
    before = session.orders.version
    session.orders.announce(3, ["b", 1, "a"])
    assert session.orders.version > before
    assert (session.orders.of(3), session.orders.of(0)) == (["b", 1, "a"], [])


def test_a_barrier_of_one_opens(session):
    for _ in range(3):
        session.barrier()


def test_nan_is_passed_on(session):
    key, landing = session.declare("w", (2,), "float32"), np.zeros(2, np.float32)
    session.init(key, np.float32([np.nan, 1]), landing).wait(30)
    session.pushpull(key, np.float32([1, np.nan]), landing).wait(30)
    assert landing[0] == 1 and np.isnan(landing[1])


def test_after_a_failure_every_call_raises_the_first_error():
    session = Session.open(Settings())
    key, landing = session.declare("w", (2,), "float32"), np.zeros(2, np.float32)
    session.fail("the disk is full")
    session.fail("a consequence")
    for call in (
        session.check,
        session.barrier,
        lambda: session.declare("v", (1,), "float32"),
        lambda: session.init(key, landing, landing.copy()),
        lambda: session.pushpull(key, landing, landing.copy()),
        lambda: session.set_optimizer(0, SGD),
        session.server_counters,
        lambda: session.orders.announce(0, []),
    ):
        with pytest.raises(P3Error, match=r"^worker 0 \(this process\): the disk is full$"):
            call()
    session.close()


def test_a_closed_session_says_so():
    session = Session.open(Settings())
    session.close()
    session.close()
    with pytest.raises(P3Error, match="the session was closed"):
        session.barrier()
    assert session.counters()["rounds"] == 0


def test_close_waits_for_what_is_pending():
    session = Session.open(Settings())
    key, landing = session.declare("w", (1000000,), "float32"), np.zeros(1000000, np.float32)
    operations = [session.init(key, np.ones(1000000, np.float32), landing)]
    operations += [session.pushpull(key, np.full(1000000, turn, np.float32), landing) for turn in range(5)]
    session.close()
    assert all(operation.done for operation in operations) and (landing == 4).all()


def test_a_forked_child_gets_an_error_and_the_parent_goes_on(session):
    """From every call, and from what was under way; nothing waits, and nothing ends the child."""
    key, landing = session.declare("w", (2,), "float32"), np.zeros(2, np.float32)
    ids, row = np.zeros(1, np.int64), np.ones((1, 2), np.float32)
    session.init(key, np.float32([1, 2]), landing).wait(30)
    pending = session.pushpull(key, np.float32([3, 3]), landing, gated=True)
    core, server = session.core, session._link._server
    calls = {
        "check": session.check,
        "barrier": session.barrier,
        "declare": lambda: session.declare("v", (2,), "float32"),
        "init": lambda: session.init(key, landing, landing),
        "pushpull": lambda: session.pushpull(key, landing, landing),
        "skip": lambda: session.skip(key, landing),
        "flush": session.flush,
        "ready": lambda: session.ready(key, 2),
        "fetch": lambda: session.fetch(key, landing, 1),
        "store": lambda: session.store(key, landing, 1),
        "fetch of rows": lambda: session.fetch(key, row, ids=ids),
        "snapshot": lambda: session.snapshot(1, [key]),
        "counters": session.counters,
        "key_counters": lambda: session.key_counters(key),
        "server_counters": session.server_counters,
        "wait": lambda: session.wait([pending]),
        "wait of a list of none": lambda: pending.wait(0),
        "core.counters": core.counters,
        "core.flush": core.flush,
        "core.declare": lambda: core.declare("v", 2, 0),
        "core.event_fd": lambda: core.event_fd,
        "core.late": core.late,
        "server.counters": server.counters,
        "server.drop": lambda: server.drop(0),
    }
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        try:
            signal.alarm(60)
            for name, call in calls.items():
                try:
                    call()
                    text = "no error"
                except P3Error as error:
                    text = str(error)
                except BaseException as error:
                    text = repr(error)
                os.write(write_end, ("%s: %s|" % (name, text)).encode())
            session.close()
            core.fail("nobody hears it")
            core.close(1.0)
            os.write(write_end, ("%s, %s|" % (pending.done, core.error)).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    session.ready(key, 2)  # or closing would wait for it
    pending.wait(30)
    assert landing.tolist() == [3, 3]
    with os.fdopen(read_end) as pipe:
        *said, last = pipe.read().split("|")[:-1] or [""]
    assert os.waitpid(child, 0)[1] == 0
    assert len(said) == len(calls), said
    assert [text for text in said if "was forked" not in text or "in the parent only" not in text] == []
    assert last.startswith("False, worker 0 (this process): this process was forked"), last


def test_it_is_closed_when_the_script_ends():
    text = "from p3.worker import session as s; a = s.current(); print(s.current() is a)"
    finished = run_python(text)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "True\n", "")


def test_with_dmlc_variables_but_no_role_it_does_not_run_embedded():
    finished = run_python("import p3.worker.session as s; s.current()", DMLC_NUM_WORKER="2")
    assert finished.returncode == 1 and "DMLC_ROLE is not set" in finished.stderr


def test_only_a_worker_opens_a_session():
    with pytest.raises(ConfigError, match="DMLC_ROLE=server: only a worker opens a session"):
        Session.open(Settings(role="server"))


def test_workers_meet_and_sum_in_a_real_job(run_job):
    finished = run_job(
        """
        import threading
        import numpy as np
        from p3.worker.session import Session

        with Session.open() as session:
            rank, n = session.rank, session.num_workers
            names = [7, "7", "conv", "dense"]
            for name in names if rank % 2 else names[::-1]:  # workers declare in different orders
                session.declare(name, (1000, 77), "float64")
            keys = {name: session.declare(name, (1000, 77), "float64") for name in names}
            landings = {name: np.zeros((1000, 77)) for name in names}
            for i, name in enumerate(names):
                value = np.full((1000, 77), float(i)) if rank == 0 else None
                session.init(keys[name], value, landings[name])
            session.barrier()
            for turn in range(4):
                gradient = {name: np.full((1000, 77), 10.0 * i + rank + turn) for i, name in enumerate(names)}
                operations = []
                for i, name in enumerate(names):
                    operations.append(session.pushpull(keys[name], gradient[name], landings[name], priority=-i))
                for operation in operations:
                    operation.wait(30)
                for i, name in enumerate(names):
                    assert (landings[name] == n * (10.0 * i + turn) + sum(range(n))).all(), (name, landings[name])
            session.orders.announce(0, ["conv", 7] if rank == 0 else ["not mine"])
            session.barrier()
            assert session.orders.of(0) == ["conv", 7], session.orders.of(0)
            # Several threads may call at once.
            threads = [threading.Thread(target=session.declare, args=(i, (i,), "int32")) for i in range(100, 120)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            session.barrier()
            print("fine")
        """,
        workers=3,
        servers=2,
    )
    assert finished.code == 0, finished
    assert sorted(finished.out.splitlines()) == ["[worker %d] fine" % rank for rank in range(3)]


def test_a_barrier_has_a_deadline(run_job, tmp_path):
    os.mkfifo(str(tmp_path / "gate"))
    finished = run_job(
        """
        from p3.worker.session import Session
        session = Session.open()
        if session.rank == 0:
            session.wait_timeout_s = 0.2
            try:
                session.barrier()
            except TimeoutError as error:
                print(error)
            session.wait_timeout_s = 60
            open("gate", "w").close()
        else:
            open("gate").read()  # returns when worker 0 has given up
            session.barrier()
        """
    )
    assert finished.out == (
        "[worker 0] worker 0 (127.0.0.1): waited 0.2 s in barrier() (barrier 1) for other workers: each must call it, "
        "at the same point of its program\n"
    ), finished
    assert finished.code == 0


def test_every_worker_reads_the_servers_counters_while_it_trains(run_job):
    finished = run_job(
        """
        import threading
        import numpy as np
        from p3.worker.session import Session

        with Session.open() as session:
            key, landing = session.declare("w", (200, 1000), "float32"), np.zeros((200, 1000), np.float32)
            session.init(key, landing if session.rank == 0 else None, landing.copy()).wait(30)
            seen = []

            def count():
                for _ in range(10):
                    seen.append(session.server_counters())

            threads = [threading.Thread(target=count) for _ in range(2)]
            for thread in threads: thread.start()
            for turn in range(10):
                session.pushpull(key, np.ones_like(landing), landing).wait(30)
            for thread in threads: thread.join()
            last = session.server_counters()
            assert len(seen) == 20, "a thread died"
            for servers in seen + [last]:
                assert [server["label"] for server in servers] == ["server 0 (127.0.0.1)", "server 1 (127.0.0.1)"]
            for rank in range(2):
                # Half of the 4 slices, once for the 2 workers of this machine, in 10 rounds.
                assert last[rank]["bytes_received"] >= 2 * 200000 * 10, last
                assert all(0 < servers[rank]["cpu_s"] <= last[rank]["cpu_s"] for servers in seen)
            session.barrier()
            print("fine")
        """,
        workers=2,
        servers=2,
    )
    assert finished.code == 0, finished
    assert sorted(finished.out.splitlines()) == ["[worker 0] fine", "[worker 1] fine"]


def test_counters_of_a_server_that_does_not_answer_have_a_deadline(make_cluster, tmp_path):
    # A long time-out keeps the job alive; the server is frozen until the worker has given up.
    cluster = make_cluster(1, 1)
    cluster.start("scheduler", P3_TIMEOUT_S="50")
    server = cluster.start("server", P3_TIMEOUT_S="50")
    worker = cluster.start(
        "worker",
        """
        from p3.worker.session import Session
        with Session.open() as session:
            print("open", flush=True)
            open("frozen").read()
            session.wait_timeout_s = 0.2
            try:
                session.server_counters()
            except TimeoutError as error:
                print(error, flush=True)
            session.wait_timeout_s = 60
            open("thawed").read()
            print(session.server_counters()[0]["label"])
        """,
        P3_TIMEOUT_S="50",
    )
    for gate in ("frozen", "thawed"):
        os.mkfifo(str(tmp_path / gate))
    assert worker.read_line() == "open"
    server.signal(signal.SIGSTOP)
    open(str(tmp_path / "frozen"), "w").close()
    said = worker.read_line()
    server.signal(signal.SIGCONT)
    open(str(tmp_path / "thawed"), "w").close()
    assert said == "worker 0 (127.0.0.1): waited 0.2 s for the counters of the servers"
    finished = worker.wait(60)
    assert (finished.code, finished.out) == (0, "server 0 (127.0.0.1)\n"), finished


def test_a_forked_child_of_a_real_worker_does_not_disturb_the_job(run_job):
    finished = run_job(
        """
        import os
        import numpy as np
        from p3.worker.session import P3Error, Session
        session = Session.open()
        key, landing = session.declare("w", (5,), "float32"), np.zeros(5, np.float32)
        session.init(key, landing if session.rank == 0 else None, landing.copy()).wait(30)
        child = os.fork()
        if child == 0:
            try:
                session.barrier()
            except P3Error as error:
                print(error)
                raise SystemExit(0)  # runs the handlers of atexit, too
            raise SystemExit(1)
        assert os.waitpid(child, 0)[1] == 0
        session.pushpull(key, np.ones(5, np.float32), landing).wait(30)
        print("sum", landing[0])
        """
    )
    assert finished.code == 0, finished
    lines = finished.out.splitlines()
    assert sum("this process was forked from a worker" in line for line in lines) == 2
    assert sorted(line for line in lines if "sum" in line) == ["[worker 0] sum 2.0", "[worker 1] sum 2.0"]


def test_the_with_statement_reports_an_exception_that_is_caught_outside(run_job):
    finished = run_job(
        """
        from p3.worker.session import Session
        try:
            with Session.open() as session:
                if session.rank == 1:
                    raise KeyError("lost")
                session.barrier()
        except KeyError:
            pass
        """
    )
    assert finished.code != 0
    assert "worker 1 (127.0.0.1): the script ended with KeyError: 'lost'" in finished.err.splitlines()[-1]


def test_the_child_of_a_fork_of_an_embedded_session_ends_in_order():
    finished = run_python(
        """
        import os, sys
        from p3.worker.session import current
        session = current()
        child = os.fork()
        if child == 0:
            sys.exit(0)  # tears everything down, the abandoned server too
        print("child:", os.waitpid(child, 0)[1])
        session.set_optimizer(0, %r)
        """.replace("\n        ", "\n")
        % SGD
    )
    assert (finished.returncode, finished.stdout) == (0, "child: 0\n"), finished
