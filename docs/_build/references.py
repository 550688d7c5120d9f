"""References of docstrings, [`name`] as in transformers, become links where the name is on the site."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)  # of which mkdocstrings makes a box
_REFERENCE = re.compile(r"\[`([A-Za-z_][\w.]*)`\](?![\[(])")


class References(griffe.Extension):
    """Puts links into docstrings."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            text = _REFERENCE.sub(lambda found: _link(obj, found[1]), obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub("Examples:", text)


def _link(obj: Any, name: str) -> str:
    """Return a reference that stays text if nothing of this name is on the site."""
    first, _, rest = name.partition(".")
    try:
        path = f"{obj.resolve(first)}.{rest}".rstrip(".")
    except griffe.NameResolutionError:
        path = name
    return f'<autoref identifier="{path}" optional><code>{name}</code></autoref>'
