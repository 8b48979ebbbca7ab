"""What sets a machine up before anything is built: tools/fetch and tools/needs."""

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile

import pytest

from processes import ROOT, is_running, wait_until

loader = importlib.machinery.SourceFileLoader("fetch", str(ROOT / "tools" / "fetch"))
fetch = importlib.util.module_from_spec(importlib.util.spec_from_loader("fetch", loader))
loader.exec_module(fetch)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def sources(tmp_path):
    """Two addresses: one with the right bytes b'right', one with others."""
    for name in ("right", "wrong"):
        (tmp_path / name).write_bytes(name.encode())
    return (tmp_path / "right").as_uri(), (tmp_path / "wrong").as_uri()


def test_the_first_source_with_the_right_bytes_is_taken(tmp_path, sources):
    right, wrong = sources
    order = ["http://127.0.0.1:1/refused", (tmp_path / "missing").as_uri(), wrong, right]
    path = fetch.fetch(tmp_path / "to", "file", sha256(b"right"), None, order)
    assert path.read_bytes() == b"right" and os.listdir(tmp_path / "to") == ["file"]


def test_where_no_source_has_the_right_bytes_each_is_named_and_nothing_is_left(tmp_path, sources):
    _, wrong = sources
    order = ["http://127.0.0.1:1/refused", wrong]
    with pytest.raises(fetch.NotFetched) as caught:
        fetch.fetch(tmp_path / "to", "file", sha256(b"right"), None, order)
    first, second = str(caught.value).splitlines()
    assert first.startswith("http://127.0.0.1:1/refused: ") and "refused" in first[len(order[0]) :]
    assert second == "%s: its SHA-256 is %s and should be %s" % (wrong, sha256(b"wrong"), sha256(b"right"))
    assert os.listdir(tmp_path / "to") == []


def test_what_is_there_is_used_and_what_is_damaged_is_fetched_again(tmp_path, sources):
    right, wrong = sources
    (tmp_path / "file").write_bytes(b"right")
    assert fetch.fetch(tmp_path, "file", sha256(b"right"), None, []).read_bytes() == b"right"
    (tmp_path / "file").write_bytes(b"damaged")
    with pytest.raises(fetch.NotFetched):
        fetch.fetch(tmp_path, "file", sha256(b"right"), None, [wrong])
    assert fetch.fetch(tmp_path, "file", sha256(b"right"), None, [right]).read_bytes() == b"right"


