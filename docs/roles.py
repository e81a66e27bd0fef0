"""For the site: docstrings say ``:func:`name```, which is not Markdown."""

import re
from typing import Any

_ROLE = re.compile(r":(?:func|meth|class|mod|data|attr):(?=<code>)")


def on_page_content(html: str, **_: Any) -> str:
    """Leave the name, as code."""
    return _ROLE.sub("", html)
