"""What a wheel holds: one package, `reprise`, and below it the application: trainer, models and configs.

pyproject.toml has everything else. It cannot say that `trainer` lies at the top of a checkout and below `reprise` in a
wheel without naming each of its packages.
"""

from setuptools import find_namespace_packages, setup

APPLICATION = "reprise._application"  # which reprise/__main__.py puts on the path
FOLDERS = ("trainer", "models", "configs")


def packages_of(*folders: str) -> list[str]:
    """Return the packages in some folders of the checkout, and the folders themselves."""
    return find_namespace_packages(include=[pattern for folder in folders for pattern in (folder, f"{folder}.*")])


setup(
    packages=[*packages_of("reprise"), *(f"{APPLICATION}.{name}" for name in packages_of(*FOLDERS))],
    package_dir={f"{APPLICATION}.{folder}": folder for folder in FOLDERS},
    # A wheel holds all that lies in this folder: in `build/lib`, also the packages of an earlier version.
    options={"build": {"build_lib": "build/torch-reprise"}},
)
