"""Content filters for the tests, named in settings as an operator would."""

from __future__ import annotations

calls: list[tuple[str, bool]] = []


def no_nines(text: str, final: bool) -> bool | None:
    """Refuses a 9; waits for whole words."""
    calls.append((text, final))
    if "9" in text:
        return False
    return True if final or text.endswith((" ", ".")) else None


async def broken(text: str, final: bool) -> bool:
    raise RuntimeError("out of order")


not_a_function = 3
