"""Builds the C++ core with CMake and the Cython extensions on top of it.

Everything declarative is in pyproject.toml; this file holds only what it cannot say.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class BuildWithCore(build_ext):
    """Builds libp3core.a first, then links each extension with it."""

    def build_extensions(self):
        # One folder for every build, the C++ tests' included: what is compiled already is not compiled again.
        core = ROOT / "build" / "core"
        self._build_core(core)
        for extension in self.extensions:
            extension.extra_objects = [str(core / "libp3core.a"), *(core / "links").read_text().split()]
            extension.depends = [*extension.depends, str(core / "libp3core.a")]
        super().build_extensions()

    def _build_core(self, build_dir: Path) -> None:
        cmake = shutil.which("cmake")
        if cmake is None:
            sys.exit("P3: cmake was not found. Install it with: pip install cmake ninja")
        configure = [cmake, "-S", str(ROOT), "-B", str(build_dir), "-DP3_BUILD_TESTS=OFF"]
        if shutil.which("ninja") and not (build_dir / "Makefile").exists():
            configure += ["-G", "Ninja"]
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build_dir), "--parallel", str(os.cpu_count() or 1)], check=True)


def sources_in(folder: str):
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).glob("*.cc"))]


def extension(name: str, *sources: str) -> Extension:
    headers = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "include" / "p3").glob("*.h"))]
    return Extension(
        name,
        sources=list(sources),
        include_dirs=["include", "src"],
        language="c++",
        extra_compile_args=["-std=c++17", "-O2", "-ffp-contract=off"],
        extra_link_args=["-pthread"],
        libraries=["dl"],
        depends=headers,
    )


setup(
    ext_modules=cythonize(
        [
            extension("p3._kernels", "p3/_kernels.pyx"),
            extension("p3._core", "p3/_core.pyx", *sources_in("p3/mxnet")),
        ],
        compiler_directives={"language_level": 3, "binding": True, "embedsignature": True},
    ),
    cmdclass={"build_ext": BuildWithCore},
)
