"""What boto3 does for the backend: the configuration, the endpoint and the source of credentials."""

from __future__ import annotations

import functools
import ssl
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
import botocore.exceptions
import botocore.httpsession
import botocore.session
from botocore import UNSIGNED
from botocore.config import Config

from hicache_backends.s3.credentials import CredentialCache
from hicache_backends.s3.signing import Keys
from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_backends.s3.credentials import Credentials
    from hicache_backends.s3.settings import S3Settings

_NAME_THAT_NEEDS_NO_ESCAPE = "name"
_DEFAULT_REGION = "us-east-1"
_CONFIG_FILE_ERRORS = (
    botocore.exceptions.ProfileNotFound,
    botocore.exceptions.ConfigNotFound,
    botocore.exceptions.ConfigParseError,
    botocore.exceptions.InfiniteLoopConfigError,
    botocore.exceptions.PartialCredentialsError,
)
"""Errors whose text contains only the names of files, profiles and fields, but no secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a bucket is, as found by boto3."""

    host: str
    """The host to connect to, which is also the name in its certificate."""
    port: int
    authority: str
    """The value of the header `host`."""
    is_tls: bool
    root: str
    """The beginning of every object's path."""
    region: str


class Access:
    """A boto3 client that does not sign, and the target and certificates of the same configuration."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        with _config_errors():
            session = _session(settings)
            self.client: Any = _client(session, settings)
            self.target = _target(self.client, settings)
            self._ca_file: str | None = settings.ca_file or _ca_file(session)

    def credential_cache(self) -> CredentialCache:
        """Return a cache for the credentials of one process.

        The cache has no keys yet, unless the config contains some.
        """
        wanted = self._settings
        if wanted.anonymous:
            return CredentialCache(None)
        if wanted.access_key_id is None or wanted.secret_access_key is None:
            return CredentialCache(self._find_credentials)
        token = wanted.session_token.get_secret_value() if wanted.session_token else None
        secret_key = wanted.secret_access_key.get_secret_value()
        return CredentialCache(None, Keys(wanted.access_key_id, secret_key, token))

    def _find_credentials(self) -> Credentials:
        """Find the credentials in a new botocore session, because a session caches what it found.

        If the issuer of credentials fails, this raises what botocore raises.
        """
        try:
            return _credentials(_session(self._settings), self._settings)
        except _CONFIG_FILE_ERRORS as error:
            raise _config_error(error) from None

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS settings for connections to the target.

        Raises:
            ConfigError: The file of certificates can't be read.
        """
        try:
            context = ssl.create_default_context(cafile=self._ca_file)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConfigError(f"s3: ca_file: {self._ca_file} can't be used: {reason}") from None
        if not self._settings.tls_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["http/1.1"])
        return context


@contextmanager
def _config_errors() -> Generator[None, None, None]:
    """Translate botocore's errors about a configuration, whose text may contain secrets."""
    try:
        yield
    except _CONFIG_FILE_ERRORS as error:
        raise _config_error(error) from None
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"s3: the AWS configuration is wrong ({type(error).__name__}): check region, endpoint_url,"
            " the variables AWS_* and ~/.aws/config"
        ) from None


def _config_error(error: Exception) -> ConfigError:
    is_profile = isinstance(error, botocore.exceptions.ProfileNotFound)
    field = "profile" if is_profile else "the AWS configuration is wrong"
    return ConfigError(f"s3: {field}: {error}")


@functools.cache
def _models() -> Any:
    """Return botocore's loader of service models.

    All sessions share one, because it reads and caches megabytes.
    """
    return botocore.session.Session().get_component("data_loader")


def _session(settings: S3Settings) -> Any:
    session = botocore.session.Session(profile=settings.profile)
    session.register_component("data_loader", _models())
    if settings.credentials_file is not None:
        session.set_config_variable("credentials_file", settings.credentials_file)
    return session


def _credentials(session: Any, settings: S3Settings) -> Credentials:
    found: Credentials | None = session.get_credentials()
    if found is None:
        where = f" in profile {settings.profile}" if settings.profile else ""
        raise ConfigError(
            f"s3: no credentials were found{where}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,"
            " credentials_file or profile, or anonymous to true"
        )
    return found


def _client(session: Any, settings: S3Settings) -> Any:
    """Return a boto3 client that neither signs nor sends.

    The backend does both itself, so that a deadline applies to whole calls.
    """
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
    """Return the parts of the URL that boto3 would use for an object."""
    signed: str = client.generate_presigned_url(
        "get_object", Params={"Bucket": settings.bucket, "Key": _NAME_THAT_NEEDS_NO_ESCAPE}
    )
    url = urlsplit(signed)
    assert url.hostname is not None
    if "@" in url.netloc:  # from the environment, so `S3Settings` did not check it
        raise ConfigError(
            f"s3: endpoint_url: {url.hostname} has a user name, which S3 does not use"
        )
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