def test_an_archive_is_unpacked(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("content")
    with tarfile.open(str(tmp_path / "archive.tgz"), "w:gz") as archive:
        archive.add(str(tmp_path / "folder"), "folder")
    data = (tmp_path / "archive.tgz").read_bytes()
    for _ in range(2):  # the second time all is there
        path = fetch.fetch(tmp_path / "to", "a.tgz", sha256(data), "folder", [(tmp_path / "archive.tgz").as_uri()])
        assert path == tmp_path / "to" / "folder" and (path / "file").read_text() == "content"
    assert sorted(os.listdir(tmp_path / "to")) == ["a.tgz", "folder"]


@pytest.mark.parametrize("name", fetch.KNOWN)
def test_what_set_up_fetches_is_pinned(name):
    _, checksum, _, addresses = fetch.KNOWN[name]
    assert len(bytes.fromhex(checksum)) == 32 and addresses


class Machine:
    """tools/needs on a machine of our making: stand-ins are its compiler, its downloads and its packages."""

    def __init__(self, folder):
        self.folder = folder
        shutil.copytree(str(ROOT / "tools"), str(folder / "tools"))
        (folder / "bin").mkdir()
        self.stand_in("bin/id", "echo 1000")
        self.stand_in("bin/c++", "exit 0")
        self.stand_in("tools/fetch", "echo fetched >> %s/fetched; exit 0" % folder)

    def stand_in(self, path, script):
        (self.folder / path).write_text("#!/bin/sh\n%s\n" % script)
        (self.folder / path).chmod(0o755)

    def needs(self, what, python=None, **variables):
        env = {**{name: value for name, value in os.environ.items() if name != "CXX"}, **variables}
        env["PATH"] = "%s:%s" % (self.folder / "bin", env["PATH"])
        command = [str(self.folder / "tools" / "needs"), what, python or self.python()]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    def python(self, lacks=""):
        """Our Python; without its headers, or without pip, if told so."""
        changes = "import sys, sysconfig; sys.modules['ensurepip'] = %s" % ("None" if lacks == "pip" else "sys")
        if lacks == "headers":
            changes += "; sysconfig.get_path = lambda name: '/nowhere'"
        # The files that tools/needs gives to it are stand-ins of ours: shell scripts.
        self.stand_in("python", """
            case $1 in -c) shift; code=$1; shift; exec %s -c "%s
$code" "$@";; *) exec "$@";; esac""" % (sys.executable, changes))  # fmt: skip
        return str(self.folder / "python")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_where_all_is_there_the_python_to_use_is_printed(machine):
    found = machine.needs("test")
    assert (found.returncode, found.stdout, found.stderr) == (0, machine.python() + "\n", "")
    assert not (machine.folder / "fetched").exists()


def test_a_compiler_may_be_named_with_what_starts_it(machine):
    machine.stand_in("bin/c++", "exit 1")
    machine.stand_in("bin/other", "exit 0")
    machine.stand_in("bin/starts", 'exec "$@"')
    assert machine.needs("build", CXX="starts other").returncode == 0


@pytest.mark.skipif(not os.path.exists("/usr/include/gtest/gtest.h"), reason="needs a package: libgtest-dev")
def test_a_package_that_is_there_is_seen_and_nothing_is_fetched(machine):
    (machine.folder / "bin" / "c++").unlink()
    assert machine.needs("test").returncode == 0
    assert not (machine.folder / "fetched").exists()


def test_what_packages_have_not_brought_is_fetched(machine):
    machine.stand_in("bin/c++", "case $* in *gtest*) exit 1; esac")
    assert machine.needs("test").returncode == 0
    assert (machine.folder / "fetched").read_text().splitlines() == ["fetched"]


def test_a_python_without_pip_is_named_with_its_package(machine):
    found = machine.needs("build", machine.python("pip"))
    version = "%d.%d" % sys.version_info[:2]
    assert found.returncode == 1 and "  the venv module of Python %s, with pip\n" % version in found.stderr
    assert "sudo apt-get install python%s-venv " % version in found.stderr


def test_all_that_is_missing_is_named_at_once_with_its_command(machine):
    machine.stand_in("bin/c++", "exit 1")
    machine.stand_in("tools/fetch", "echo http://a: unreachable >&2; echo http://b: unreachable >&2; exit 1")
    found = machine.needs("test", machine.python("headers"))
    version = "%d.%d" % sys.version_info[:2]
    assert found.returncode == 1 and found.stdout == ""
    missing = "  the headers of Python %s\n  a C++17 compiler\n  GoogleTest; could not be fetched:\n"
    assert missing % version in found.stderr
    assert "      http://a: unreachable\n      http://b: unreachable\n" in found.stderr
    assert "sudo apt-get install python%s-dev g++ libgtest-dev " % version in found.stderr


def test_a_build_needs_no_googletest(machine):
    machine.stand_in("bin/c++", "case $* in *gtest*) exit 1; esac")
    assert machine.needs("build").returncode == 0
    assert not (machine.folder / "fetched").exists()


def test_a_python_that_does_not_suit_is_named_and_replaced_by_no_other(machine):
    machine.stand_in("bin/id", "echo 0")
    machine.stand_in("bin/apt-get", "echo $* >> %s/installed" % machine.folder)
    found = machine.needs("build", "/bin/false")
    assert found.returncode == 1 and "Python 3.8 or later" in found.stderr
    assert "/bin/false is none" in found.stderr and not (machine.folder / "installed").exists()


@pytest.mark.parametrize("succeeds", [True, False])
def test_root_installs_what_is_missing_if_it_can(machine, succeeds):
    has_compiler, said = machine.folder / "compiler", machine.folder / "installed"
    machine.stand_in("bin/id", "echo 0")
    machine.stand_in("bin/c++", "[ -e %s ]" % has_compiler)
    install = "touch %s" % has_compiler if succeeds else "exit 100"
    machine.stand_in("bin/apt-get", 'echo "$*" >> %s; case $1 in install) %s; esac' % (said, install))
    found = machine.needs("build")
    assert said.read_text().splitlines() == ["update -qq", "install -y -qq --no-install-recommends g++"]
    if succeeds:
        assert (found.returncode, found.stdout) == (0, machine.python() + "\n")
    else:
        assert found.returncode == 1 and "sudo apt-get install g++ " in found.stderr


def install(machine, pip="exit 0", build="exit 0"):
    """tools/install of two extras, with stand-ins for pip and the build: how it ended, and pip's commands."""
    (machine.folder / "pyproject.toml").write_text(
        '[project]\ndependencies = ["one"]\n'
        '[project.optional-dependencies]\na = ["two>=2"]\nb = ["three"]\nc = ["four"]'
    )
    machine.stand_in("bin/python", """
        cd %s
        case $* in
        *"pip install"*-r*)
            for file; do :; done
            echo needs $(cat $file) >> said
            echo $$ > beginning && mv beginning pip  # the build may end us now
            %s;;
        *"pip install"*) echo $* >> said;;
        "setup.py -q build_ext --inplace") while [ ! -e pip ]; do sleep 0.01; done; echo the build says this; %s;;
        *) exec %s "$@";;
        esac""" % (machine.folder, pip, build, sys.executable))  # fmt: skip
    env = dict(os.environ, PATH="%s:%s" % (machine.folder / "bin", os.environ["PATH"]))
    command = [str(machine.folder / "tools" / "install"), "a", "b"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    return ended, (machine.folder / "said").read_text().splitlines()


NEEDS = "needs one two>=2 three"


def test_p3_and_what_it_and_the_extras_need_are_installed_while_the_extensions_are_built(machine):
    ended, said = install(machine)  # the build waits for pip to have begun
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    by_path = "--config-settings editable_mode=compat"
    assert said == [NEEDS, "-m pip install --quiet --no-build-isolation --no-deps %s -e ." % by_path]


def test_a_build_that_fails_says_why_and_ends_pip(machine):
    ended, said = install(machine, pip="exec sleep 1000", build="exit 3")
    assert ended.returncode == 1 and ended.stderr == "the build says this\n" and said == [NEEDS]
    wait_until(lambda: not is_running(int((machine.folder / "pip").read_text())), "pip runs on")


def test_what_cannot_be_brought_fails_the_installation(machine):
    ended, said = install(machine, pip="echo no such package >&2; exit 5")
    assert (ended.returncode, ended.stderr) == (5, "no such package\n") and said == [NEEDS]
