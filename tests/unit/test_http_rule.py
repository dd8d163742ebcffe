"""The rule of all HTTP servers: which requests a page can make, and which are those of programs."""

from __future__ import annotations

import pytest

from prime_rl.configs.inference import InferenceConfig
from prime_rl.utils.runtime import http_refusal
from tests.page_attacks import JSON, Attack, attacks

PORT = 8000


@pytest.mark.parametrize("attack", attacks(PORT), ids=lambda attack: attack.what)
def test_what_a_page_can_send_is_refused(attack: Attack) -> None:
    refused = http_refusal(attack.method, attack.headers.items())
    assert refused is not None and refused[0] == attack.status
    assert "\n" not in refused[1] and len(refused[1]) < 200


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LocalHost:9", "[::1]:8000", "127.0.1.1", "[::1]"])
def test_the_own_names_are_answered_whatever_the_port(host: str) -> None:
    """A tunnel has another port than the server."""
    assert http_refusal("GET", [("Host", host)]) is None
    assert http_refusal("POST", [("host", host), ("ORIGIN", f"http://{host}"), *JSON.items()]) is None


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON", "application/json; charset=utf-8", 'application/json ;a="b"']
)
def test_json_may_have_parameters(kind: str) -> None:
    assert http_refusal("POST", [("host", "localhost"), ("content-type", kind)]) is None


def test_a_header_that_is_sent_twice_counts_as_none() -> None:
    host, own = ("host", "localhost"), ("content-type", "application/json")
    for extra, status in (
        (("host", "localhost"), 403),
        (("content-type", "text/plain"), 415),
        (("content-type", "application/json"), 415),
    ):
        refused = http_refusal("POST", [host, own, extra])
        assert refused is not None and refused[0] == status


def test_names_are_those_of_the_config_and_any_with_a_key() -> None:
    config = InferenceConfig(allowed_hosts=["prl.example.org"])
    assert http_refusal("GET", [("host", "prl.example.org:80")], config.allowed_hosts) is None
    refused = http_refusal("GET", [("host", "x.prl.example.org")], config.allowed_hosts)
    assert refused is not None and refused[0] == 403
    assert http_refusal("GET", [("host", "node-7:8000")], None) is None
    refused = http_refusal("GET", [("host", "node-7:8000"), ("origin", "http://evil.example")], None)
    assert refused is not None and refused[0] == 403
    for wrong in ("prl.example.org:80", "http://x", "*", ""):
        with pytest.raises(ValueError, match="allowed_hosts"):
            InferenceConfig(allowed_hosts=[wrong])
