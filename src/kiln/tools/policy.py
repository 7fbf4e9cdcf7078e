"""Which tools may run."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from kiln.tools.tool import Category

PREFIX = "category:"


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules for tools: a name in which `*` stands for any characters, or `category:` and a category.

    A tool runs if a rule of `allow` fits it and none of `deny` does.
    """

    allow: tuple[str, ...] = ("category:pure",)
    deny: tuple[str, ...] = ()

    def allows(self, name: str, category: Category) -> bool:
        return _any_fits(self.allow, name, category) and not _any_fits(self.deny, name, category)


def _any_fits(rules: tuple[str, ...], name: str, category: Category) -> bool:
    return any(_fits(rule, name, category) for rule in rules)


def _fits(rule: str, name: str, category: Category) -> bool:
    if rule.startswith(PREFIX):
        return rule.removeprefix(PREFIX) == category
    # Only the star is a wildcard: `[` and `?` are escaped, or a rule could mean more than it says.
    return fnmatchcase(name, rule.replace("[", "[[]").replace("?", "[?]"))
