"""What is given away: a source archive that is whole, and a wheel that needs no compiler and no framework."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from processes import ROOT, clean_environment

pytest.importorskip("Cython", reason="needs what builds P3: pip install cython cmake ninja setuptools wheel")
pytestmark = [
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
    pytest.mark.timeout(400),  # of which nearly all is the compiler's, the first time
]

# Loads every extension. The core that they share must be the wheel's own.
LOOK = """
import json, sys
import p3._core, p3.measure._kernels, p3.measure._relay, p3.measure._simulator, p3.mxnet._mxnet
loaded = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(json.dumps({"p3": p3.__file__, "core": [path for path in loaded if "libp3core" in path],
                  "modules": sorted({"mxnet", "torch"} & set(sys.modules))}))
"""


def call(command, **how):
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, **how)
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    return finished.stdout


def sources(folder, *suffixes):
    """Files of this tree, by their paths in it."""
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.suffix in suffixes}


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """(the source archive, the wheel), of this tree. What is compiled is kept in build/, and nothing else of it."""
    folder = tmp_path_factory.mktemp("dist")
    kept = ROOT / "build" / ("wheel-" + sys.implementation.cache_tag)
    for path in kept.rglob("*"):
        if path.is_file() and path.suffix != ".so":
            path.unlink()
    # The same commands have built what is in this tree; what is older than its sources is built again.
    for path in (ROOT / "p3").rglob("*.cpython-*.so"):
        place = kept / path.relative_to(ROOT)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(str(path), str(place))
    # A folder of its own: setuptools adds to an archive whatever an earlier one in the same folder held.
    (folder / "egg").mkdir()
    build = ["egg_info", "--egg-base", str(folder / "egg")]
    build += ["build", "--build-lib", str(kept), "--build-temp", str(folder / "objects")]
    wheel = ["bdist_wheel", "--bdist-dir", str(folder / "wheel"), "--dist-dir", str(folder)]
    env = dict(os.environ, PATH=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    call([sys.executable, "setup.py", "-q", *build, *wheel, "sdist", "--dist-dir", str(folder)], cwd=str(ROOT), env=env)
    (archive,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return archive, wheel


@pytest.fixture(scope="module")
def installed(archives, tmp_path_factory):
    """installed(program, ...) -> its output: in an environment with the wheel, and nothing else on PATH."""
    folder = tmp_path_factory.mktemp("installed")
    call([sys.executable, "-m", "venv", str(folder / "env")])
    programs = str(folder / "env" / "bin")
    assert [shutil.which(name, path=programs) for name in ("cc", "gcc", "c++", "cmake", "ninja", "make")] == [None] * 6
    env = clean_environment(PATH=programs)
    del env["PYTHONPATH"]

    def run(program, *arguments):
        return call([os.path.join(programs, program), *arguments], cwd=str(folder), env=env)

    run("python", "-m", "pip", "install", "--quiet", "--only-binary=:all:", str(archives[1]))
    return run


def test_the_source_archive_holds_all_that_a_build_needs(archives):
    with tarfile.open(str(archives[0])) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    needed = sources("p3", ".py", ".pyx", ".pxd", ".pxi", ".cc", ".h", ".json")
    needed |= sources("src", ".cc", ".h") | sources("include", ".h")
    needed |= {"CMakeLists.txt", "setup.py", "pyproject.toml", "README.md", "LICENSE", "tools/configure"}
    assert len(needed) > 200 and needed - held == set()
    extra = {name for name in held if re.search(r"\.(so|cpp|pyc)$", name) or name.startswith(("build/", "tests/"))}
    assert extra == set()


def test_the_wheel_holds_what_was_built_and_no_sources_of_it(archives):
    with zipfile.ZipFile(str(archives[1])) as wheel:
        names = wheel.namelist()
        tags = email.message_from_bytes(wheel.read(next(name for name in names if name.endswith("/WHEEL"))))
    libraries = {re.sub(r"\.cpython[\w-]*", "", name) for name in names if name.endswith(".so")}
    assert libraries == {"p3/_core.so", "p3/libp3core.so", "p3/measure/_kernels.so", "p3/measure/_relay.so",
                         "p3/measure/_simulator.so", "p3/mxnet/_mxnet.so"}  # fmt: skip
    assert [name for name in names if re.search(r"\.(pyx|pxd|pxi|cc|cpp|h)$", name)] == []
    assert sources("p3", ".py", ".json") - set(names) == set()
    assert tags["Root-Is-Purelib"] == "false" and tags["Tag"].startswith("cp%d%d-" % sys.version_info[:2])


def test_it_installs_without_a_compiler_and_loads_its_own_core(installed):
    found = json.loads(installed("python", "-c", LOOK))
    assert "/site-packages/p3/" in found["p3"] and found["modules"] == []
    assert found["core"] == [os.path.join(os.path.dirname(found["p3"]), "libp3core.so")]


def test_it_trains_embedded_and_as_a_job_without_a_framework(installed):
    script = str(ROOT / "examples" / "numpy" / "regression.py")
    assert installed("python", script) == "worker 0 of 1: error 0.0000\n"
    output = installed("p3", "run", "-n", "2", "-s", "2", "python", script)
    expected = ["[worker %d] worker %d of 2: error 0.0000" % (rank, rank) for rank in range(2)]
    assert sorted(output.splitlines()) == expected


def test_its_doctor_finds_all_that_is_needed(installed):
    assert "Everything that P3 needs is here." in installed("p3", "doctor")
