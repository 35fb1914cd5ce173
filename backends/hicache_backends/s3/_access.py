"""What boto3 knows: the configuration, the endpoint, the credentials and their renewal."""

from __future__ import annotations

import functools
import ssl
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import boto3
import botocore.exceptions
import botocore.httpsession
import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.credentials import RefreshableCredentials

from hicache_backends.s3._addresses import done_in_time
from hicache_backends.s3._client import Target
from hicache_backends.s3._signing import FrozenKeys, Keys
from hicache_storage.errors import ConfigError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_backends.s3._settings import S3Settings

_NAME_THAT_NEEDS_NO_ESCAPE = "name"
_DEFAULT_REGION = "us-east-1"
# From then on botocore renews credentials, on the thread that asks for them.
_OLD_S = 15 * 60
_SPENT_S = 30
# While old keys are good, one call in so many seconds waits so long for new ones.
_TRY_AGAIN_S = 20.0
_TRY_S = 1.0


class _Credentials(Protocol):
    def get_frozen_credentials(self) -> FrozenKeys: ...


class Keyring:
    """The keys that requests are signed with. They may be renewed by whoever issued them."""

    def __init__(self, credentials: _Credentials | None) -> None:
        self._credentials = credentials
        self._next_try_s = 0.0
        self.keys: FrozenKeys | None = None
        """None: requests are not signed."""

    def renew(self, deadline_s: float) -> None:
        """See to it that `keys` are good. Old ones are, until they expire.

        Raises:
            StorageUnavailable, StorageTimeout: Who issues them does not.
        """
        credentials = self._credentials
        if credentials is None:
            return
        if not isinstance(credentials, RefreshableCredentials) or not _expires(credentials, _OLD_S):
            self.keys = credentials.get_frozen_credentials()
            return
        now_s = time.monotonic()
        is_good = self.keys is not None and not _expires(credentials, _SPENT_S)
        if is_good:
            if now_s < self._next_try_s:
                return
            self._next_try_s = now_s + _TRY_AGAIN_S
            deadline_s = min(deadline_s, now_s + _TRY_S)
        try:
            self.keys = done_in_time(credentials.get_frozen_credentials, deadline_s)
        except TimeoutError as error:
            if not is_good:
                raise StorageTimeout("s3: the credentials were not renewed in time") from error
        except (botocore.exceptions.BotoCoreError, OSError) as error:
            if not is_good:
                raise StorageUnavailable(
                    f"s3: the credentials were not renewed: {type(error).__name__}"
                ) from error


class Access:
    """A boto3 client that signs nothing itself, and what it was made of."""

    def __init__(self, settings: S3Settings) -> None:
        with config_errors():
            session = _session(settings)
            self.keyring = Keyring(None if settings.anonymous else _credentials(session, settings))
            self.client: Any = _client(session, settings)
            self.target = _target(self.client, settings)
            self._tls_verify = settings.tls_verify
            self._ca_file: str | None = settings.ca_file or _ca_file(session)

    def tls_context(self) -> ssl.SSLContext:
        """For connections to the target.

        Raises:
            ConfigError: The file of certificates can't be read.
        """
        try:
            context = ssl.create_default_context(cafile=self._ca_file)
        except OSError as error:
            raise ConfigError(f"s3: ca_file: {self._ca_file} can't be used: {error}") from error
        if not self._tls_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["http/1.1"])
        return context


@contextmanager
def config_errors() -> Generator[None, None, None]:
    """Translate what botocore says of a configuration; its messages hold no secrets."""
    try:
        yield
    except botocore.exceptions.ProfileNotFound as error:
        raise ConfigError(f"s3: profile: {error}") from error
    except botocore.exceptions.BotoCoreError as error:
        raise ConfigError(f"s3: the AWS configuration is wrong: {error}") from error


@functools.cache
def _models() -> Any:
    """botocore's loader of service models, which remembers them: made once, as it reads megabytes."""
    return botocore.session.Session().get_component("data_loader")


def _session(settings: S3Settings) -> Any:
    session = botocore.session.Session(profile=settings.profile)
    session.register_component("data_loader", _models())
    if settings.credentials_file is not None:
        session.set_config_variable("credentials_file", settings.credentials_file)
    return session


def _credentials(session: Any, settings: S3Settings) -> _Credentials:
    if settings.access_key_id is not None and settings.secret_access_key is not None:
        token = settings.session_token
        return _Fixed(
            Keys(
                settings.access_key_id,
                settings.secret_access_key.get_secret_value(),
                token.get_secret_value() if token else None,
            )
        )
    found: _Credentials | None = session.get_credentials()
    if found is None:
        raise ConfigError(
            "s3: no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,"
            " credentials_file or profile, or anonymous to true"
        )
    return found


class _Fixed:
    """Keys that came with the config."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def get_frozen_credentials(self) -> FrozenKeys:
        return self._keys


def _client(session: Any, settings: S3Settings) -> Any:
    """Signing is ours, as is sending (`_bucket`): a deadline holds for all of a call."""
    config = Config(
        signature_version=UNSIGNED,
        retries={"total_max_attempts": 1},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": settings.addressing_style},
    )
    region = settings.region or session.get_config_variable("region") or _DEFAULT_REGION
    made: Any = boto3.session.Session(botocore_session=session, region_name=region)
    return made.client("s3", endpoint_url=settings.endpoint_url, config=config)


def _target(client: Any, settings: S3Settings) -> Target:
    """The parts of the URL that boto3 would use for an object."""
    signed: str = client.generate_presigned_url(
        "get_object", Params={"Bucket": settings.bucket, "Key": _NAME_THAT_NEEDS_NO_ESCAPE}
    )
    url = urlsplit(signed)
    assert url.hostname is not None
    is_tls = url.scheme == "https"
    return Target(
        host=url.hostname,
        port=url.port or (443 if is_tls else 80),
        authority=url.netloc,
        is_tls=is_tls,
        root=url.path.removesuffix(_NAME_THAT_NEEDS_NO_ESCAPE),
        region=client.meta.region_name,
    )


def _ca_file(session: Any) -> str | None:
    named: str | None = session.get_config_variable("ca_bundle")
    return named or botocore.httpsession.get_cert_path(True)


def _expires(credentials: Any, within_s: float) -> bool:
    return bool(credentials.refresh_needed(refresh_in=within_s))
