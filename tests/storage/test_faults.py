"""What stores do wrong, and the right outcome, through both transports, from a real server that does it.

Each test of a fault has its mutation: the policy that handles it switched off, with which the fault must come through.
"""

from __future__ import annotations

import concurrent.futures
import os
import time

import pytest

from streamshard.errors import StorageError
from streamshard.storage.fault import from_status
from streamshard.storage.open import open_store
from streamshard.storage.policy import StoragePolicy
from streamshard.storage.store import Range
from streamshard.testing import faults
from tests.storage.conftest import FAST, fast

DATA = os.urandom(600_000)
START, STOP = 10_000, 500_000
WANTED = DATA[START:STOP]


@pytest.fixture(autouse=True)
def good_weather(server):
    server.script()
    server.rules()
    server.put("bucket/place/key", DATA)
    server.clear()


@pytest.fixture
def read(server, transport):
    """Read the range through a fresh store: read(policy) -> bytes."""

    def read(policy=FAST, url="s3://bucket/place"):
        return open_store(url, server.storage_options, transport=transport, policy=policy).get("key", START, STOP)

    return read


ONCE = fast(attempts=1, deadline_s=0.0)  # the mutation: nothing is tried again


def starts(server):
    """The first byte of each GET."""
    return [int(entry["range"].removeprefix("bytes=").partition("-")[0]) for entry in server.gets()]


def test_one_get_is_one_request(server, read):
    assert read() == WANTED
    assert [entry["range"] for entry in server.log()] == [f"bytes={START}-{STOP - 1}"]


BROKEN = {
    "503 SlowDown three times": [faults.status(503)] * 3,
    "429": [faults.status(429)],
    "500": [faults.status(500)],
    "502": [faults.status(502)],
    "400 RequestTimeout": [faults.status(400, "RequestTimeout")],
    "closed before the answer": [faults.close(), faults.close()],
    "reset in the body": [faults.reset(after=200_000)],
    "cut under a larger Content-Length": [faults.cut(after=200_000)],
    "short 206 with consistent lengths": [faults.short(by=1000)],
    "range ignored": [faults.ignore_range()],
    "shifted Content-Range": [faults.shift(by=5)],
    "no Content-Length and cut": [faults.no_length(after=200_000)],
    "stall": [faults.stall(after=200_000)],
}


@pytest.mark.parametrize("script", BROKEN.values(), ids=BROKEN)
def test_a_broken_answer_is_asked_for_again_and_the_bytes_are_right(server, read, script):
    server.script(*script)
    assert read() == WANTED
    assert server.log()[-1]["do"] == "ok"


@pytest.mark.parametrize("script", BROKEN.values(), ids=BROKEN)
def test_without_the_retry_policy_the_same_fault_is_an_error(server, read, script):
    server.script(*script)
    with pytest.raises(StorageError, match="s3://bucket/place/key"):
        read(ONCE)


@pytest.mark.parametrize("fault", [faults.cut(after=200_000), faults.reset(after=200_000), faults.stall(after=200_000)])
def test_a_broken_range_goes_on_from_the_byte_reached_and_is_pinned(server, read, fault):
    server.script(fault)
    assert read() == WANTED
    first, second = server.gets()
    assert starts(server)[0] == START
    assert START + 100_000 < starts(server)[1] <= START + 200_000
    assert not first["if_match"]
    assert second["if_match"]


@pytest.mark.parametrize(
    "fault", [faults.short(by=1000), faults.ignore_range(), faults.shift(by=5), faults.no_length(after=1000)]
)
def test_a_wrong_answer_for_ever_is_an_error_that_says_corrupt(server, read, fault):
    server.script(*[fault] * 20)
    with pytest.raises(StorageError, match="corrupt") as caught:
        read()
    assert caught.value.kind == "corrupt"
    assert len(server.gets()) == FAST.attempts


def test_an_object_that_is_too_short_is_corrupt_at_once(server, read):
    server.put("bucket/place/key", DATA[:20_000])
    with pytest.raises(StorageError, match="the object has 20000 bytes") as caught:
        read()
    assert caught.value.kind == "corrupt"
    assert len(server.gets()) == 1


def test_a_named_pause_is_kept_by_everybody(server, transport):
    """429 with Retry-After: 2 on one of several requests: none is sent for two seconds."""
    store = open_store(
        "s3://bucket/place",
        server.storage_options,
        transport=transport,
        policy=StoragePolicy(limit_start=1, limit_max=1),
    )
    server.script(faults.status(429, retry_after=2))
    wanted = [store.fetch(Range("key", 0, 1000)) for _ in range(4)]
    assert [future.result(timeout=30).data for future in wanted] == [DATA[:1000]] * 4
    times = [entry["time"] for entry in server.gets()]
    assert times[1] - times[0] >= 2.0
    assert len(times) == 5


