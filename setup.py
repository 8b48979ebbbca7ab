"""Builds the C++ core with CMake and the Cython extensions on top of it.

The core is one shared library, libp3core.so in the package's folder, so that all extensions of a process share one.
Everything declarative is in pyproject.toml; this file holds only what it cannot say.
"""

import os
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


# One folder for every build, the C++ tests' included: what is compiled already is not compiled again.
BUILD = ROOT / "build" / "core"
CORE = "libp3core.so"


class BuildWithCore(build_ext):
    """Builds the C++ libraries first, then links the extensions with them."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self):
        super().run()
        package = ROOT / "p3" if self.inplace else Path(self.build_lib) / "p3"
        self.copy_file(str(BUILD / CORE), str(package / CORE))

    def build_extensions(self):
        cmake = shutil.which("cmake")
        if cmake is None:
            sys.exit("P3: cmake was not found. Install it with: pip install cmake ninja")
        configure = ["sh", str(ROOT / "tools" / "configure"), str(BUILD), "-DP3_BUILD_TESTS=OFF"]
        ninja = shutil.which("ninja")
        if ninja and not (BUILD / "Makefile").exists():
            # Named, for the one that CMake remembers may have gone with the environment that pip built in before.
            configure += ["-G", "Ninja", "-DCMAKE_MAKE_PROGRAM=" + ninja]
        subprocess.run(configure, check=True)
        build = [cmake, "--build", str(BUILD), "--target", "extensions", "--parallel", str(os.cpu_count() or 1)]
        subprocess.run(build, check=True)
        super().build_extensions()

    def build_extension(self, ext):
        """Links it again if a library has changed. Only here does it depend on these: they are no sources."""
        sources, ext.depends = ext.depends, ext.depends + ext.extra_objects
        super().build_extension(ext)
        ext.depends = sources


def extension(name: str, *libraries: str) -> Extension:
    """`libraries`: of its own, before the core's."""
    source = name.replace(".", "/")
    links = [str(BUILD / library) for library in (*libraries, CORE)]
    to_package = "/".join(["$ORIGIN", *[".."] * (name.count(".") - 1)])
    return Extension(
        name,
        sources=[source + ".pyx"],
        include_dirs=["include", "src"],
        language="c++",
        # As the core, without the debugging symbols that Python asks for: they are a third of the compiler's time.
        extra_compile_args=["-std=c++17", "-O2", "-ffp-contract=off", "-g0"],
        extra_objects=links,
        extra_link_args=["-pthread", "-Wl,-rpath," + to_package],
        libraries=["dl"],
        depends=[*glob("include/p3/*.h"), *glob("src/binding/*.h"), *glob("src/relay/*.h"),
                 *glob("src/simulator/*.h"), *glob(os.path.dirname(source) + "/*/*.h")],
    )


setup(
    license="Apache-2.0",
    ext_modules=cythonize(
        [
            extension("p3._core"),
            extension("p3.measure._kernels"),
            extension("p3.measure._relay", "libp3relay.a"),
            extension("p3.measure._simulator", "libp3simulator.a"),
            extension("p3.mxnet._mxnet", "libp3mxnet.a"),
        ],
        compiler_directives={"language_level": 3, "binding": True, "embedsignature": True},
    ),
    cmdclass={"build_ext": BuildWithCore},
)
