"""Access over HTTP, on every base path."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from contract.validators import validate_error
from servers.server import chat_body, metric, wait_until

from .conftest import Site

SKIP = "/lmkit/v1/chat/skip-thinking"
SESSION = "/lmkit/v1/session"


def code_of(response: httpx.Response) -> str:
    """The code in an error body, whose shape must be that of the base path."""
    body = response.json()
    if response.url.path.startswith("/lmkit/"):
        assert set(body) == {"error", "code"} and isinstance(body["error"], str)
        return str(body["code"])
    assert validate_error(body) == []
    return str(body["error"]["code"])


@contextmanager
def running(site: Site, headers: dict[str, str]) -> Iterator[str]:
    """A stream that thinks until it is left; gives its id."""
    site.stage.repeat("word ")
    site.stage.pace_s = 0.005
    body = chat_body("hi", stream=True, max_tokens=4000)
    url = f"{site.server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        assert response.status_code == 200, response.read()
        # Kept until the end: the connection is closed with its iterator.
        lines = response.iter_lines()
        first = next(lines)
        yield json.loads(first.removeprefix("data: "))["id"]


class TestWithoutAKey:
    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/completions/batch"),
            ("GET", "/v1/models"),
            ("GET", "/v1/config"),
            ("GET", "/v1/stats/recent-requests"),
            ("GET", "/metrics"),
            ("POST", "/v1/openai/chat/completions"),
            ("POST", "/lmkit/v1/chat"),
            ("POST", SKIP),
            ("GET", "/nowhere"),
            ("OPTIONS", "/v1/models"),
        ],
    )
    def test_it_is_refused(self, closed: Site, method: str, path: str) -> None:
        response = httpx.request(method, closed.server.url + path)
        assert (response.status_code, code_of(response)) == (401, "missing_api_key")
        assert response.headers["www-authenticate"].startswith("Bearer")

    @pytest.mark.parametrize(
        "path", ["/health", "/docs", "/openapi.json", "/contracts/kiln-inference-v1.schema.json"]
    )
    def test_what_tells_nothing_is_open(self, closed: Site, path: str) -> None:
        assert httpx.get(closed.server.url + path).status_code == 200

    @pytest.mark.parametrize(
        "headers",
        [
            {"authorization": "Bearer sk-none"},
            {"authorization": "Bearer kiln-" + "A" * 43},
            {"authorization": "Bearer " + "x" * 10_000},
            {"x-api-key": "kiln-" + "A" * 43},
            {"authorization": b"Bearer kiln-\xff\xfe" + b"A" * 41},
        ],
    )
    def test_an_unknown_one_is_refused(self, closed: Site, headers: dict[str, Any]) -> None:
        response = httpx.get(f"{closed.server.url}/v1/models", headers=headers)
        assert (response.status_code, code_of(response)) == (401, "invalid_api_key")

    @pytest.mark.parametrize(
        "headers",
        [
            {"authorization": "Basic YTpi"},
            {"authorization": "Bearer"},
            {"x-api-key": ""},
            {"cookie": b'kiln_session=;;=\xe4"'},
            {"cookie": "kiln_session=kilns-" + "A" * 43},
        ],
    )
    def test_other_headers_are_no_key(self, closed: Site, headers: dict[str, Any]) -> None:
        response = httpx.get(f"{closed.server.url}/v1/models", headers=headers)
        assert (response.status_code, code_of(response)) == (401, "missing_api_key")


class TestWithAKey:
    def test_both_headers_carry_it(self, closed: Site) -> None:
        headers = closed.key("both")
        assert closed.ask(headers).status_code == 200
        secret = headers["authorization"].removeprefix("Bearer ")
        assert closed.ask({"x-api-key": secret}).status_code == 200
        assert closed.ask({"authorization": f"bearer {secret}"}).status_code == 200

    async def test_the_openai_client_sends_it(self, closed: Site) -> None:
        secret = closed.key("openai")["authorization"].removeprefix("Bearer ")
        async with openai.AsyncOpenAI(base_url=f"{closed.server.url}/v1", api_key=secret) as client:
            assert [model.id async for model in client.models.list()] == ["tiny-reasoner"]
        async with openai.AsyncOpenAI(base_url=f"{closed.server.url}/v1", api_key="no") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()

    def test_a_revoked_one_is_refused_within_a_second(self, closed: Site) -> None:
        headers = closed.key("brief")
        assert closed.ask(headers).status_code == 200
        closed.store.revoke("brief")
        wait_until(lambda: closed.ask(headers).status_code == 401, "the key is refused", within_s=10)

    def test_its_use_is_noted(self, closed: Site) -> None:
        assert closed.ask(closed.key("used")).status_code == 200

        def noted() -> bool:
            return next(k for k in closed.store.list() if k.name == "used").last_used_at is not None

        wait_until(noted, "the use is noted")

    def test_admin_routes_need_the_scope(self, closed: Site) -> None:
        """The guard answers before the route does, and whether or not there is one."""
        url = f"{closed.server.url}/v1/adapters/nothing-of-this-name"
        response = httpx.delete(url, headers=closed.key("plain"))
        assert (response.status_code, code_of(response)) == (403, "insufficient_scope")
        response = httpx.delete(url, headers=closed.key("boss", "admin"))
        assert response.status_code in (404, 405)

    def test_anothers_exchange_is_not_to_be_found(self, closed: Site) -> None:
        mine, other = closed.key("mine"), closed.key("other", "admin")
        with running(closed, mine) as exchange:
            url, body = closed.server.url + SKIP, {"request_id": exchange}
            refused = httpx.post(url, json=body, headers=other)
            assert (refused.status_code, code_of(refused)) == (404, "exchange_not_found")
            assert httpx.post(url, json=body, headers=mine).status_code == 202


class TestLimits:
    def test_requests_at_once(self, closed: Site) -> None:
        headers = closed.key("narrow", max_concurrency=1)
        with running(closed, headers) as exchange:
            refused = closed.ask(headers)
            assert (refused.status_code, code_of(refused)) == (429, "concurrency_limit_exceeded")
            assert int(refused.headers["retry-after"]) >= 1
            # What needs no engine is not held up, nor is what makes room.
            assert httpx.get(f"{closed.server.url}/v1/models", headers=headers).status_code == 200
            url = closed.server.url + SKIP
            assert httpx.post(url, json={"request_id": exchange}, headers=headers).status_code == 202
            assert closed.ask(closed.key("wide")).status_code == 200
        # The stream was left in the middle.
        closed.stage.clear()
        wait_until(lambda: closed.ask(headers).status_code == 200, "the place is free again", within_s=10)

    def test_a_place_is_free_when_nobody_waits_for_the_answer(self, closed: Site) -> None:
        headers = closed.key("hasty", max_concurrency=1)
        closed.stage.repeat("word ")
        closed.stage.pace_s = 0.005
        with pytest.raises(httpx.ReadTimeout):
            url, body = f"{closed.server.url}/v1/chat/completions", chat_body("hi", max_tokens=4000)
            httpx.post(url, json=body, headers=headers, timeout=httpx.Timeout(30, read=0.5))
        closed.stage.clear()
        wait_until(lambda: closed.ask(headers).status_code == 200, "the place is free again", within_s=10)

    def test_a_place_is_free_after_a_failure(self, closed: Site) -> None:
        headers = closed.key("failing", max_concurrency=1)
        for _ in range(3):
            assert closed.ask(headers, temperature="hot").status_code == 400
        assert closed.ask(headers).status_code == 200

    def test_requests_a_minute(self, closed: Site) -> None:
        headers = closed.key("slow", rate_per_minute=2)
        assert [closed.ask(headers).status_code for _ in range(3)] == [200, 200, 429]
        refused = closed.ask(headers)
        assert code_of(refused) == "rate_limit_exceeded"
        assert closed.ask({}).status_code == 401
        page = httpx.get(f"{closed.server.url}/metrics", headers=headers).text
        assert metric(page, "kiln_refused_turns_total", code="rate_limit_exceeded") >= 2
        assert metric(page, "kiln_refused_turns_total", code="missing_api_key") >= 1
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert httpx.get(f"{closed.server.url}/v1/models", headers=headers).status_code == 200

    def test_many_at_once_are_counted_exactly(self, closed: Site) -> None:
        headers = closed.key("crowd", rate_per_minute=5)

        async def ask_all() -> list[int]:
            async with httpx.AsyncClient(base_url=closed.server.url, headers=headers, timeout=60) as client:
                body = chat_body("hi", max_tokens=2)
                asked = [client.post("/v1/chat/completions", json=body) for _ in range(30)]
                return [response.status_code for response in await asyncio.gather(*asked)]

        statuses = asyncio.run(ask_all())
        assert sorted(statuses) == [200] * 5 + [429] * 25


class TestSessions:
    @pytest.fixture
    def browser(self, closed: Site) -> Iterator[httpx.Client]:
        with httpx.Client(base_url=closed.server.url, timeout=60) as client:
            yield client

    def begin(self, site: Site, browser: httpx.Client, name: str) -> httpx.Response:
        secret = site.key(name, "admin")["authorization"].removeprefix("Bearer ")
        return browser.post(SESSION, json={"key": secret})

    def test_the_cookie_stands_for_the_key(self, closed: Site, browser: httpx.Client) -> None:
        begun = self.begin(closed, browser, "eve")
        assert begun.status_code == 201
        assert begun.json()["name"] == "eve" and begun.json()["scopes"] == ["inference", "admin"]
        cookie = begun.headers["set-cookie"].lower()
        assert all(part in cookie for part in ("httponly", "samesite=strict", "path=/", "max-age=43"))
        assert browser.get("/v1/config").status_code == 200
        assert browser.get(SESSION).json() == begun.json()
        assert browser.post("/v1/chat/completions", json=chat_body("hi", max_tokens=2)).status_code == 200
        ended = browser.delete(SESSION)
        assert ended.status_code == 204
        assert "kiln_session" not in browser.cookies
        # The cookie is of no use to who kept it.
        kept = begun.headers["set-cookie"].split(";")[0]
        response = httpx.get(f"{closed.server.url}/v1/config", headers={"cookie": kept})
        assert (response.status_code, code_of(response)) == (401, "missing_api_key")

    def test_it_ends_with_the_key(self, closed: Site, browser: httpx.Client) -> None:
        self.begin(closed, browser, "finn")
        assert browser.get("/v1/models").status_code == 200
        closed.store.revoke("finn")
        wait_until(
            lambda: browser.get("/v1/models").status_code == 401, "the session is refused", within_s=10
        )

    @pytest.mark.parametrize(
        ("body", "status", "code"),
        [
            ({"key": "kiln-" + "A" * 43}, 401, "invalid_api_key"),
            ({"key": ""}, 401, "invalid_api_key"),
            ({"key": "\ud800"}, 401, "invalid_api_key"),
            ({"key": 1}, 400, "invalid_field"),
            ({}, 400, "invalid_field"),
            ({"key": "x" * 5000}, 413, "body_too_large"),
        ],
    )
    def test_a_wrong_key_begins_none(
        self, browser: httpx.Client, body: dict[str, Any], status: int, code: str
    ) -> None:
        response = browser.post(
            SESSION, content=json.dumps(body), headers={"content-type": "application/json"}
        )
        if body.get("key") == "\ud800":
            status, code = response.status_code, code_of(response)
            assert 400 <= status < 500
        assert (response.status_code, code_of(response)) == (status, code)
        assert "set-cookie" not in response.headers

    @pytest.mark.parametrize(
        "headers",
        [
            {"origin": "https://evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ],
    )
    def test_other_sites_pages_cannot_use_it(
        self, closed: Site, browser: httpx.Client, headers: dict[str, str]
    ) -> None:
        begun = self.begin(closed, browser, f"g{abs(hash(str(headers)))}")
        assert begun.status_code == 201
        for method, path in [("POST", "/v1/chat/completions"), ("POST", SESSION), ("DELETE", SESSION)]:
            response = browser.request(method, path, json=chat_body("hi"), headers=headers)
            assert (response.status_code, code_of(response)) == (403, "cross_site_request")
        assert browser.get("/v1/models").status_code == 200
        own = {"origin": closed.server.url, "sec-fetch-site": "same-origin"}
        answered = browser.post("/v1/chat/completions", json=chat_body("hi", max_tokens=2), headers=own)
        assert answered.status_code == 200

    def test_a_key_needs_no_such_check(self, closed: Site) -> None:
        headers = closed.key("page") | {"origin": "https://elsewhere.example", "sec-fetch-site": "cross-site"}
        assert closed.ask(headers).status_code == 200


class TestCors:
    def preflight(self, url: str, origin: str) -> httpx.Response:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        return httpx.options(f"{url}/v1/chat/completions", headers={"origin": origin, **asked})

    def test_named_origins_may_call_and_read_refusals(self, closed: Site) -> None:
        answer = self.preflight(closed.server.url, "https://chat.example")
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        refused = closed.ask({"origin": "https://chat.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://chat.example"

    def test_others_may_not(self, closed: Site) -> None:
        assert self.preflight(closed.server.url, "https://evil.example").status_code == 400
        answer = httpx.get(f"{closed.server.url}/health", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers

    def test_it_is_off_unless_asked_for(self, open_site: Site) -> None:
        answer = self.preflight(open_site.server.url, "https://chat.example")
        assert answer.status_code == 405
        assert not any(name.startswith("access-control") for name in answer.headers)


class TestOpenServer:
    def test_nobody_needs_a_key_and_no_file_is_made(self, open_site: Site) -> None:
        assert open_site.ask({}).status_code == 200
        assert open_site.ask({"authorization": "Bearer sk-made-up"}).status_code == 200
        who = httpx.get(open_site.server.url + SESSION).json()
        assert who == {"name": "anonymous", "scopes": ["inference", "admin"], "session_expires_at": None}
        assert not open_site.store.database.exists

    def test_a_key_makes_a_difference_where_there_is_one(self, open_site: Site) -> None:
        headers = open_site.key("hana", max_concurrency=1)
        url = open_site.server.url + SESSION
        assert httpx.get(url, headers=headers).json()["name"] == "hana"
        open_site.store.revoke("hana")
        wait_until(lambda: open_site.ask(headers).status_code == 401, "the key is refused", within_s=10)
        assert open_site.ask({}).status_code == 200

    def test_an_admin_key_ends_the_admins_without_one(self, open_site: Site) -> None:
        url = open_site.server.url + SESSION
        open_site.key("boss", "admin")
        wait_until(
            lambda: httpx.get(url).json()["scopes"] == ["inference"], "callers are no admins", within_s=10
        )

    def test_a_page_that_took_its_address_gets_nothing(self, open_site: Site) -> None:
        url = f"{open_site.server.url}/lmkit/v1/memory"
        refused = httpx.get(url, headers={"host": "evil.example:8420"})
        assert (refused.status_code, code_of(refused)) == (403, "cross_site_request")
        headers = open_site.key("proxied") | {"host": "chat.example"}
        assert httpx.get(url, headers=headers).status_code == 200

    def test_a_page_of_another_site_gets_nothing_done(self, open_site: Site) -> None:
        refused = open_site.ask({"origin": "https://evil.example"})
        assert (refused.status_code, code_of(refused)) == (403, "cross_site_request")


def test_a_flood_of_wrong_keys_delays_nobody(closed: Site) -> None:
    """300 wrong keys, each of which asks the store, beside a running stream."""
    headers = closed.key("steady")
    statuses: list[int] = []

    def flood() -> None:
        with httpx.Client(base_url=closed.server.url) as client:
            for i in range(100):
                wrong = {"authorization": f"Bearer kiln-{i:043d}"}
                statuses.append(client.get("/v1/models", headers=wrong).status_code)

    threads = [threading.Thread(target=flood) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert all(closed.ask(headers).status_code == 200 for _ in range(10))
    for thread in threads:
        thread.join()
    assert statuses == [401] * 300


class TestKeysOverHttp:
    URL = "/lmkit/v1/keys"

    def test_from_creation_to_the_end(self, closed: Site) -> None:
        with httpx.Client(base_url=closed.server.url, headers=closed.key("root", "admin")) as admin:
            body = {"name": "ivy", "max_concurrency": 3}
            created = admin.post(self.URL, json=body)
            assert created.status_code == 201
            secret = created.json()["secret"]
            assert created.json()["key"]["prefix"] == secret[:11]
            headers = {"x-api-key": secret}
            assert closed.ask(headers).status_code == 200
            listed = {key["name"]: key for key in admin.get(self.URL).json()["keys"]}
            assert (listed["ivy"]["max_concurrency"], listed["ivy"]["revoked_at"]) == (3, None)
            assert secret not in admin.get(self.URL).text
            assert admin.delete(f"{self.URL}/ivy").json()["name"] == "ivy"
            assert closed.ask(headers).status_code == 401  # at once
            again = admin.delete(f"{self.URL}/ivy")
            assert (again.status_code, code_of(again)) == (404, "key_not_found")

    @pytest.mark.parametrize(
        ("body", "code"),
        [
            ({"name": "a b"}, "key_refused"),
            ({"name": "root2", "max_concurrency": 0}, "key_refused"),
            ({"name": "root2", "rate_per_minute": 10**12}, "key_refused"),
            ({"name": "root2", "scope": "all"}, "invalid_field"),
            ({"scope": "admin"}, "invalid_field"),
        ],
    )
    def test_mistakes_are_named(self, closed: Site, body: dict[str, Any], code: str) -> None:
        headers = closed.key(f"r{abs(hash(str(body)))}", "admin")
        response = httpx.post(closed.server.url + self.URL, json=body, headers=headers)
        assert (response.status_code, code_of(response)) == (400, code)

    @pytest.mark.parametrize(
        ("method", "path"), [("GET", ""), ("POST", ""), ("DELETE", "/root"), ("DELETE", "/../keys/root")]
    )
    def test_only_admins_may(self, closed: Site, method: str, path: str) -> None:
        headers = closed.key(f"p{abs(hash(method + path))}")
        response = httpx.request(method, closed.server.url + self.URL + path, headers=headers)
        assert (response.status_code, code_of(response)) == (403, "insufficient_scope")
