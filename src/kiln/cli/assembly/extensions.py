"""Code of an operator's own that settings name."""

from __future__ import annotations

import importlib
from functools import reduce

from kiln.chat.filtering import ContentFilter
from kiln.core.errors import ConfigError
from kiln.core.settings import Settings


def load_filter(settings: Settings) -> ContentFilter | None:
    """The configured content filter. Raises ConfigError where it cannot be imported or called."""
    name = settings.openai.content_filter
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    try:
        hook = reduce(getattr, attribute.split("."), importlib.import_module(module))
    except Exception as error:  # the module is a program: it may raise anything at all
        raise ConfigError(
            f"openai.content_filter = {name!r} cannot be imported: {error!r}",
            hint="Name a function in a module that Python finds, as `module:function`.",
        ) from None
    if not callable(hook):
        raise ConfigError(f"openai.content_filter = {name!r} is not a function")
    return ContentFilter(hook)
