"""Read settings from flags, environment, file and defaults, in that order of weight."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kiln.core.errors import ConfigError
from kiln.core.settings import (
    SECTIONS,
    TABLES,
    BadValue,
    Declaration,
    Settings,
    declarations,
    show_value,
    table_declarations,
)

CONFIG_VARIABLE = "KILN_CONFIG"
DEFAULT_FILE = "kiln.toml"

_WHOLE = re.compile(r"[0-9]{1,19}")
_DECIMAL = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,4})?")


def load_settings(
    *, config_path: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]
) -> Settings:
    """Resolve all settings: flag > environment > file > default.

    `flags` maps keys (`server.port`) to values; None means that the flag was not given, and text is
    parsed as an environment value is. Raises ConfigError, naming the key, where its value came from,
    the value and what is allowed, for anything malformed or unknown.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    origins: dict[str, str] = {}
    path = find_config_file(config_path, environment)
    content = {} if path is None else _read_toml(path)
    readers = (
        ("file", _from_file(content, str(path))),
        ("environment", _from_environment(environment)),
        ("flag", _from_flags(flags)),
    )
    for source, found in readers:
        for declaration, value, origin in found:
            values[declaration.name] = value
            sources[declaration.name] = source
            origins[declaration.name] = origin
    tables = {family: _named_tables(family, content.get(family, {}), str(path)) for family in TABLES}
    try:
        return Settings.build(values, sources, tables)
    except BadValue as error:
        involved = [
            f"{name} is {show_value(values[name])} in {origins[name]}"
            for name in values
            if name in str(error)
        ]
        raise ConfigError("; ".join([str(error), *involved])) from None


def find_config_file(config_path: Path | None, environment: Mapping[str, str]) -> Path | None:
    """The file to read: the given one, else that of KILN_CONFIG, else ./kiln.toml if there is one."""
    if config_path is not None:
        return config_path
    named = environment.get(CONFIG_VARIABLE)
    if named is not None:
        if not named.strip():
            raise ConfigError(f'{CONFIG_VARIABLE} from the environment is "": it must name a file')
        return Path(named)
    here = Path(DEFAULT_FILE)
    # A dangling link is meant as a configuration, so it is an error later on, not an absence.
    return here if here.exists() or here.is_symlink() else None


def parse_text(declaration: Declaration, text: str) -> Any:
    """The value that `text`, of an environment variable or a flag, stands for. Raises BadValue."""
    kind = declaration.kind
    if kind is bool and text.lower() in ("true", "false"):
        return declaration.accept(text.lower() == "true")
    if kind is int and _WHOLE.fullmatch(text):
        return declaration.accept(int(text))
    if kind is float and _DECIMAL.fullmatch(text):
        return declaration.accept(float(text))
    if kind is tuple:
        # The empty text is the empty list; an empty entry is a slip and is refused.
        return declaration.accept([entry.strip() for entry in text.split(",")] if text.strip() else [])
    return declaration.accept(text)


Found = Iterator[tuple[Declaration, Any, str]]


def _from_file(content: Mapping[str, Any], origin: str) -> Found:
    for section, table in content.items():
        if section in TABLES:
            continue
        if section not in SECTIONS:
            known = {**SECTIONS, **TABLES}
            raise ConfigError(_unknown(f"section [{section}]", origin, section, known, "sections"))
        if not isinstance(table, dict):
            raise ConfigError(
                f"{section} in {origin} is {show_value(table)}: it must be a section, [{section}]"
            )
        keys = {d.key: d for d in declarations().values() if d.section == section}
        for key, value in table.items():
            if key not in keys:
                raise ConfigError(_unknown(f"key {section}.{key}", origin, key, keys, "keys"))
            yield keys[key], _checked(keys[key], value, keys[key].name, origin), origin


def _named_tables(family: str, tables: object, origin: str) -> dict[str, Any]:
    """The tables `[family.<name>]` of the file, each as an instance of its class."""
    if not isinstance(tables, dict):
        raise ConfigError(
            f"{family} in {origin} is {show_value(tables)}: it must hold tables, [{family}.<name>]"
        )
    declared = TABLES[family]
    built = {}
    for name, table in tables.items():
        label = f"{family}.{name}"
        if not isinstance(table, dict):
            raise ConfigError(f"{label} in {origin} is {show_value(table)}: it must be a table, [{label}]")
        if not re.fullmatch(declared.name_pattern, name):
            raise ConfigError(f"the name of [{label}] in {origin} must be {declared.name_words}")
        keys = table_declarations(family)
        values = {}
        for key, value in table.items():
            if key not in keys:
                raise ConfigError(_unknown(f"key {label}.{key}", origin, key, keys, "keys"))
            values[key] = _checked(keys[key], value, f"{label}.{key}", origin)
        try:
            built[name] = declared.cls(**values)
        except BadValue as error:
            raise ConfigError(f"[{label}] in {origin}: {error}") from None
    return built


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"the configuration file {path} cannot be read: {reason}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not UTF-8 at byte {error.start}") from error
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"the configuration file {path} is nested too deeply") from error
    except ValueError as error:
        # The parser names line and column, but for what it finds missing at the end.
        end = f"at line {len(text.splitlines())}, the end of the file"
        reason = str(error).replace("at end of document", end)
        raise ConfigError(f"the configuration file {path} is not valid TOML: {reason}") from error


def _from_environment(environment: Mapping[str, str]) -> Found:
    known = {d.environment_name: d for d in declarations().values()}
    heads = tuple(f"KILN_{section.upper()}" for section in SECTIONS)
    for name, text in sorted(environment.items()):
        if name in known:
            value = _checked(known[name], text, name, "the environment", from_text=True)
            yield known[name], value, "the environment"
        elif name.startswith(tuple(f"{head}_" for head in heads)) or name in heads:
            raise ConfigError(_unknown(f"variable {name}", "the environment", name, known, "variables"))
        elif name.startswith(tuple(f"KILN_{family.upper()}_" for family in TABLES)):
            tables = f"tables [{name.split('_')[1].lower()}.<name>]"
            raise ConfigError(f"unknown variable {name} in the environment: {tables} are for the file only")


def _from_flags(flags: Mapping[str, object]) -> Found:
    for name, value in flags.items():
        if value is not None:
            declaration = declarations()[name]
            origin = f"the flag {flag_name(name)}"
            yield declaration, _checked(declaration, value, name, origin, from_text=True), origin


def flag_name(name: str) -> str:
    """The flag of a key: `--ctx-size` for `engine.ctx_size`; two keys have names of their own."""
    own = {"model.path": "--model", "engine.mode": "--engine"}
    return own.get(name, "--" + name.split(".")[1].replace("_", "-"))


def _checked(
    declaration: Declaration, value: object, name: str, origin: str, *, from_text: bool = False
) -> Any:
    try:
        if from_text and isinstance(value, str):
            return parse_text(declaration, value)
        return declaration.accept(value)
    except BadValue as allowed:
        shown = "not shown" if declaration.secret else show_value(value)
        raise ConfigError(f"{name} in {origin} is {shown}: it must be {allowed}") from None


def _unknown(what: str, origin: str, name: str, known: Mapping[str, object], plural: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"the {plural} are {', '.join(known)}"
    return f"unknown {what} in {origin}: {remedy}"
