"""What S3's answers and botocore's errors mean. The table is in docs/object-stores.md."""

from __future__ import annotations

import errno
from typing import Any

from neuron_store_backends._trouble import (
    GARBLED,
    Kind,
    Trouble,
    chain,
    network_trouble,
    tls_trouble,
)

__all__ = ["NO_UPLOAD", "classify"]

_BUCKET = "the bucket does not exist there; check its name, the region and the endpoint, or make it"
_CREDENTIALS = (
    "no usable credentials; give them by the AWS chain (AWS_PROFILE, environment, role), "
    "or set anon=1 for a public bucket"
)
_DENIED = (
    "access denied; the credentials need s3:GetObject, s3:PutObject and s3:ListBucket here "
    "(without the last, S3 answers 403 for an object that is not there)"
)
_EXPIRED = "the credentials have expired; renew them (aws sso login, a new session token)"
_CLOCK = "this machine's clock is off by more than S3 accepts; set it"
_KEYS = "the access key is not known there, or does not match its secret; check the credentials"
_NO_S3 = (
    "the server answers 404 and not S3's NoSuchKey; is this an S3 endpoint? "
    "check endpoint_url in the tier's URL"
)
NO_UPLOAD = "the upload was aborted by somebody else (a life-cycle rule?)"
_REGION = "the bucket is in another region; set region=... in the tier's URL"