def test_without_heeding_retry_after_the_pause_is_shorter(server, transport):
    policy = StoragePolicy(retry_after_cap_s=0.0, throttle_backoff_s=0.1)
    store = open_store("s3://bucket/place", server.storage_options, transport=transport, policy=policy)
    server.script(faults.status(429, retry_after=2))
    store.get("key", 0, 1000)
    times = [entry["time"] for entry in server.gets()]
    assert times[1] - times[0] < 1.0


def test_throttling_without_end_is_an_error_at_the_deadline(server, read):
    server.rules(outage_s=60)
    began = time.monotonic()
    with pytest.raises(
        StorageError,
        match=rf"gave up on {server.endpoint}/bucket after 3\.\d s .*throttle.*SlowDown.*higher request rate",
    ) as caught:
        read(StoragePolicy(deadline_s=3.0))
    assert 2.9 < time.monotonic() - began < 4.0
    assert caught.value.kind == "throttle"


def test_a_stall_and_a_drip_below_the_floor_are_cut_and_a_drip_above_goes_on(server, read):
    policy = fast(stall_s=0.5, floor_bytes_s=100_000)
    server.script(faults.drip(rate=40_000, after=200_000))
    assert read(policy) == WANTED
    assert len(server.gets()) == 2
    assert starts(server)[1] > START + 100_000
    server.clear()
    server.script(faults.drip(rate=300_000, after=100))
    assert read(policy) == WANTED
    assert len(server.gets()) == 1


def test_without_a_floor_a_drip_is_waited_for(server, read):
    server.script(faults.drip(rate=150_000, after=400_000))
    assert read(fast(stall_s=5.0, floor_bytes_s=0.0)) == WANTED
    assert len(server.gets()) == 1


@pytest.mark.parametrize(
    ("fault", "kind", "cure"),
    [
        (faults.status(403), "denied", "check the credentials"),
        (faults.status(403, "RequestTimeTooSkewed"), "denied", "clock"),
        (faults.status(403, "SignatureDoesNotMatch"), "denied", "secret"),
        (faults.status(400, "AuthorizationHeaderMalformed"), "denied", "region"),
        (faults.status(404), "missing", "check the URL"),
        (faults.status(400, "ExpiredToken"), "expired", "pass fresh ones"),
    ],
)
def test_what_asking_again_cannot_mend_is_an_error_at_once(server, read, fault, kind, cure):
    server.script(*[fault] * 3)
    began = time.monotonic()
    with pytest.raises(StorageError, match=cure) as caught:
        read(StoragePolicy())
    assert caught.value.kind == kind
    assert len(server.gets()) == 1
    assert time.monotonic() - began < 5.0


def test_the_deadline_names_how_often_and_why(server, read):
    server.script(*[faults.status(500)] * 20)
    with pytest.raises(StorageError, match=r"6 failed requests \(6 transient\); the last: status 500 InternalError"):
        read()


def test_an_object_replaced_between_two_ranges_is_an_error_that_names_both_versions(server, transport):
    store = open_store("s3://bucket/place", server.storage_options, transport=transport, policy=FAST)
    first = store.fetch(Range("key", 0, 1000)).result()
    server.script(faults.replace())
    with pytest.raises(StorageError, match="was replaced while") as caught:
        store.fetch(Range("key", 1000, 2000, tag=first.tag)).result()
    assert caught.value.kind == "changed"
    assert first.tag in str(caught.value)
    assert store.stat("key").tag in str(caught.value)
    assert first.tag != store.stat("key").tag


def test_where_the_store_ignores_the_condition_the_tag_of_its_answer_is_compared(server, transport):
    server.rules(ignore_if_match=True)
    store = open_store("s3://bucket/place", server.storage_options, transport=transport, policy=FAST)
    first = store.fetch(Range("key", 0, 1000)).result()
    server.script(faults.replace())
    with pytest.raises(StorageError, match="was replaced while") as caught:
        store.fetch(Range("key", 1000, 2000, tag=first.tag)).result()
    assert caught.value.kind == "changed"


def test_unpinned_a_replaced_object_would_be_mixed(server, transport):
    """The mutation of the two tests above."""
    store = open_store("s3://bucket/place", server.storage_options, transport=transport, policy=FAST)
    store.fetch(Range("key", 0, 1000)).result()
    server.script(faults.replace())
    assert store.fetch(Range("key", 1000, 2000)).result().data == DATA[::-1][1000:2000]


def test_a_continued_range_is_never_mixed_from_two_versions(server, read):
    server.script(faults.cut(after=200_000), faults.replace())
    with pytest.raises(StorageError, match="was replaced while"):
        read()


def test_gcs_ranges_are_pinned_by_generation(server, transport):
    store = open_store("gs://bucket/place", server.gcs_options, transport=transport, policy=FAST)
    first = store.fetch(Range("key", 0, 1000)).result()
    assert first.tag.isdigit()
    assert store.fetch(Range("key", 1000, 2000, tag=first.tag)).result().data == DATA[1000:2000]
    server.put("bucket/place/key", DATA[::-1])
    with pytest.raises(StorageError) as caught:
        store.fetch(Range("key", 1000, 2000, tag=first.tag)).result()
    assert caught.value.kind in ("changed", "missing")


