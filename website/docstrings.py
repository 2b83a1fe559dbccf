"""Docstrings as mkdocstrings reads them: sections after an empty line, their text indented, other headings in bold."""

import re
from typing import Any

from griffe import Extension, Object

_SECTION = re.compile(r"\n+( *)(Args|Raises|Returns|Yields|Example): *(.*)")
_HEADING = re.compile(r"\n+( *)(Shapes|Cost|Source): *")


class Sections(Extension):
    """Rewrites the docstrings of all objects."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            text = _HEADING.sub(r"\n\n\1**\2:** ", obj.docstring.value)
            obj.docstring.value = _SECTION.sub(_open_section, text)


def _open_section(section: re.Match[str]) -> str:
    indent, name, text = section.groups()
    return f"\n\n{indent}{name}:" + (f"\n{indent}    {text}" if text else "")
