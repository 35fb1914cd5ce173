"""Check the URL of a Redis server in a backend's config."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote, urlsplit

_DATABASE = re.compile(r"/[0-9]{1,9}")


def check_no_fragment(url: str) -> None:
    """Refuse a `#`, with which every parser of URLs ends the address.

    Raises:
        ValueError: The message repeats no part of the URL.
    """
    if "#" in url:
        raise ValueError("has a '#', which would end the URL: write %23 in a password")


def check_redis_url(url: str) -> None:
    """Refuse mistakes that redis-py ignores, and that would lead to another server or database.

    `url` is one that redis-py can parse.

    Raises:
        ValueError: The message names the part that is wrong, but repeats no part of the URL.
    """
    parts = urlsplit(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    names = [name for name, _ in query]
    check_no_fragment(url)
    if ("db", "") in query or len({*names}) < len(names):
        raise ValueError("gives an option twice, or db without a number")
    if parts.scheme == "unix":
        if parts.hostname:
            raise ValueError(
                "must have three slashes before the path of a unix socket: unix:///PATH"
            )
    elif parts.port == 0:
        raise ValueError("must have a port from 1 to 65535, or none")
    elif parts.path not in ("", "/") and (
        "db" in names or not _DATABASE.fullmatch(unquote(parts.path))
    ):
        raise ValueError(
            "must end with a database number, such as /0, or have the option db, or neither"
        )