@pytest.mark.parametrize(
    "script", [BROKEN["503 SlowDown three times"], BROKEN["reset in the body"], BROKEN["range ignored"]]
)
def test_gcs_answers_are_judged_in_the_same_way(server, transport, script):
    server.script(*script)
    store = open_store("gs://bucket/place", server.gcs_options, transport=transport, policy=FAST)
    assert store.get("key", START, STOP) == WANTED


PROCESS = """
import datetime, json, os, pathlib
count = pathlib.Path(os.environ["COUNT"])
number = int(count.read_text() or 0) if count.exists() else 0
count.write_text(str(number + 1))
ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
print(json.dumps({"Version": 1, "AccessKeyId": "AK", "SecretAccessKey": "SK", "SessionToken": f"token-{number}",
                  "Expiration": ends.isoformat()}))
"""


@pytest.fixture
def renewing_credentials(tmp_path, monkeypatch):
    """A profile whose credential_process gives token-0, token-1, ... as refreshable credentials."""
    (tmp_path / "give.py").write_text(PROCESS)
    config = f"[profile renewing]\nregion = us-east-1\ncredential_process = {os.sys.executable} {tmp_path}/give.py\n"
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "renewing")
    monkeypatch.setenv("COUNT", str(tmp_path / "count"))


def test_an_expired_token_is_renewed_once_where_it_can_be(server, transport, renewing_credentials):
    server.rules(tokens=["token-1"])
    store = open_store("s3://bucket/place", {"endpoint_url": server.endpoint}, transport=transport, policy=FAST)
    assert store.get("key", START, STOP) == WANTED
    assert [entry["token"] for entry in server.log()] == ["token-0", "token-1"]


def test_an_expired_token_is_renewed_where_the_answer_to_a_head_does_not_say_so(
    server, transport, renewing_credentials
):
    server.rules(tokens=["token-1"])
    store = open_store("s3://bucket/place", {"endpoint_url": server.endpoint}, transport=transport, policy=FAST)
    assert store.stat("key").size == len(DATA)


def test_many_requests_that_hear_of_it_together_renew_once(server, transport, renewing_credentials, tmp_path):
    server.rules(tokens=["token-1"])
    store = open_store("s3://bucket/place", {"endpoint_url": server.endpoint}, transport=transport, policy=FAST)
    wanted = [store.fetch(Range("key", 0, 1000)) for _ in range(20)]
    assert [bytes(future.result(timeout=30).data) for future in wanted] == [DATA[:1000]] * 20
    assert int((tmp_path / "count").read_text()) == 2


def test_a_token_that_is_expired_again_is_an_error_at_once(server, transport, renewing_credentials):
    server.rules(tokens=["never"])
    store = open_store("s3://bucket/place", {"endpoint_url": server.endpoint}, transport=transport, policy=FAST)
    with pytest.raises(StorageError, match="expired") as caught:
        store.get("key", START, STOP)
    assert caught.value.kind == "expired"
    assert len(server.log()) == 2


def test_status_codes_and_error_codes_have_one_meaning():
    kinds = {
        (503, ""): "throttle", (429, ""): "throttle", (503, "SlowDown"): "throttle", (400, "Throttling"): "throttle",
        (403, "rateLimitExceeded"): "throttle", (500, ""): "transient", (599, ""): "transient", (504, ""): "timeout",
        (408, ""): "timeout", (400, "RequestTimeout"): "timeout", (412, ""): "changed", (404, ""): "missing",
        (403, ""): "denied", (401, ""): "denied", (400, "ExpiredToken"): "expired", (403, "ExpiredToken"): "expired",
        (416, ""): "corrupt", (400, ""): "denied", (405, ""): "denied",
    }  # fmt: skip
    assert {place: from_status(*place, "").kind for place in kinds} == kinds
    assert from_status(401, "", "Invalid Credentials").kind == "expired"


def test_a_cancelled_fetch_ends_its_request(server, transport):
    store = open_store("s3://bucket/place", server.storage_options, transport=transport, policy=FAST)
    server.script(faults.ok(delay=30))
    future = store.fetch(Range("key", 0, 1000))
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(timeout=0.3)
    future.cancel()
    assert store.get("key", 0, 1000) == DATA[:1000]
    assert store.counters().in_flight == 0


def test_a_conditional_write_whose_answer_was_lost_is_known_as_ones_own(server, transport):
    """The object is there and is what was written: nobody else has won."""
    store = open_store("s3://bucket/place", server.storage_options, transport=transport, policy=FAST)
    inner = store._stack().inner
    sent = inner.put_if

    async def answered_twice(key, data, tag):  # what aiohttp does when a connection drops after the request was sent
        await sent(key, data, tag)
        return False

    inner.put_if = answered_twice
    assert store.put_if("fresh-" + transport, b"mine", tag=None)
