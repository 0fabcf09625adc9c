"""The examples in docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import hadaquant

MODULES = [
    module.name
    for module in pkgutil.walk_packages(hadaquant.__path__, "hadaquant.")
    if not module.name.startswith("hadaquant.kernels")  # importing them needs Triton
]
#: These have examples; the others may.
WITH_EXAMPLES = {
    f"hadaquant.{name}" for name in ("formats", "formats.elements", "formats.scales", "layout", "rotation", "nn.select")
}


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted > 0 or name not in WITH_EXAMPLES


def test_the_modules_with_examples_exist():
    assert set(MODULES) > WITH_EXAMPLES
