"""What the documentation shows is so: its commands run, its example prints what it says, its tables match the code."""

from __future__ import annotations

import re
import shlex
import struct
import sys

import pytest
from pages import LAUNCHERS, block_with, blocks, output_of
from processes import ROOT, Process, clean_environment

from p3 import __version__, cli, settings
from p3.cluster import messages
from p3.cluster.connections import frames
from p3.launch.placement import place, read_hostfile

README = (ROOT / "README.md").read_text(encoding="utf-8")

COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture
def start_shell(tmp_path, processes):
    """start_shell(script, ...) -> Process: in a folder with the README's script for MXNet, as `train_mxnet.py` and as
    the `train.py` of docs/launchers.md, where `p3` and `python` are ours."""
    for name in ("train_mxnet.py", "train.py"):
        (tmp_path / name).write_text(block_with("mx.kv.create", "python"))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, options in (("python", ""), ("p3", "-m p3")):
        program = programs / name
        program.write_text('#!/bin/sh\nexec %s %s "$@"\n' % (shlex.quote(sys.executable), options))
        program.chmod(0o755)

    def start(script, pass_fds=(), **env):
        env = clean_environment(HOME=str(tmp_path), **env)
        env["PATH"] = "%s:%s" % (programs, env["PATH"])
        processes.append(Process(["sh", "-ec", script], env, tmp_path, pass_fds))
        return processes[-1]

    return start


def test_settings_are_as_the_code_describes_them():
    """To bring docs/settings.md up to date: python -m p3.settings"""
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    (tables,) = re.findall(r"^<!-- settings: .* -->\n(.*?)\n<!-- /settings -->$", page, re.M | re.S)
    assert tables == settings.tables()


def test_script_for_mxnet_trains_alone(start_shell):
    finished = start_shell("python train_mxnet.py").wait()
    assert finished.code == 0, finished.err
    assert finished.out.strip() == "worker 0 of 1: [[1. 1. 1. 1.]]"


def test_script_for_mxnet_prints_on_two_workers_what_the_readme_says(start_shell):
    """That for PyTorch: tests/torch/test_examples.py."""
    command = "p3 run -n 2 -s 2 python train_mxnet.py"
    finished = start_shell(command).wait()
    assert finished.code == 0, finished.err
    assert sorted(finished.out.splitlines()) == output_of(command)


def test_commands_for_another_launcher_make_a_job(start_shell, make_cluster):
    make_secret, environment, scheduler, each_host = (
        block_with(text, page=LAUNCHERS)
        for text in ("token_hex", "export DMLC_PS_ROOT_URI", "DMLC_ROLE=scheduler", "DMLC_ROLE=worker")
    )
    listener = make_cluster().listener
    environment = environment.replace("10.0.0.5", "127.0.0.1").replace("9091", str(listener.getsockname()[1]))

    assert start_shell(make_secret).wait().code == 0
    scheduler = scheduler.replace("p3 exec", "p3 exec --listen-fd=%d" % listener.fileno())  # a port that is free
    first = start_shell(environment + scheduler + each_host + "wait", (listener.fileno(),))
    second = start_shell(environment + each_host + "wait")
    finished = [first.wait(), second.wait()]
    assert [one.code for one in finished] == [0, 0], finished
    assert sorted(one.out.strip() for one in finished) == [
        "worker %d of 2: [[1. 1. 1. 1.]]" % rank for rank in range(2)
    ]


def test_hostfile_has_room_for_its_job(tmp_path):
    command = block_with("--hostfile", page=LAUNCHERS).strip()
    program, *arguments = shlex.split(command)
    assert program == "p3"
    options = cli.parser().parse_args(arguments)
    path = tmp_path / options.hostfile
    path.write_text(block_with("# %s\n" % options.hostfile, "", LAUNCHERS))
    tasks = place(options.workers, options.servers, read_hostfile(str(path)))
    assert len({task.host.name for task in tasks}) == 2


def test_every_other_command_names_what_exists():
    makefile = (ROOT / "Makefile").read_text()
    extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    seen = 0
    for line in COMMANDS:
        program, *words = shlex.split(line, comments=True) or [""]
        if program == "make":
            assert re.search(r"^%s:" % words[0], makefile, re.M), line
        elif program == "pip":
            assert re.fullmatch(r"install \.(\[(%s)\])?" % "|".join(extras), " ".join(words)), line
        elif program == "sudo":
            assert words[0] == ".venv/bin/p3" and cli.parser().parse_args(words[1:]), line
        else:
            assert output_of(line), "no test runs: " + line
            continue
        seen += 1
    assert seen == 7


