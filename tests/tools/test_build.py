"""How a build is prepared: in a clone that was moved, and with or without warnings as errors."""

import os
import shutil
import subprocess

import pytest
from processes import ROOT

needs_compiler = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None, reason="needs cmake and a C++ compiler"
)


def configure(clone, **env):
    """What a build of that clone would run, each command a line; and what was said."""
    env = {**{name: value for name, value in os.environ.items() if name != "WERROR"}, **env}
    folder = clone / "build" / "core"
    command = [str(clone / "tools" / "configure"), str(folder), "-G", "Unix Makefiles", "-DP3_BUILD_TESTS=OFF",
               "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]  # fmt: skip
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran
    return (folder / "compile_commands.json").read_text(), ran.stdout


@needs_compiler
def test_a_moved_clone_is_built_afresh_and_warnings_stop_our_own_builds_alone(tmp_path):
    clone, moved = tmp_path / "clone", tmp_path / "moved"
    for folder in ("include", "src", "tools", "p3/mxnet"):
        shutil.copytree(str(ROOT / folder), str(clone / folder))
    shutil.copy(str(ROOT / "CMakeLists.txt"), str(clone))

    commands, _ = configure(clone)
    assert "-Wconversion" in commands and "-Werror" not in commands
    compiled = clone / "build" / "core" / "compiled"
    compiled.touch()
    commands, said = configure(clone, WERROR="1")
    assert "-Werror" in commands and "afresh" not in said and compiled.exists()
    commands, _ = configure(clone)  # when its extensions are built again, for the same folder
    assert "-Werror" in commands

    clone.rename(moved)
    commands, said = configure(moved)
    assert "%s was prepared at another path, and begins afresh" % (moved / "build" / "core") in said
    assert str(moved) in commands and str(clone) not in commands
    assert not (moved / "build" / "core" / "compiled").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_makes_the_environment_of_a_moved_clone_anew(tmp_path):
    shutil.copy(str(ROOT / "Makefile"), str(tmp_path))
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "ready").touch()
    for made_in, is_kept in ((tmp_path, True), (tmp_path / "elsewhere", False)):
        (tmp_path / ".venv" / "bin" / "activate").write_text('VIRTUAL_ENV="%s/.venv"\n' % made_in)
        command = ["make", "--dry-run", ".venv/ready"]
        ran = subprocess.run(command, cwd=str(tmp_path), capture_output=True, text=True, timeout=30)
        assert ran.returncode == 0 and ("tools/make-venv" not in ran.stdout) == is_kept, ran
        assert ("rm -rf .venv" not in ran.stdout) == is_kept, ran
