"""The result and the counters for each answer of a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.s3 import S3Storage
from pages import blank, hash_of, page, space
from s3_kit import name_of
from s3_script import END, RESET, Answer, ScriptedS3, deletion, error, listing, reply, size
from servers import make_certificates

from hicache_storage.backend_support.answers import unanswered_in
from hicache_storage.errors import ConfigError, StorageTimeout, StorageUnavailable
from hicache_storage.storage import PageTimes

NBYTES = 4096
RIGHT = page(seed=1)
OK = reply(200)
HIT = reply(200, RIGHT.tobytes())
SLOW_DOWN = error(503, "SlowDown")
FAULT = error(500, "InternalError")


@pytest.fixture
def server() -> Iterator[ScriptedS3]:
    with ScriptedS3() as scripted:
        yield scripted


def storage(server: ScriptedS3, *answers: Answer, **fields: Any) -> S3Storage:
    """Open a store on a server with these answers for objects."""
    opened = S3Storage.from_config(server.config(**fields))
    server.script.extend(answers)
    return opened


def got(store: S3Storage) -> bytes | None:
    target = blank()
    return target.tobytes() if store.batch_get(space(), [hash_of(1)], [target])[0] else None


def set_(store: S3Storage) -> bool:
    return store.batch_set(space(), [hash_of(1)], [RIGHT])[0]


def counters(store: S3Storage) -> dict[str, int]:
    return dict(store.stats().counters)


@pytest.mark.parametrize(
    "modified", ["", "x", "Mon, 20 Nov 1995 19:12:08 +99999999999", "Mon, 20 Nov 99999999999 1:1:1"]
)
def test_a_page_with_a_date_that_is_none_has_no_time(server: ScriptedS3, modified: str) -> None:
    answer = reply(200, headers={"last-modified": modified})
    with storage(server, answer) as store:
        assert [PageTimes()] == store.page_times(space(), [hash_of(1)])


class TestBucket:
    @pytest.mark.parametrize(
        ("code", "advice"),
        [
            ("InvalidAccessKeyId", "does not know the access key id"),
            ("SignatureDoesNotMatch", "the secret access key is not that of the access key id"),
            ("AccessDenied", "the policy of these credentials"),
            ("RequestTimeTooSkewed", "synchronize the clock"),
        ],
    )
    def test_a_denial_says_what_is_wrong(self, server: ScriptedS3, code: str, advice: str) -> None:
        """The answer to the HEAD has no body, so a GET asks the server for the error code."""
        server.bucket_script.extend([Answer(b"HTTP/1.1 403 No\r\n\r\n"), error(403, code)])

        with pytest.raises(ConfigError, match=rf"pages denies access .403 {code}.: .*{advice}"):
            storage(server)

    @pytest.mark.parametrize(
        ("status", "kind", "message"),
        [
            (301, ConfigError, "region: bucket pages is not served there"),
            (403, ConfigError, "bucket: pages denies access"),
            (404, ConfigError, "bucket: pages is not there"),
            (503, StorageUnavailable, "answers 503"),
        ],
    )
    def test_a_bucket_error_is_raised_at_once(
        self, server: ScriptedS3, status: int, kind: type[Exception], message: str
    ) -> None:
        server.of_bucket = Answer(
            f"HTTP/1.1 {status} No\r\nx-amz-bucket-region: eu-west-1\r\n\r\n".encode()
        )

        with pytest.raises(kind, match=message):
            storage(server)

    def test_an_anonymous_user_gets_an_error_that_asks_for_credentials(
        self, server: ScriptedS3
    ) -> None:
        config = {**server.config(anonymous=True)}
        del config["access_key_id"], config["secret_access_key"]
        for status in (400, 401, 403):
            server.of_bucket = Answer(f"HTTP/1.1 {status} No\r\n\r\n".encode())
            with pytest.raises(ConfigError, match=rf"anonymous: .*{status}.*give credentials"):
                S3Storage.from_config(config)

    def test_a_refusal_that_names_a_region_yields_the_region_to_set(
        self, server: ScriptedS3
    ) -> None:
        server.of_bucket = Answer(
            b"HTTP/1.1 400 No\r\nx-amz-bucket-region: eu-west-1\r\ncontent-length: 0\r\n\r\n"
        )
        with pytest.raises(ConfigError, match="set its region, eu-west-1"):
            storage(server)

    def test_a_refusal_without_a_region_does_not_blame_it_alone(self, server: ScriptedS3) -> None:
        server.of_bucket = Answer(b"HTTP/1.1 400 No\r\ncontent-length: 0\r\n\r\n")
        with pytest.raises(ConfigError, match="credentials have not expired"):
            storage(server)

    def test_a_store_that_is_down_is_named_with_port_and_error_number(self) -> None:
        with ScriptedS3() as gone:
            config = gone.config()
        with pytest.raises(StorageUnavailable) as caught:
            S3Storage.from_config(config)
        address = config["endpoint_url"].removeprefix("http://")
        assert str(caught.value) == (
            f"s3: {address} cannot be reached: Connection refused (errno 111)"
        )

    def test_the_advice_for_an_unknown_host_reaches_the_user(self, server: ScriptedS3) -> None:
        config = server.config(endpoint_url="http://no-such-host.invalid:9000")
        with pytest.raises(StorageUnavailable, match="is not known: check endpoint_url and region"):
            S3Storage.from_config(config)


_WHOLE = b"<ListBucketResult><IsTruncated>false</IsTruncated>%b</ListBucketResult>"
NAMES = [name_of(space(), hash_of(number)) for number in range(4)]


class TestDelete:
    def test_pages_that_the_store_reports_deleted_count_as_deleted(
        self, server: ScriptedS3
    ) -> None:
        with storage(server) as store:
            server.bucket_script.append(deletion(NAMES[0], kept=(NAMES[1],)))
            hashes = [hash_of(0), hash_of(1), hash_of(2)]

            assert store.batch_delete(space(), hashes) == [True, False, False]
            assert counters(store) == {"not_deleted": 2}

    def test_an_absent_page_is_gone_whatever_the_store_calls_it(self, server: ScriptedS3) -> None:
        one = f"<Error><Key>{NAMES[0]}</Key><Code>NoSuchKey</Code></Error>"
        with storage(server) as store:
            server.bucket_script.append(reply(200, f"<DeleteResult>{one}</DeleteResult>".encode()))

            assert store.batch_delete(space(), [hash_of(0)]) == [True]

    @pytest.mark.parametrize("body", [b"", b"<html>we are back soon</html>", b"<DeleteResult/>"])
    def test_an_answer_that_names_no_page_deletes_none(
        self, server: ScriptedS3, body: bytes
    ) -> None:
        with storage(server) as store:
            server.bucket_script.append(reply(200, body))
            assert store.batch_delete(space(), [hash_of(0)]) == [False]

    def test_a_page_that_is_named_as_gone_and_as_kept_is_kept(self, server: ScriptedS3) -> None:
        both = (
            f"<Deleted><Key>{NAMES[0]}</Key></Deleted>"
            f"<Error><Key>{NAMES[0]}</Key><Code>InternalError</Code></Error>"
        )
        with storage(server) as store:
            server.bucket_script.append(reply(200, f"<DeleteResult>{both}</DeleteResult>".encode()))

            assert store.batch_delete(space(), [hash_of(0)]) == [False]

    @pytest.mark.parametrize("body", [b"<DeleteResult><Deleted>", b"\0", b"<Error></Error>"])
    def test_an_answer_that_is_none_is_unavailable(self, server: ScriptedS3, body: bytes) -> None:
        with storage(server) as store:
            server.bucket_script.append(reply(200, body))
            with pytest.raises(StorageUnavailable):
                store.batch_delete(space(), [hash_of(0)])


class TestListing:
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"<html>we are back soon</html>",
            b"<ListBucketResult>",
            b"<ListBucketResult></ListBucketResult>",
            b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
            _WHOLE % b"<Contents><Size>1</Size></Contents>",
            _WHOLE % b"<Contents><Key>k</Key><Size>x</Size></Contents>",
        ],
    )
    def test_an_answer_that_is_no_listing_is_no_empty_bucket(
        self, server: ScriptedS3, body: bytes
    ) -> None:
        with storage(server) as store:
            server.of_bucket = reply(200, body)
            for call in (
                lambda: list(store.scan(space())),
                lambda: list(store.spaces()),
                lambda: store.clear(space()),
            ):
                with pytest.raises(StorageUnavailable, match=r"can't be read|refuses ListObjects"):
                    call()

    def test_a_listing_that_turns_in_a_circle_ends(self, server: ScriptedS3) -> None:
        with storage(server) as store:
            server.of_bucket = listing(NAMES[0], nbytes=NBYTES, following="again")
            with pytest.raises(StorageUnavailable, match="stops before its end"):
                list(store.scan(space()))

    def test_an_object_that_the_answer_has_twice_is_listed_once(self, server: ScriptedS3) -> None:
        with storage(server) as store:
            server.of_bucket = listing(NAMES[0], NAMES[1], NAMES[1], nbytes=NBYTES)

            assert [one.page_hash for one in store.scan(space())] == [hash_of(0), hash_of(1)]

    def test_names_beside_the_prefix_are_nobodys_pages(self, server: ScriptedS3) -> None:
        """A store may ignore the prefix of the request."""
        foreign = [name_of(space(), hash_of(0)).partition("/")[2], f"other/{NAMES[1]}"]
        with storage(server) as store:
            server.of_bucket = listing(*foreign, nbytes=NBYTES)

            assert list(store.scan(space())) == []
            assert store.clear(space()) == 0


class TestClear:
    def test_it_goes_through_all_of_the_listing(self, server: ScriptedS3) -> None:
        with storage(server) as store:
            server.bucket_script.extend(
                [
                    listing(*NAMES[:2], nbytes=NBYTES, following="more"),
                    deletion(*NAMES[:2]),
                    listing(*NAMES[2:], nbytes=NBYTES),
                    deletion(*NAMES[2:]),
                ]
            )
            assert store.clear(space()) == 4

    def test_a_page_that_stays_raises_after_all_others_are_removed(
        self, server: ScriptedS3
    ) -> None:
        with storage(server) as store:
            server.bucket_script.extend(
                [
                    listing(*NAMES[:2], nbytes=NBYTES, following="more"),
                    deletion(NAMES[0], kept=(NAMES[1],)),
                    listing(*NAMES[2:], nbytes=NBYTES),
                    deletion(*NAMES[2:]),
                ]
            )
            with pytest.raises(
                StorageUnavailable, match=r"1 page not deleted \(AccessDenied\), 3 deleted"
            ):
                store.clear(space())

    def test_a_store_that_fails_in_the_middle_is_no_partial_count(self, server: ScriptedS3) -> None:
        with storage(server, max_attempts=1) as store:
            server.bucket_script.extend(
                [
                    listing(*NAMES[:2], nbytes=NBYTES, following="more"),
                    deletion(*NAMES[:2]),
                    SLOW_DOWN,
                ]
            )
            with pytest.raises(
                StorageUnavailable, match=r"SlowDown; 2 pages cleared so far: clear it"
            ):
                store.clear(space())


def test_a_server_that_refuses_to_the_end_is_unavailable() -> None:
    with ScriptedS3() as gone:
        store = storage(gone, max_attempts=1000, timeout_s=0.5)
    with store, pytest.raises(StorageUnavailable, match="cannot be reached"):
        got(store)


@pytest.mark.usefixtures("transport")
class TestGet:
    def test_404_is_a_miss(self, server: ScriptedS3) -> None:
        with storage(server, error(404, "NoSuchKey")) as store:
            assert got(store) is None
            assert counters(store) == {"absent": 1}

    def test_404_of_the_bucket_is_no_miss(self, server: ScriptedS3) -> None:
        with (
            storage(server, error(404, "NoSuchBucket")) as store,
            pytest.raises(StorageUnavailable, match="bucket pages is not there"),
        ):
            got(store)

    def test_403_is_unavailable_and_names_the_fields_to_check(self, server: ScriptedS3) -> None:
        with storage(server, error(403, "AccessDenied")) as store:
            with pytest.raises(StorageUnavailable, match=r"denies access .403 AccessDenied"):
                got(store)
            assert counters(store) == {"denied": 1, "failed": 1}

    def test_403_of_one_page_is_a_miss_of_that_page(self, server: ScriptedS3) -> None:
        with storage(server, HIT, error(403, "AccessDenied"), HIT) as store:
            targets = [blank(), blank(), blank()]
            hashes = [hash_of(1), hash_of(2), hash_of(3)]

            hits = store.batch_get(space(), hashes, targets)

            assert ([True, False, True], frozenset({1})) == (hits, unanswered_in(hits))

    def test_500_is_tried_again(self, server: ScriptedS3) -> None:
        with storage(server, FAULT, HIT) as store:
            assert got(store) == RIGHT.tobytes()
            assert counters(store) == {"server_errors": 1, "retries": 1}

    def test_503_is_tried_again_as_often_as_allowed(self, server: ScriptedS3) -> None:
        with storage(server, *[SLOW_DOWN] * 3, HIT) as store:
            with pytest.raises(StorageUnavailable, match="503 SlowDown"):
                got(store)
            assert counters(store) == {"slow_downs": 3, "retries": 2, "failed": 1}

    def test_a_reset_is_tried_again(self, server: ScriptedS3) -> None:
        with storage(server, RESET, HIT) as store:
            assert got(store) == RIGHT.tobytes()
            assert counters(store) == {"reconnects": 1}

    def test_a_reset_of_a_new_connection_is_counted(self, server: ScriptedS3) -> None:
        with storage(server, RESET, RESET, HIT) as store:
            assert got(store) == RIGHT.tobytes()
            assert counters(store) == {"reconnects": 1, "resets": 1, "retries": 1}

    def test_a_truncated_body_is_tried_again(self, server: ScriptedS3) -> None:
        cut = Answer(HIT.data[:-1], "end")
        with storage(server, cut, HIT) as store:
            assert got(store) == RIGHT.tobytes()
            assert counters(store) == {"truncated": 1, "retries": 1}

    def test_a_page_whose_body_always_ends_early_is_a_miss_beside_others(
        self, server: ScriptedS3
    ) -> None:
        """A lost read leaves no doubt about the store, so the other pages of its batch are hits."""
        cut = Answer(HIT.data[:-1], "end")
        with storage(server, cut, cut, cut, HIT, max_attempts=3, fan_out=1) as store:
            targets = [blank(NBYTES), blank(NBYTES)]
            assert [False, True] == store.batch_get(space(), [hash_of(1), hash_of(2)], targets)

    @pytest.mark.parametrize("nbytes", [0, NBYTES - 1, NBYTES + 1, 10 * NBYTES])
    def test_an_object_of_another_size_is_a_miss(self, server: ScriptedS3, nbytes: int) -> None:
        with storage(server, reply(200, bytes(nbytes))) as store:
            assert got(store) is None
            assert counters(store) == {"wrong_size": 1}

    def test_a_body_without_a_length_is_a_miss(self, server: ScriptedS3) -> None:
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1000\r\n"
        chunked = Answer(head + RIGHT.tobytes() + b"\r\n0\r\n\r\n")
        with storage(server, chunked) as store:
            assert got(store) is None

    def test_a_malformed_reply_is_unavailable(self, server: ScriptedS3) -> None:
        with storage(server, *[Answer(b"SSH-2.0-OpenSSH\r\n\r\n", "end")] * 3) as store:
            with pytest.raises(StorageUnavailable, match="broke the connection"):
                got(store)
            assert counters(store)["malformed"] == 3

    def test_a_redirect_names_the_region(self, server: ScriptedS3) -> None:
        moved = reply(301, headers={"x-amz-bucket-region": "eu-west-1"})
        with storage(server, moved) as store:
            with pytest.raises(StorageUnavailable, match="set region to eu-west-1"):
                got(store)
            assert counters(store) == {"redirects": 1, "failed": 1}

    def test_another_answer_is_unavailable(self, server: ScriptedS3) -> None:
        with storage(server, error(400, "InvalidRequest")) as store:
            with pytest.raises(StorageUnavailable, match="400 InvalidRequest"):
                got(store)
            assert counters(store) == {"refused": 1, "failed": 1}

    def test_retries_end_with_the_call(self, server: ScriptedS3) -> None:
        with (
            storage(server, *[SLOW_DOWN] * 1000, max_attempts=1000, timeout_s=0.5) as store,
            pytest.raises(StorageTimeout),
        ):
            got(store)


@pytest.mark.usefixtures("transport")
class TestExists:
    def test_the_size_must_be_right(self, server: ScriptedS3) -> None:
        with storage(server, size(NBYTES), size(NBYTES - 1)) as store:
            assert store.batch_exists(space(), [hash_of(1), hash_of(2)]) == [True, False]
            assert counters(store) == {"wrong_size": 1}

    def test_an_answer_without_a_length_is_not_absent(self, server: ScriptedS3) -> None:
        with storage(server, Answer(b"HTTP/1.1 200 OK\r\n\r\n")) as store:
            with pytest.raises(StorageUnavailable, match="without a length"):
                store.batch_exists(space(), [hash_of(1)])
            assert counters(store) == {"failed": 1}

    def test_404_is_absent(self, server: ScriptedS3) -> None:
        with storage(server, Answer(b"HTTP/1.1 404 Not Found\r\n\r\n")) as store:
            assert store.batch_exists(space(), [hash_of(1)]) == [False]


@pytest.mark.usefixtures("transport")
class TestSet:
    def test_a_small_page_takes_one_conditional_put(self, server: ScriptedS3) -> None:
        with storage(server, OK) as store:
            assert set_(store)
        (request,) = server.requests
        assert (request.method, request.body) == ("PUT", RIGHT.tobytes())
        assert b"if-none-match: *" in request.head

    def test_412_is_present_if_the_size_is_right(self, server: ScriptedS3) -> None:
        with storage(server, error(412, "PreconditionFailed"), size(NBYTES)) as store:
            assert set_(store)
            assert counters(store) == {"present": 1}

    def test_412_of_another_size_is_replaced(self, server: ScriptedS3) -> None:
        with storage(server, error(412, "PreconditionFailed"), size(1), OK) as store:
            assert set_(store)
            assert counters(store) == {"replaced": 1}
        assert ["PUT", "HEAD", "PUT"] == server.methods
        assert b"if-none-match" not in server.requests[-1].head

    def test_a_large_page_is_looked_up_first(self, server: ScriptedS3) -> None:
        with storage(server, size(NBYTES), head_first_nbytes=NBYTES) as store:
            assert set_(store)
        assert ["HEAD"] == server.methods

    def test_a_large_page_of_another_size_is_replaced(self, server: ScriptedS3) -> None:
        with storage(server, size(NBYTES + 1), OK, head_first_nbytes=NBYTES) as store:
            assert set_(store)
        assert b"if-none-match" not in server.requests[-1].head

    def test_501_of_the_condition_is_remembered(self, server: ScriptedS3) -> None:
        with storage(server, error(501, "NotImplemented"), OK, OK) as store:
            assert set_(store)
            assert set_(store)
        assert [True, False, False] == [b"if-none-match" in one.head for one in server.requests]

    def test_409_is_tried_again(self, server: ScriptedS3) -> None:
        with storage(server, error(409, "ConditionalRequestConflict"), OK) as store:
            assert set_(store)
            assert counters(store) == {"conflicts": 1, "retries": 1}

    def test_409_to_the_end_is_unavailable_unless_it_is_there(self, server: ScriptedS3) -> None:
        conflicts = [error(409, "OperationAborted")] * 3
        with storage(server, *conflicts, size(NBYTES), *conflicts) as store:
            assert set_(store)
            with pytest.raises(StorageUnavailable, match="409 OperationAborted"):
                set_(store)
            assert counters(store)["conflicts"] == 6

    def test_503_of_one_page_refuses_that_page(self, server: ScriptedS3) -> None:
        with storage(server, OK, *[SLOW_DOWN] * 3, OK) as store:
            hashes = [hash_of(1), hash_of(2), hash_of(3)]

            assert store.batch_set(space(), hashes, [RIGHT] * 3) == [True, False, True]
            assert counters(store) == {"slow_downs": 3, "retries": 2, "failed": 1}

    def test_500_is_looked_up_before_it_is_refused(self, server: ScriptedS3) -> None:
        with storage(server, *[FAULT] * 3, size(NBYTES)) as store:
            assert set_(store)
            assert counters(store) == {"server_errors": 3, "retries": 2, "confirmed": 1}

    def test_500_that_wrote_nothing_refuses_the_page(self, server: ScriptedS3) -> None:
        absent = Answer(b"HTTP/1.1 404 Not Found\r\n\r\n")
        with storage(server, OK, *[FAULT] * 3, absent) as store:
            assert store.batch_set(space(), [hash_of(1), hash_of(2)], [RIGHT] * 2) == [True, False]

    def test_507_is_a_refusal_for_lack_of_capacity(self, server: ScriptedS3) -> None:
        with storage(server, error(507, "InsufficientStorage")) as store:
            assert not set_(store)
            assert counters(store) == {"refused_no_space": 1}

    def test_507_after_a_gateway_gave_up_is_no_refusal(self, server: ScriptedS3) -> None:
        """The store may still carry out the first attempt, so False could become wrong."""
        answers = [
            error(504, "GatewayTimeout"),
            error(507, "InsufficientStorage"),
            Answer(b"HTTP/1.1 404 Not Found\r\n\r\n"),
        ]
        with storage(server, *answers) as store, pytest.raises(StorageUnavailable, match="507"):
            set_(store)

    def test_507_to_a_put_that_was_sent_before_is_looked_up(self, server: ScriptedS3) -> None:
        """The server that ended the idle connection may have carried out the put."""
        with storage(server, OK, END, error(507, "QuotaExceeded"), size(NBYTES)) as store:
            store.batch_set(space(), [hash_of(2)], [RIGHT])

            assert set_(store)
            assert counters(store) == {"reconnects": 1, "confirmed": 1}

    def test_507_to_a_put_that_was_sent_before_and_is_absent_is_a_refusal(
        self, server: ScriptedS3
    ) -> None:
        absent = Answer(b"HTTP/1.1 404 Not Found\r\n\r\n")
        with storage(server, OK, END, error(507, "QuotaExceeded"), absent) as store:
            store.batch_set(space(), [hash_of(2)], [RIGHT])

            assert not set_(store)
            assert counters(store) == {"reconnects": 1, "refused_no_space": 1}

    def test_a_look_up_that_fails_leaves_a_put_in_doubt(self, server: ScriptedS3) -> None:
        answers = [OK, *[FAULT] * 3, error(403, "AccessDenied")]
        with (
            storage(server, *answers) as store,
            pytest.raises(StorageUnavailable, match="denies access"),
        ):
            store.batch_set(space(), [hash_of(1), hash_of(2)], [RIGHT] * 2)

    def test_an_exceeded_quota_is_a_refusal_for_lack_of_capacity(self, server: ScriptedS3) -> None:
        with storage(server, error(403, "QuotaExceeded")) as store:
            assert not set_(store)
            assert counters(store) == {"refused_no_space": 1}

    def test_a_lost_reply_is_no_refusal(self, server: ScriptedS3) -> None:
        """The server has read the whole page, which may appear later, so False could become wrong."""
        lost = [
            END
        ] * 4  # the first one ends an idle connection, which does not count as an attempt
        with (
            storage(server, OK, *lost, Answer(b"HTTP/1.1 404 Not Found\r\n\r\n")) as store,
            pytest.raises(StorageUnavailable, match="closed the connection"),
        ):
            store.batch_set(space(), [hash_of(1), hash_of(2)], [RIGHT] * 2)

    def test_a_lost_reply_of_a_page_that_is_there_is_a_success(self, server: ScriptedS3) -> None:
        with storage(server, *[END] * 4, size(NBYTES)) as store:
            assert set_(store)
            assert counters(store)["confirmed"] == 1

    def test_an_early_refusal_is_read_though_the_connection_ends(self, server: ScriptedS3) -> None:
        big = space(page_nbytes=8 << 20)
        with (
            storage(
                server, error(403, "AccessDenied", "early"), head_first_nbytes=1 << 30
            ) as store,
            pytest.raises(StorageUnavailable, match="denies access"),
        ):
            store.batch_set(big, [hash_of(1)], [page(8 << 20)])

    def test_a_success_before_all_was_sent_is_none(self, server: ScriptedS3) -> None:
        big = space(page_nbytes=32 << 20)
        early = [Answer(OK.data, "early")] * 4
        with (
            storage(server, *early, head_first_nbytes=1 << 30) as store,
            pytest.raises(StorageUnavailable, match="before the request was sent"),
        ):
            store.batch_set(big, [hash_of(1)], [page(32 << 20)])


class TestChecksum:
    def test_a_wrong_one_is_a_miss_and_removed(self, server: ScriptedS3) -> None:
        wrong = reply(200, RIGHT.tobytes(), headers={"x-amz-checksum-crc32": "AAAAAA=="})
        with storage(server, wrong, reply(204), checksum="crc32") as store:
            assert got(store) is None
            assert counters(store) == {"wrong_checksum": 1}
        assert ["GET", "DELETE"] == server.methods

    def test_only_the_object_that_was_read_is_removed(self, server: ScriptedS3) -> None:
        headers = {"x-amz-checksum-crc32": "AAAAAA==", "etag": '"5d41"'}
        wrong = reply(200, RIGHT.tobytes(), headers=headers)
        with storage(server, wrong, reply(412), checksum="crc32") as store:
            assert got(store) is None
        assert b'if-match: "5d41"\r\n' in server.requests[1].head
        assert ["GET", "DELETE"] == server.methods

    def test_a_store_without_conditional_deletes_is_asked_again(self, server: ScriptedS3) -> None:
        headers = {"x-amz-checksum-crc32": "AAAAAA==", "etag": '"5d41"'}
        wrong = reply(200, RIGHT.tobytes(), headers=headers)
        refused = reply(501, b"<Error><Code>NotImplemented</Code></Error>")
        with storage(server, wrong, refused, reply(204), checksum="crc32") as store:
            assert got(store) is None
        assert ["GET", "DELETE", "DELETE"] == server.methods
        assert b"if-match" not in server.requests[2].head

    def test_it_is_requested_and_sent(self, server: ScriptedS3) -> None:
        with storage(server, OK, HIT, checksum="crc32") as store:
            assert set_(store)
            assert got(store) == RIGHT.tobytes()
        assert b"x-amz-checksum-crc32: " in server.requests[0].head
        assert b"x-amz-checksum-mode: ENABLED" in server.requests[1].head

    @pytest.mark.parametrize(
        "headers",
        [
            {"x-amz-checksum-crc32": "AAAAAA==-2"},
            {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-checksum-type": "COMPOSITE"},
        ],
    )
    def test_one_of_the_parts_of_an_upload_tells_nothing(
        self, server: ScriptedS3, headers: dict[str, str]
    ) -> None:
        answer = reply(200, RIGHT.tobytes(), headers=headers)
        with storage(server, answer, checksum="crc32") as store:
            assert got(store) == RIGHT.tobytes()
        assert ["GET"] == server.methods


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("is_tls", [False, True])
def test_bytes_behind_a_page_are_not_the_next_reply(tmp_path: Path, is_tls: bool) -> None:  # noqa: FBT001
    """Over TLS these bytes have been read from the socket with the page, so no poll of it shows them."""
    if is_tls:
        make_certificates(tmp_path)
    foreign = reply(200, page(seed=2).tobytes())
    with ScriptedS3(tmp_path if is_tls else None) as server:
        answers = [Answer(HIT.data + foreign.data), HIT]
        with storage(server, *answers) as store:
            assert [got(store), got(store)] == [RIGHT.tobytes()] * 2


class TestHeaders:
    def test_custom_headers_are_sent_and_signed(self, server: ScriptedS3) -> None:
        fields = {
            "headers": {"X-Amz-Request-Payer": "requester"},
            "put_headers": {"x-amz-storage-class": "STANDARD_IA"},
            "sse": "aws:kms",
            "sse_kms_key_id": "alias/pages",
        }
        with storage(server, OK, HIT, **fields) as store:
            set_(store)
            got(store)
        put, get = (request.head.decode() for request in server.requests)
        for line in (
            "x-amz-storage-class: STANDARD_IA",
            "x-amz-server-side-encryption: aws:kms",
            "x-amz-server-side-encryption-aws-kms-key-id: alias/pages",
        ):
            assert line in put
            assert line not in get
            assert line.partition(":")[0] in put.partition("SignedHeaders=")[2]
        assert "x-amz-request-payer: requester" in put
        assert "x-amz-request-payer: requester" in get

    def test_nothing_is_signed_for_the_anonymous(self, server: ScriptedS3) -> None:
        config = {**server.config(anonymous=True)}
        del config["access_key_id"], config["secret_access_key"]
        with S3Storage.from_config(config) as store:
            assert got(store) is None
        assert b"authorization" not in server.requests[0].head

    def test_payloads_are_not_signed_on_loopback(self, server: ScriptedS3) -> None:
        with storage(server, OK) as store:
            set_(store)
        assert b"x-amz-content-sha256: UNSIGNED-PAYLOAD" in server.requests[0].head

    def test_payloads_are_signed_on_demand(self, server: ScriptedS3) -> None:
        with storage(server, OK, sign_payload=True) as store:
            set_(store)
        assert b"UNSIGNED-PAYLOAD" not in server.requests[0].head