def test_the_readmes_picture_is_there_for_light_and_dark_pages():
    pictures = re.findall(r'src(?:set)?="([^"]+)"', README)
    assert [path[-9:] for path in pictures] == ["-dark.svg", "light.svg"]
    assert all((ROOT / path).is_file() for path in pictures)


def test_wheels_are_named_by_this_version():
    text = (ROOT / "docs" / "wheels.md").read_text(encoding="utf-8")
    assert set(re.findall(r"p3_training-(\d[\d.]*\d)", text)) == {__version__}


def test_drawing_names_files_that_exist():
    drawing = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    ours = {path.name for folder in ("p3", "src") for path in (ROOT / folder).rglob("*") if path.is_file()}
    named = set(re.findall(r"\b\w+\.(?:py|cc)\b", drawing))
    assert named and named <= ours, named - ours


PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


def test_headers_of_the_specification_of_python_and_of_the_core_are_one():
    """The core's: its bytes in the C++ test, which compares them with a header in memory."""
    table = PROTOCOL.partition("## Data plane: encodings")[0]  # the rows' own header has a table further below
    rows = re.findall(r"^\| (\d+) \| (\d) \| (\w+) \| `(\w+)` \|", table, re.M)
    codes = {"u8": "B", "u16": "H", "u32": "I", "i32": "i", "u64": "Q", "f64": "d"}
    assert {field: codes[code] for _, _, code, field in rows} == frames.FIELDS
    offset = 0
    for at, size, code, field in rows:
        assert (int(at), int(size)) == (offset, struct.calcsize(codes[code])), field
        offset += int(size)

    values = {
        "magic": 0x57643350, "version": 8, "kind": 1, "dtype": 2, "encoding": 0, "key": 0x01020304, "slice": 0x0A0B0C0D,
        "round": 417, "priority": -2, "payload_bytes": 200000, "crc32c": 0, "part": 0,
        "of_machine": 1, "contributors": 260, "lr": 1.0, "wd": 0.5, "rescale": 0.25, "updates": 3.0, "schedule": 0.75,
    }  # fmt: skip
    header = frames.HEADER.pack(*(values[field] for field in frames.FIELDS))
    assert frames.round_of(header) == 417
    (dump,) = re.findall(r"^```\n(50 33 .*?)^```$", PROTOCOL, re.M | re.S)
    assert bytes.fromhex("".join(line[:23] for line in dump.splitlines())) == header

    test = (ROOT / "tests" / "cpp" / "wire" / "wire_test.cc").read_text()
    pinned = test.partition("expected = {")[2].partition("};")[0]
    numbers = re.sub(r"//.*", "", pinned).replace("\n", "").split(",")
    assert bytes(int(number, 0) for number in numbers if number.strip()) == header


def _enum(name, header="include/p3/wire.h"):
    header = (ROOT / header).read_text()
    return header.partition("enum class %s " % name)[2].partition("};")[0]


def test_encodings_are_those_of_the_code():
    in_code = re.findall(r"^  (k\w+) = (\d),", _enum("Encoding") + _enum("IdCoding", "src/plan/rows.h"), re.M)
    assert re.findall(r"^\| (\d) \| `(k\w+)` \|", PROTOCOL.partition("## Data plane: encodings")[2], re.M) == [
        (number, name) for name, number in in_code
    ]


def test_frame_kinds_are_those_of_the_code():
    in_code = re.findall(r"^  (k\w+) = (\d+),", _enum("FrameKind"), re.M)
    frames = PROTOCOL.partition("## Data plane: encodings")[0]
    assert re.findall(r"^\| (\d+) \| `(k\w+)` \|", frames, re.M) == [(number, name) for name, number in in_code]


def test_control_messages_are_those_of_the_code():
    ((dump, text),) = re.findall(r"`((?:[0-9a-f]{2} )+[0-9a-f]{2})` is `(\{.*?\})`", PROTOCOL)
    assert messages.encode({"kind": "bye"}) == bytes.fromhex(dump)
    assert bytes.fromhex(dump)[4:].decode() == text
    for kind in messages.FIELDS:
        assert "`%s`" % kind in PROTOCOL, kind
