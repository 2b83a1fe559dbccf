"""The names of parts and their arguments are read from the source."""

import inspect

from revzoo import registry
from revzoo.spec.outline import _outline_parts


def _list_arguments():
    tables = {name: table for name, table in vars(registry).items() if isinstance(table, registry.Registry)}
    return {
        (kind, name, argument): parameter.default is inspect.Parameter.empty
        for kind, table in tables.items()
        for name in table
        for argument, parameter in table.arguments(name).items()
    }


def test_the_source_has_the_parts_and_arguments_that_are_imported():
    imported = _list_arguments()
    with _outline_parts():
        assert _list_arguments() == imported
    assert _list_arguments() == imported
