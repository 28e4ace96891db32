"""One wheel for all Python versions: the libraries depend on the platform, not on Python."""

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class WithLibraries(Distribution):
    """Its files go where those of extensions go, as auditwheel expects of libraries."""

    def has_ext_modules(self) -> bool:
        return True


class OfAnyPython(bdist_wheel):
    """Names the wheel py3-none and the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=WithLibraries, cmdclass={"bdist_wheel": OfAnyPython})
