"""Compiles the library where there is a C compiler. Without one the package installs too, and models compute densely."""

import importlib.util
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

_spec = importlib.util.spec_from_file_location("build_kernels", Path(__file__).parent / "src" / "fedrts_kernels" / "build.py")
builder = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(builder)


class Build(build_ext):
    """The library is no Python module: ctypes loads it."""

    built = False

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split(".")[:-1], builder.LIBRARY))

    def build_extension(self, extension):
        try:
            builder.build(Path(self.get_ext_fullpath(extension.name)))
            self.built = True
        except builder.BuildError as error:
            print(f"fedrts-kernels: {error}: installed without the library, models compute densely", file=sys.stderr)

    def copy_extensions_to_source(self):
        if self.built:
            super().copy_extensions_to_source()
            inplace, (extension,) = self.get_finalized_command("build_py"), self.extensions
            made = Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(extension.name)))
            shutil.copy(made.with_name(builder.PROGRAM), inplace.get_package_dir("fedrts_kernels"))


class Wheel(bdist_wheel):
    """One wheel for every Python of a platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=[Extension("fedrts_kernels.library", sources=[], optional=True)], cmdclass={"build_ext": Build, "bdist_wheel": Wheel})