# By the error code of the answer; what is not here goes by the HTTP status.
_BY_CODE = {
    "NoSuchKey": Trouble(Kind.MISSING, "not there", errno.ENOENT),
    "NoSuchBucket": Trouble(Kind.FATAL, _BUCKET, errno.ENOENT),
    "NoSuchUpload": Trouble(Kind.FATAL, NO_UPLOAD),
    "PreconditionFailed": Trouble(Kind.PRECONDITION, "the condition did not hold"),
    "ConditionalRequestConflict": Trouble(Kind.CONFLICT, "another writer is at work (409)"),
    "OperationAborted": Trouble(Kind.CONFLICT, "another writer is at work (409)"),
    "SlowDown": Trouble(Kind.THROTTLED, "the store asks to slow down", errno.EBUSY),
    "Throttling": Trouble(Kind.THROTTLED, "the store asks to slow down", errno.EBUSY),
    "ThrottlingException": Trouble(Kind.THROTTLED, "the store asks to slow down", errno.EBUSY),
    "RequestLimitExceeded": Trouble(Kind.THROTTLED, "the store asks to slow down", errno.EBUSY),
    "RequestTimeout": Trouble(Kind.TRANSIENT, "the store waited too long for us", errno.ETIMEDOUT),
    "IncompleteBody": Trouble(Kind.TRANSIENT, "the store got a body cut short"),
    "BadDigest": Trouble(Kind.TRANSIENT, "the store got other bytes than were sent"),
    "XAmzContentSHA256Mismatch": Trouble(Kind.TRANSIENT, "the store got other bytes than sent"),
    "ExpiredToken": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "ExpiredTokenException": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "TokenRefreshRequired": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "InvalidToken": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "InvalidAccessKeyId": Trouble(Kind.DENIED, _KEYS, errno.EACCES),
    "SignatureDoesNotMatch": Trouble(Kind.DENIED, _KEYS, errno.EACCES),
    "RequestTimeTooSkewed": Trouble(Kind.DENIED, _CLOCK, errno.EACCES),
    "AuthorizationHeaderMalformed": Trouble(Kind.FATAL, _REGION, errno.EINVAL),
    "PermanentRedirect": Trouble(Kind.FATAL, _REGION, errno.EREMCHG),
    "TemporaryRedirect": Trouble(Kind.TRANSIENT, "the store redirects (a new bucket)"),
    "IllegalLocationConstraintException": Trouble(Kind.FATAL, _REGION, errno.EINVAL),
    "InvalidBucketName": Trouble(Kind.FATAL, _BUCKET, errno.EINVAL),
    "QuotaExceeded": Trouble(Kind.FATAL, "the store is full; free space", errno.ENOSPC),
}
_BY_STATUS = {
    301: Trouble(Kind.FATAL, _REGION, errno.EREMCHG),
    401: Trouble(Kind.DENIED, _CREDENTIALS, errno.EACCES),
    403: Trouble(Kind.DENIED, _DENIED, errno.EACCES),
    # An object that is not there has the code NoSuchKey: any web server says 404.
    404: Trouble(Kind.FATAL, _NO_S3, errno.ENOENT),
    409: Trouble(Kind.CONFLICT, "another writer is at work (409)"),
    412: Trouble(Kind.PRECONDITION, "the condition did not hold"),
    416: Trouble(Kind.BEYOND, "the object ends before the range"),
    429: Trouble(Kind.THROTTLED, "the store asks to slow down", errno.EBUSY),
    503: Trouble(Kind.THROTTLED, "the store is busy (503)", errno.EBUSY),
    507: Trouble(Kind.FATAL, "the store is full; free space", errno.ENOSPC),
}
# By name of the botocore exception, so that nothing need be imported to look one up.
_BY_CLIENT = {
    "NoCredentialsError": Trouble(Kind.DENIED, _CREDENTIALS, errno.EACCES),
    "PartialCredentialsError": Trouble(Kind.DENIED, _CREDENTIALS, errno.EACCES),
    "CredentialRetrievalError": Trouble(Kind.EXPIRED, _CREDENTIALS, errno.EACCES),
    "MetadataRetrievalError": Trouble(Kind.EXPIRED, _CREDENTIALS, errno.EACCES),
    "TokenRetrievalError": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "UnauthorizedSSOTokenError": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "SSOTokenLoadError": Trouble(Kind.EXPIRED, _EXPIRED, errno.EACCES),
    "ProfileNotFound": Trouble(
        Kind.FATAL, "the AWS profile does not exist; check profile=... and ~/.aws/config"
    ),
    "NoRegionError": Trouble(Kind.FATAL, "no region; set region=... in the tier's URL"),
    "InvalidRegionError": Trouble(Kind.FATAL, "no such region; check region=..."),
    "ParamValidationError": Trouble(Kind.FATAL, _BUCKET, errno.EINVAL),
    "ConnectTimeoutError": Trouble(
        Kind.UNREACHABLE, "no connection in time; check endpoint and network", errno.ETIMEDOUT
    ),
    "ReadTimeoutError": Trouble(Kind.TRANSIENT, "no answer in time", errno.ETIMEDOUT),
    "UnreadableBundle": Trouble(
        Kind.FATAL,
        "the file of CA certificates cannot be read; check AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, "
        "and ca_bundle in ~/.aws/config",
    ),
    "SSLError": tls_trouble(),
}
_BROKEN = Trouble(Kind.TRANSIENT, "the connection broke, or a body was cut short", errno.ECONNRESET)
_BROKEN_NAMES = frozenset(
    {
        "ClientError",
        "HTTPClientError",
        "HTTPException",
        "IncompleteReadError",
        "ProtocolError",
        "ResponseParserError",
    }
)
_NO_ENDPOINT = Trouble(
    Kind.UNREACHABLE, "cannot connect; check the endpoint, and that the server runs"
)


def classify(error: BaseException) -> Trouble:
    """What an error of botocore, or an answer of the server, means."""
    for each in chain(error):
        response = getattr(each, "response", None)
        if isinstance(response, dict) and "Error" in response:
            return _answered(response)
    names = [base.__name__ for each in chain(error) for base in type(each).__mro__]
    if "EndpointConnectionError" in names:
        # Before the table: urllib3's own error below it counts itself among the time-outs.
        return network_trouble(error) or _NO_ENDPOINT
    for name in names:
        if name in _BY_CLIENT:
            return _BY_CLIENT[name]
    trouble = network_trouble(error)
    if trouble is not None:
        return trouble
    if not _BROKEN_NAMES.isdisjoint(names):
        return _BROKEN
    if isinstance(error, ValueError):
        return GARBLED
    return Trouble(Kind.FATAL, f"unexpected {type(error).__name__}")


def _answered(response: dict[str, Any]) -> Trouble:
    code = str(response["Error"].get("Code", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if not isinstance(status, int):
        status = int(code) if code.isdigit() else 0
    found = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if found is not None:
        return found
    if status >= 500:
        return Trouble(Kind.TRANSIENT, f"the store stumbled ({status})")
    return Trouble(Kind.FATAL, f"the store refused the request ({status} {code[:60]})")
