"""The explorer: one page in which h, g and their response change while one drags, drawn from the catalogue itself."""

from dcnet.explorer.javascript import to_javascript
from dcnet.explorer.page import arithmetic, render

__all__ = ["arithmetic", "render", "to_javascript"]
